"""Auto-RAG on the embedded default, which is trained by imitation alone: a warm-up is all of it.

    ragrl warmup --config=configs/tiny/warmup_auto_rag.py --out=DIR
    ragrl evaluate --systems auto_rag ... --policy DIR/checkpoint

Yu et al. 2024. The shipped policy learns the form from the careful teacher; then the teacher often
takes the value of the wrong passage, and only traces that end with a right answer are kept.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "seed": 0,
            "start": "tiny",
            "learning_rate": 0.01,
            "tokens": 6144,
            "buckets": (48, 80, 112, 144, 176, 224, 288, 352),
            "prompt_weight": 0.0,
            "log_every": 25,
            "system": "jax_ragrl.systems.baselines.executor",
            "recipe": {
                "kind": "auto_rag",
                "style": "coda_tiny",
                "top_k": 3,
                "max_turns": 6,
                "max_tokens": 56,
                "temperature": 1.0,
                "chat": True,
            },
            "stages": (
                {
                    "steps": 360,
                    "teacher": {},
                    "passages": (2, 3, 3),
                    "worlds_from": 8_000_000,
                    "facts": 0,
                    "hops": (1, 2),
                },
                {
                    "steps": 80,
                    "teacher": {"misread": 0.5},
                    "passages": (3,),
                    "worlds_from": 8_100_000,
                    "only_correct": True,
                    "facts": 0,
                    "hops": (1, 2),
                },
            ),
        }
    )
