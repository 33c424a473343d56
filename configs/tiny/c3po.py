"""C-3PO on the embedded default: the generated encyclopedia, a tiny policy, two CPU cores.

    ragrl quickstart                                    (or)
    ragrl train --config=configs/tiny/c3po.py --workdir=runs/c3po

Chen et al. 2025, "C-3PO". The tree, Monte Carlo credit, PPO with a critic of its own and the KL
coefficient are the paper's; learning rates and batch are scaled to the model.
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
            "data": {"world": {"seed": 0, "size": 240, "famous": 0.3}},
            "index": {"encoder": "lexical", "kind": "scann"},
            "llm": {"kind": "world_reader", "documents": 5, "noise": 0.1, "confusion": 0.35},
            "system": "c3po",
            "recipe": {
                "system": {
                    "style": "c3po_tiny",
                    "top_k": 4,
                    "max_depth": 13,
                    "max_documents": 6,
                    "roadmaps": 1,
                    "strict": True,
                    "hint": "",
                    "max_tokens": 40,
                    "temperature": 1.0,
                },
                "tree": {
                    "width": 2,
                    "until": 4,
                    "free": 1,
                    "retrieval": "prefix",
                    "dead_leaf": "zero",
                    "multiplicity": False,
                },
            },
            "objective": {
                "ratio": "clip",
                "critic": "own",
                "advantage": "whitened_gae",
                "gamma": 1.0,
                "lam": 0.95,
                "kl": {"where": "reward", "estimator": "k1", "coefficient": 0.005},
                "aggregation": "role_sum",
            },
            "optimizer": {"policy_lr": 8e-4, "value_lr": 1e-3, "epochs": 1, "minibatches": 3},
            "run": {
                "steps": 28,
                "questions": 14,
                "save_every": 7,
                "eval_every": 7,
                "dev_questions": 40,
                "test_questions": 400,
                "trees_every": 7,
                "trees": 2,
            },
            "shapes": {"lengths": (80, 144, 256), "batches": (16, 64), "steps": 40},
            "layout": {"lengths": (112, 160, 256), "tokens": 1536},
        }
    )
