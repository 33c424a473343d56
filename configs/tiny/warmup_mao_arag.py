"""The warm start of MAO-ARAG on the synthetic corpus, from the shipped policy.

    ragrl warmup tiny --config=configs/tiny/warmup_mao_arag.py --out=DIR

It takes a few minutes on two cores: the policy can already find and copy facts, and learns another
format. Its teacher usually searches once, whatever the question, and sometimes plans at random: the
habit that training has to undo.
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
            "row_lengths": (48, 80, 112),
            "prompt_loss_weight": 0.0,  # learn the actions only
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
                "costs": {"alpha": 0.1, "dollars_per_cost_unit": 7e-5},
            },
            "stages": (
                {
                    "steps": 60,
                    "teacher": {
                        "p_single_search": 0.6,
                        "p_random_plan": 0.4,
                        "p_swap_decomposition": 0.5,
                    },
                    "passages_per_search": (4,),
                    # Each stage has its own range of seeds, which no evaluation uses.
                    "first_world_seed": 7_000_000,
                    "known_facts_per_world": 0,
                },
            ),
        }
    )
