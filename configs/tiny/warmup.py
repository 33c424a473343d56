"""The warm start of the quickstart's policy, from random weights to `jax_ragrl/data/tiny`.

    ragrl warmup --config=configs/tiny/warmup.py --out=DIR

A decoder of 1.1M parameters (Qwen3 layout) and a byte-level tokenizer of 1,024 ids.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    skills = {"style": "c3po_tiny", "greedy_filter": 0.15, "early_stop": 0.0}
    careless = {"style": "c3po_tiny", "greedy_filter": 0.65, "early_stop": 0.2}
    return ConfigDict(
        {
            "seed": 0,
            "learning_rate": 0.02,
            "tokens": 6144,
            "buckets": (48, 80, 112, 144, 176, 224),
            "prompt_weight": 0.1,
            "log_every": 50,
            "model": {
                "vocab_size": 1024,
                "hidden_size": 128,
                "intermediate_size": 256,
                "num_layers": 6,
                "num_heads": 4,
                "num_kv_heads": 4,
                "head_dim": 32,
                "rope_theta": 1e4,
            },
            "system": "c3po",
            "recipe": {
                "system": {
                    "style": "c3po_tiny",
                    "top_k": 4,
                    "max_depth": 13,
                    "max_documents": 6,
                    "max_tokens": 48,
                    "temperature": 1.0,
                },
            },
            "stages": (
                {"steps": 400, "teacher": skills, "passages": (1, 2), "worlds_from": 1_000_000},
                {"steps": 400, "teacher": skills, "passages": (1, 2, 3), "worlds_from": 2_000_000},
                {
                    "steps": 1300,
                    "teacher": skills,
                    "passages": (2, 3, 4, 4),
                    "worlds_from": 3_000_000,
                },
                {
                    "steps": 300,
                    "teacher": careless,
                    "passages": (4,),
                    "worlds_from": 4_000_000,
                    "only_correct": True,
                },
            ),
        }
    )
