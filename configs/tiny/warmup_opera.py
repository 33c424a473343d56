"""The warm start of OPERA on the synthetic corpus, from the shipped policy.

    ragrl warmup tiny --config=configs/tiny/warmup_opera.py --out=DIR

It takes a few minutes on two cores: the policy can already find and copy facts, and learns another
format. The teacher is careful first. Then three plans in four are a single step, whose analysis
usually has to give up: the habit that training has to undo is to give up too soon.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "seed": 0,
            "policy": "tiny",  # the policy that ships with the package
            "learning_rate": 0.01,
            # Tokens per update, in rows of these lengths.
            "tokens_per_step": 6144,
            "row_lengths": (48, 80, 112, 144, 176, 224),
            "prompt_loss_weight": 0.0,  # learn the actions only
            "log_every": 25,
            "system": "opera",
            "recipe": {
                "system": {
                    "style": "opera_tiny",
                    "top_k": 2,
                    "max_plan_steps": 6,
                    "max_rewrites": 2,
                    "temperature": 1.0,
                    "max_tokens": (48, 40, 24),
                    "shared_policy": True,
                },
                "group_size": 6,
                "expert": {"when": "always", "replaces": "extra", "gradient": True},
                "expert_pool": "world",
                "gold": "world",
                "min_plan_steps": 1,
            },
            "stages": (
                {
                    "steps": 250,
                    "teacher": {},
                    "passages_per_search": (2, 2, 3),
                    # Each stage has its own range of seeds, which no evaluation uses.
                    "first_world_seed": 8_000_000,
                    "known_facts_per_world": 0,
                },
                {
                    "steps": 90,
                    "teacher": {"p_single_step": 0.75},
                    "passages_per_search": (2,),
                    "first_world_seed": 8_100_000,
                    "known_facts_per_world": 0,
                },
            ),
        }
    )
