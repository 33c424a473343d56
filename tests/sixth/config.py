"""The sixth system on the embedded default.

PYTHONPATH=. ragrl train --config=tests/sixth/config.py --workdir=runs/sixth
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "seed": 0,
            "policy": "tiny",
            "system": "tests.sixth.search_tree",
            "recipe": {
                "agent": {
                    "style": "coda_tiny",
                    "top_k": 3,
                    "max_turns": 3,
                    "sampling": {"temperature": 1.0, "max_tokens": 24},
                    "chat": True,
                },
                "width": 2,
                "until": 2,
            },
            "data": {"world": {"seed": 0, "size": 60}},
            "objective": {"critic": "own", "advantage": "whitened_gae"},
            "optimizer": {"policy_lr": 4e-4, "value_lr": 1e-3},
            "run": {"steps": 1, "questions": 3, "dev_questions": 4},
            "shapes": {"lengths": (160,), "batches": (8,), "steps": 24},
            "layout": {"lengths": (192,), "tokens": 768},
        }
    )
