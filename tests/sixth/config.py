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
                "system": {
                    "style": "coda_tiny",
                    "top_k": 3,
                    "max_turns": 3,
                    "max_tokens": 24,
                    "as_chat_turns": True,
                },
                "width": 2,
                "branching_depth": 2,
            },
            "data": {"world": {"seed": 0, "size": 60}},
            "objective": {"critic": "own", "advantage": "whitened_gae"},
            "optimizer": {"policy_lr": 4e-4, "value_lr": 1e-3},
            "run": {"steps": 1, "questions_per_step": 3, "dev_questions": 4},
            "shapes": {"prompt_lengths": (160,), "batch_sizes": (8,), "max_new_tokens": 24},
            "packing": {"row_lengths": (192,), "tokens_per_device": 768},
        }
    )
