"""The warm start of CoDA on the embedded default, from the shipped policy.

    ragrl warmup --config=configs/tiny/warmup_coda.py --out=DIR

A few minutes on two cores: the policy already finds and copies facts, and learns other forms.
The teacher is careful first; then its planner mostly answers with the first result that it gets.
That habit is what training has to undo.
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
            "system": "coda",
            "recipe": {
                "style": "coda_tiny",
                "top_k": 3,
                "max_turns": 4,
                "executor_turns": 3,
                "max_tokens": 56,
                "temperature": 1.0,
                "chat": True,
                "rollouts": 6,
                "together": True,
                "refining": True,
            },
            "stages": (
                {
                    "steps": 360,
                    "teacher": {},
                    "passages": (2, 3, 3),
                    "worlds_from": 5_000_000,
                    "facts": 0,
                    "hops": (1, 2),
                },
                {
                    "steps": 80,
                    "teacher": {"early_stop": 0.75},
                    "passages": (3,),
                    "worlds_from": 5_100_000,
                    "facts": 0,
                    "hops": (1, 2),
                },
            ),
        }
    )
