"""The warm start of MMOA-RAG on the synthetic corpus, from the shipped policy.

    ragrl warmup tiny --config=configs/tiny/warmup_mmoa_rag.py --out=DIR

It takes a few minutes on two cores: the policy can already find and copy facts, and learns another
format. The teacher is careful first. Then its selector usually keeps only the first passage, and
its rewriter copies half of the questions: the habits that training has to undo.
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
            "system": "mmoa_rag",
            "recipe": {
                "system": {
                    "style": "mmoa_rag_tiny",
                    "modules": "QR+S+G",
                    "top_k": 4,
                    "document_word": "D",
                    "rewriter_max_tokens": 40,
                    "selector_max_tokens": 12,
                    "generator_max_tokens": 16,
                    "temperature": 1.0,
                    "top_p": 1.0,
                },
                "penalties": {
                    "rewriter": -0.5,
                    "query_rule": "count",
                    "selector": -1.0,
                    "generator": -0.5,
                    "max_answer_words": 30,
                },
            },
            "stages": (
                {
                    "steps": 300,
                    "teacher": {"document_word": "D"},
                    "passages_per_search": (4,),
                    # Each stage has its own range of seeds, which no evaluation uses.
                    "first_world_seed": 6_000_000,
                    "known_facts_per_world": 0,
                    "hops": (1,),
                },
                {
                    "steps": 100,
                    "teacher": {"document_word": "D", "p_copy_question": 0.5, "p_keep_first": 0.7},
                    "passages_per_search": (4,),
                    "first_world_seed": 6_100_000,
                    "known_facts_per_world": 0,
                    "hops": (1,),
                },
            ),
        }
    )
