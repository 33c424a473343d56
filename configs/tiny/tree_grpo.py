"""Tree-GRPO on the embedded default: the generated encyclopedia, a tiny policy, two CPU cores.

    ragrl warmup --config=configs/tiny/warmup_auto_rag.py --out=runs/warm-auto_rag
    ragrl train --config=configs/tiny/tree_grpo.py --workdir=runs/tree_grpo \
        --config.policy=runs/warm-auto_rag/checkpoint

Ji et al. 2025. Four trees a question, each of which goes on twice at half of its later turns. The
agent refines what it found, since Auto-RAG's warm-up writes such turns; in the paper it is
Search-R1's. These few steps win nothing over that warm-up: 25 % of the dev questions throughout.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "seed": 0,
            "policy": "tiny",
            "mesh": (),
            "compute": "float32",
            "remat": "none",
            "system": "jax_ragrl.systems.baselines.tree_grpo",
            "recipe": {
                "agent": {
                    "kind": "autorefine",
                    "style": "coda_tiny",
                    "top_k": 3,
                    "max_turns": 4,
                    "max_tokens": 56,
                    "temperature": 1.0,
                    "top_p": 1.0,
                    "chat": True,
                    "rollouts": 4,
                },
                "tree": {"width": 2, "share": 0.5, "until": 3},
            },
            "data": {"world": {"seed": 0, "size": 240, "famous": 0.3}},
            "index": {"encoder": "lexical", "kind": "scann"},
            "objective": {
                "ratio": "clip",
                "critic": "none",
                "advantage": "tree_group",
                "kl": {"where": "loss", "estimator": "k3", "coefficient": 0.001},
                "aggregation": "token_mean",
            },
            "optimizer": {"policy_lr": 4e-4, "schedule": "constant", "minibatches": 2},
            "run": {
                "steps": 18,
                "questions": 12,
                "save_every": 6,
                "eval_every": 6,
                "dev_questions": 40,
                "test_questions": 400,
                "trees_every": 6,
                "trees": 2,
            },
            "shapes": {"lengths": (80, 160, 288), "batches": (16, 64), "steps": 56},
            "layout": {"lengths": (160, 352), "tokens": 2112},
        }
    )
