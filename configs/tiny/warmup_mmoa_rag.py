"""The warm start of MMOA-RAG on the embedded default, from the shipped policy.

    ragrl warmup --config=configs/tiny/warmup_mmoa_rag.py --out=DIR

A few minutes on two cores: the policy already finds and copies facts, and learns other forms.
The teacher is careful first; then its selector mostly keeps the first passage alone, and its
rewriter copies half of the questions. These habits are what training has to undo.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "seed": 0,
            "start": "tiny",
            "learning_rate": 0.01,
            "tokens": 6144,
            "buckets": (48, 80, 112, 144, 176, 224),
            "prompt_weight": 0.0,
            "log_every": 25,
            "system": "mmoa_rag",
            "recipe": {
                "system": {
                    "style": "mmoa_rag_tiny",
                    "modules": "QR+S+G",
                    "top_k": 4,
                    "word": "D",
                    "rewriter_tokens": 40,
                    "selector_tokens": 12,
                    "generator_tokens": 16,
                    "temperature": 1.0,
                    "top_p": 1.0,
                },
                "penalties": {
                    "rewriter": -0.5,
                    "queries": "count",
                    "selector": -1.0,
                    "generator": -0.5,
                    "words": 30,
                },
            },
            "stages": (
                {
                    "steps": 300,
                    "teacher": {"word": "D"},
                    "passages": (4,),
                    "worlds_from": 6_000_000,
                    "facts": 0,
                    "hops": (1,),
                },
                {
                    "steps": 100,
                    "teacher": {"word": "D", "lazy": 0.5, "hasty": 0.7},
                    "passages": (4,),
                    "worlds_from": 6_100_000,
                    "facts": 0,
                    "hops": (1,),
                },
            ),
        }
    )
