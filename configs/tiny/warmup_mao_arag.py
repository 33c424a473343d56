"""The warm start of MAO-ARAG on the embedded default, from the shipped policy.

    ragrl warmup --config=configs/tiny/warmup_mao_arag.py --out=DIR

A few minutes on two cores: the policy already finds and copies facts, and learns other forms.
Its teacher mostly searches once, whatever is asked, and plans at random now and then. That habit is
what training has to undo.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "seed": 0,
            "start": "tiny",
            "learning_rate": 0.01,
            "tokens": 6144,
            "buckets": (48, 80, 112),
            "prompt_weight": 0.0,
            "log_every": 25,
            "system": "mao_arag",
            "recipe": {
                "system": {
                    "style": "mao_arag_tiny",
                    "top_k": 4,
                    "max_turns": 5,
                    "max_tokens": 16,
                    "temperature": 1.0,
                },
                "costs": {"alpha": 0.1, "dollars_unit": 7e-5},
            },
            "stages": (
                {
                    "steps": 60,
                    "teacher": {"hasty": 0.6, "wander": 0.4, "swap": 0.5},
                    "passages": (4,),
                    "worlds_from": 7_000_000,
                    "facts": 0,
                },
            ),
        }
    )
