"""RRR and BGM on the embedded default: one trained module before a frozen reader, two CPU cores.

    ragrl warmup --config=configs/tiny/warmup_mmoa_rag.py --out=runs/warm-mmoa_rag
    ragrl train --config=configs/tiny/one_module.py:rrr --workdir=runs/rrr \
        --config.policy=runs/warm-mmoa_rag/checkpoint
    ragrl train --config=configs/tiny/one_module.py:bgm --workdir=runs/bgm ...

RRR (Ma et al. 2023) trains MMOA-RAG's query rewriter on exact match, F1 and whether the search
found an answer; BGM (Ke et al. 2024) trains its selector on the F1. The answer is the rule-based
reader's. Both are PPO with the KL in the reward, and without MMOA-RAG's penalties; the warm start
is MMOA-RAG's, where each paper makes one from its frozen model's successes.
"""

from ml_collections import ConfigDict

MODULES = {"rrr": "QR", "bgm": "S"}
REWARD = {"rrr": "em_f1_hit", "bgm": "f1"}


def get_config(preset: str = "rrr") -> ConfigDict:
    return ConfigDict(
        {
            "seed": 0,
            "policy": "tiny",
            "mesh": (),
            "compute": "float32",
            "remat": "none",
            "data": {"world": {"seed": 0, "size": 240, "famous": 0.3, "hops": (1,)}},
            "index": {"encoder": "lexical", "kind": "scann"},
            "llm": {"kind": "world_reader", "documents": 5, "noise": 0.1, "confusion": 0.35},
            "system": "mmoa_rag",
            "recipe": {
                "system": {
                    "style": "mmoa_rag_tiny",
                    "modules": MODULES[preset],
                    "top_k": 4,
                    "word": "D",
                    "rewriter_tokens": 40,
                    "selector_tokens": 12,
                    "generator_tokens": 16,
                    "temperature": 1.0,
                    "top_p": 1.0,
                },
                "penalties": {
                    "rewriter": 0.0,
                    "queries": "count",
                    "selector": 0.0,
                    "generator": 0.0,
                    "words": 30,
                },
                "reward": REWARD[preset],
                "rollouts": 1,
            },
            "objective": {
                "ratio": "clip",
                "critic": "own",
                "advantage": "whitened_gae",
                "gamma": 1.0,
                "lam": 0.95,
                "kl": {"where": "reward", "estimator": "k1", "coefficient": 0.01},
                "aggregation": "token_mean",
            },
            "optimizer": {"policy_lr": 8e-4, "value_lr": 1e-3, "epochs": 1, "minibatches": 4},
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
            "shapes": {"lengths": (80, 144, 256), "batches": (16, 64), "steps": 40},
            "layout": {"lengths": (112, 160, 256), "tokens": 1536},
        }
    )
