"""The warm start of CoDA on the synthetic corpus, from the shipped policy.

    ragrl warmup tiny --config=configs/tiny/warmup_coda.py --out=DIR

It takes a few minutes on two cores: the policy can already find and copy facts, and learns another
format. The teacher is careful first. Then its planner usually answers with the first result that it
gets: the habit that training has to undo.
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
            "row_lengths": (48, 80, 112, 144, 176, 224, 288, 352),
            "prompt_loss_weight": 0.0,  # learn the actions only
            "log_every": 25,
            "system": "coda",
            "recipe": {
                "system": {
                    "style": "coda_tiny",
                    "top_k": 3,
                    "max_turns": 4,
                    "max_executor_turns": 3,
                    "max_tokens": 56,
                    "temperature": 1.0,
                    "as_chat_turns": True,
                    "refinement": True,
                },
                "rollouts": 6,
                "joint_executor_reward": True,
            },
            "stages": (
                {
                    "steps": 360,
                    "teacher": {},
                    "passages_per_search": (2, 3, 3),
                    # Each stage has its own range of seeds, which no evaluation uses.
                    "first_world_seed": 5_000_000,
                    "known_facts_per_world": 0,
                    "hops": (1, 2),
                },
                {
                    "steps": 80,
                    "teacher": {"p_early_stop": 0.75},
                    "passages_per_search": (3,),
                    "first_world_seed": 5_100_000,
                    "known_facts_per_world": 0,
                    "hops": (1, 2),
                },
            ),
        }
    )
