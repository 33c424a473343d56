"""Tree-GRPO on the synthetic corpus with a tiny policy, on two CPU cores.

    ragrl warmup tiny --config=configs/tiny/warmup_auto_rag.py --out=runs/warm-auto_rag
    ragrl train --config=configs/tiny/tree_grpo.py --workdir=runs/tree_grpo \
        --config.policy=runs/warm-auto_rag/checkpoint

Ji et al. 2025. Two trees per question, each of a rollout and two that branch from it, as published.
The agent refines its search results, because Auto-RAG's warm-up teaches such turns; the paper's
agent is Search-R1's. Measured here: these few steps gain nothing over the warm-up, 25 % of the dev
questions throughout.
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
            "system": "jax_ragrl.systems.baselines.tree_grpo",
            "recipe": {
                "system": {
                    "kind": "autorefine",
                    "style": "coda_tiny",
                    "top_k": 3,
                    "max_turns": 4,
                    "max_tokens": 56,
                    "temperature": 1.0,
                    "top_p": 1.0,
                    "as_chat_turns": True,
                },
                "rollouts": 2,  # trees per question
                "rounds": 1,
                "actions": 2,  # of a tree in a round
            },
            # A synthetic corpus about 240 people. The reader has memorized 30 % of its facts.
            "data": {"world": {"seed": 0, "size": 240, "famous_fraction": 0.3}},
            "index": {"encoder": "hashed", "kind": "scann"},
            "objective": {
                "loss": "clipped_policy_loss",
                "critic": "none",
                "advantage": "group_normalised",
                "kl": {"where": "loss", "estimator": "k3", "coefficient": 0.001},
                "aggregation": "token_mean",
            },
            "optimizer": {"policy_lr": 4e-4, "schedule": "constant", "minibatches": 2},
            "run": {
                "steps": 18,
                "questions_per_step": 12,
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
