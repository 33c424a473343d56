"""CoDA on the synthetic corpus with a tiny policy, on two CPU cores.

    ragrl warmup tiny --config=configs/tiny/warmup_coda.py --out=runs/warm-coda
    ragrl train --config=configs/tiny/coda.py --workdir=runs/coda \
        --config.policy=runs/warm-coda/checkpoint

From the paper: reward, group statistics and objective. Scaled to the model: turns, groups, learning
rate, KL and batch; observations are turns of the chat template. Questions have at most two hops: a
decoder of this size misreads longer chains, whatever its planner does.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "seed": 0,
            "policy": "tiny",  # the policy that ships with the package
            "mesh": (),  # the first device
            "compute_dtype": "float32",
            "remat": "none",  # a small model: activations fit in memory
            "system": "coda",
            "recipe": {
                "system": {
                    "style": "coda_tiny",
                    "top_k": 3,
                    "max_turns": 4,
                    "max_executor_turns": 3,  # per task of the planner
                    "max_tokens": 56,
                    "temperature": 1.0,
                    "top_p": 1.0,
                    "as_chat_turns": True,
                    "refinement": True,
                },
                "rollouts": 6,  # per question: the group
                "format_weight": 1.0,
                "refinement_weight": 0.5,
                "joint_executor_reward": True,
            },
            # A synthetic corpus about 240 people. The reader has memorized 30 % of its facts.
            "data": {"world": {"seed": 0, "size": 240, "famous_fraction": 0.3, "hops": (1, 2)}},
            "index": {"encoder": "hashed", "kind": "scann"},
            "objective": {
                "loss": "dual_clipped_policy_loss",
                "critic": "none",
                "advantage": "group_normalised",
                "kl": {"where": "loss", "estimator": "k3", "coefficient": 0.01},
                "entropy_coefficient": 0.001,
                "aggregation": "token_mean",
            },
            "optimizer": {"policy_lr": 6e-4, "schedule": "cosine", "minibatches": 5},
            "run": {
                "steps": 18,
                "questions_per_step": 10,
                "save_every": 6,
                "eval_every": 6,
                "dev_questions": 40,
                "test_questions": 400,
                # Trees for the report: how often they are saved, and how many.
                "save_trees_every": 6,
                "trees_per_save": 2,
            },
            # Prompts and batches are padded to these sizes: one compiled program per pair.
            "shapes": {
                "prompt_lengths": (80, 160, 288),
                "batch_sizes": (16, 64),
                "max_new_tokens": 56,
            },
            # Tokens per forward and backward pass, and the lengths of the packed rows.
            "packing": {"row_lengths": (160, 352), "tokens_per_device": 2112},
        }
    )
