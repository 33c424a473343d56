"""The warm start of OPERA on the embedded default, from the shipped policy.

    ragrl warmup --config=configs/tiny/warmup_opera.py --out=DIR

A few minutes on two cores: the policy already finds and copies facts, and learns other forms.
The teacher is careful first; then three plans in four are a single step, whose analysis mostly has
to give up. Giving up too soon is the habit that training has to undo.
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
            "system": "opera",
            "recipe": {
                "style": "opera_tiny",
                "top_k": 2,
                "max_steps": 6,
                "max_rewrites": 2,
                "temperature": 1.0,
                "max_tokens": (48, 40, 24),
                "shared": True,
                "group": 6,
                "expert": {"when": "always", "replaces": "extra", "gradient": True},
                "pool": "world",
                "gold": "world",
                "least_steps": 1,
            },
            "stages": (
                {
                    "steps": 250,
                    "teacher": {},
                    "passages": (2, 2, 3),
                    "worlds_from": 8_000_000,
                    "facts": 0,
                },
                {
                    "steps": 90,
                    "teacher": {"single_step": 0.75},
                    "passages": (2,),
                    "worlds_from": 8_100_000,
                    "facts": 0,
                },
            ),
        }
    )
