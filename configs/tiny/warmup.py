"""The warm start of the quickstart's policy, from random weights to `jax_ragrl/data/tiny`.

    ragrl warmup tiny --config=configs/tiny/warmup.py --out=DIR

The model is a decoder of 1.1M parameters (Qwen3 layout) with a byte-level tokenizer of 1,024 ids.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    # Probabilities of mistakes; the last stage makes more, and keeps correct traces only.
    skills = {"style": "c3po_tiny", "p_keep_related": 0.15, "p_early_stop": 0.0}
    careless = {"style": "c3po_tiny", "p_keep_related": 0.65, "p_early_stop": 0.2}
    return ConfigDict(
        {
            "seed": 0,
            "learning_rate": 0.02,
            # Tokens per update, in rows of these lengths.
            "tokens_per_step": 6144,
            "row_lengths": (48, 80, 112, 144, 176, 224),
            "prompt_loss_weight": 0.1,  # a policy from random weights also learns its prompts
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
                {
                    "steps": 400,
                    "teacher": skills,
                    "passages_per_search": (1, 2),
                    "first_world_seed": 1_000_000,
                },
                {
                    "steps": 400,
                    "teacher": skills,
                    "passages_per_search": (1, 2, 3),
                    "first_world_seed": 2_000_000,
                },
                {
                    "steps": 1300,
                    "teacher": skills,
                    "passages_per_search": (2, 3, 4, 4),
                    "first_world_seed": 3_000_000,
                },
                {
                    "steps": 300,
                    "teacher": careless,
                    "passages_per_search": (4,),
                    "first_world_seed": 4_000_000,
                    "only_correct": True,
                },
            ),
        }
    )
