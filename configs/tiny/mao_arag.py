"""MAO-ARAG on the embedded default: the generated encyclopedia, a tiny planner, two CPU cores.

    ragrl warmup --config=configs/tiny/warmup_mao_arag.py --out=runs/warm-mao_arag
    ragrl train --config=configs/tiny/mao_arag.py --workdir=runs/mao_arag \
        --config.policy=runs/warm-mao_arag/checkpoint

Chen et al. 2025, "MAO-ARAG: Multi-Agent Orchestration for Adaptive Retrieval-Augmented Generation".
The world's rule-based reader plays the executors. Rewards, the limit of turns and
the equal weights of costs are the paper's; learning rates, lengths and batch are scaled to the
model. The unit of token costs is, as in the paper, what the dearest workflow costs: rewriter,
selector and answer take 5.1e-5 dollars here, a summary 1.4e-5 to 2.1e-5.
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
            "system": "mao_arag",
            "recipe": {
                "system": {
                    "style": "mao_arag_tiny",
                    "top_k": 4,
                    "max_turns": 5,
                    "max_tokens": 16,
                    "temperature": 1.0,
                    "select_needs_search": False,
                    "executors": ("QDS", "QDP", "QR", "R", "DS", "AG"),
                },
                "costs": {
                    "alpha": 0.1,
                    "token": 1.0,
                    "retrieval": 1.0,
                    "turn": 1.0,
                    "dollars_in": 0.000225,
                    "dollars_out": 0.0009,
                    "dollars_unit": 7e-5,
                },
            },
            "objective": {
                "ratio": "clip",
                "critic": "own",
                "advantage": "whitened_gae",
                "gamma": 1.0,
                "lam": 1.0,
                "kl": {"where": "terminal", "estimator": "k1", "coefficient": 0.001},
                "aggregation": "token_mean",
            },
            "optimizer": {"policy_lr": 8e-4, "value_lr": 1e-3, "epochs": 1, "minibatches": 2},
            "run": {
                "steps": 18,
                "questions": 64,
                "save_every": 6,
                "eval_every": 6,
                "dev_questions": 40,
                "test_questions": 400,
                "trees_every": 6,
                "trees": 2,
            },
            "shapes": {"lengths": (80,), "batches": (16, 64), "steps": 16},
            "layout": {"lengths": (112,), "tokens": 1536},
        }
    )
