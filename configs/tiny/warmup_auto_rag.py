"""Auto-RAG on the synthetic corpus: imitation only, so that the warm-up is its whole training.

    ragrl warmup tiny --config=configs/tiny/warmup_auto_rag.py --out=DIR
    ragrl evaluate --systems auto_rag ... --policy DIR/checkpoint
    ragrl warmup tiny --config=configs/tiny/warmup_auto_rag.py:search_r1 ...    (another agent)

Yu et al. 2024. The shipped policy first learns the format from a careful teacher. Then the teacher
often takes a value from the wrong passage, and only traces with a correct answer are kept.
"""

from ml_collections import ConfigDict


def get_config(kind: str = "auto_rag") -> ConfigDict:
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
            "system": "jax_ragrl.systems.baselines.executor",
            "recipe": {
                "system": {
                    "kind": kind,
                    "style": "coda_tiny",
                    "top_k": 3,
                    "max_turns": 6,
                    "max_tokens": 56,
                    "temperature": 1.0,
                    "as_chat_turns": True,
                },
            },
            "stages": (
                {
                    "steps": 360,
                    "teacher": {},
                    "passages_per_search": (2, 3, 3),
                    # Each stage has its own range of seeds, which no evaluation uses.
                    "first_world_seed": 8_000_000,
                    "known_facts_per_world": 0,
                    "hops": (1, 2),
                },
                {
                    "steps": 80,
                    "teacher": {"p_misread": 0.5},
                    "passages_per_search": (3,),
                    "first_world_seed": 8_100_000,
                    "only_correct": True,
                    "known_facts_per_world": 0,
                    "hops": (1, 2),
                },
            ),
        }
    )
