"""Search-R1 on the synthetic corpus with a tiny policy, on two CPU cores.

    ragrl warmup tiny --config=configs/tiny/warmup_auto_rag.py:search_r1 --out=runs/warm-search_r1
    ragrl train --config=configs/tiny/search_r1.py --workdir=runs/search_r1 \
        --config.policy=runs/warm-search_r1/checkpoint
    ragrl train --config=configs/tiny/search_r1.py:ppo ...     (with a critic, no groups)

Jin et al. 2025. GRPO compares five rollouts per question and has its KL in the loss. PPO has one
rollout per question, its KL in the reward, and a critic, whose GAE (gamma and lambda 1) runs over
the turns of a rollout as one conversation. Scaled to the model: learning rates, lengths and batch.
"""

from ml_collections import ConfigDict

ROLLOUTS = {"grpo": 5, "ppo": 1}
OBJECTIVE = {
    "grpo": {
        "critic": "none",
        "advantage": "group_normalised",
        "kl": {"where": "loss", "estimator": "k3", "coefficient": 0.001},
    },
    "ppo": {
        "critic": "own",
        "advantage": "whitened_gae",
        "gae_span": "conversation",
        "gamma": 1.0,
        "lam": 1.0,
        "kl": {"where": "reward", "estimator": "k1", "coefficient": 0.001},
    },
}
QUESTIONS = {"grpo": 12, "ppo": 60}


def get_config(preset: str = "grpo") -> ConfigDict:
    return ConfigDict(
        {
            "seed": 0,
            "policy": "tiny",  # the policy that ships with the package
            "mesh": (),  # the first device
            "compute_dtype": "float32",
            "remat": "none",  # a small model: activations fit in memory
            "system": "jax_ragrl.systems.baselines.executor",
            "recipe": {
                "system": {
                    "kind": "search_r1",
                    "style": "coda_tiny",
                    "top_k": 3,
                    "max_turns": 3,
                    "max_tokens": 56,
                    "temperature": 1.0,
                    "top_p": 1.0,
                    "as_chat_turns": True,
                },
                "rollouts": ROLLOUTS[preset],
            },
            # A synthetic corpus about 240 people. The reader has memorized 30 % of its facts.
            "data": {"world": {"seed": 0, "size": 240, "famous_fraction": 0.3, "hops": (1, 2)}},
            "index": {"encoder": "hashed", "kind": "scann"},
            "objective": {
                "loss": "clipped_policy_loss",
                "aggregation": "token_mean",
                **OBJECTIVE[preset],
            },
            "optimizer": {
                "policy_lr": 4e-4,
                "value_lr": 1e-3,
                "schedule": "constant",
                "minibatches": 2,
            },
            "run": {
                "steps": 18,
                "questions_per_step": QUESTIONS[preset],
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
