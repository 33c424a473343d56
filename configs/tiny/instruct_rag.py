"""InstructRAG on the synthetic corpus with a tiny policy, on two CPU cores.

    ragrl warmup sft --config=configs/tiny/instruct_rag.py --out=runs/instruct_rag
    ragrl data world --out runs/world && ragrl data index --corpus runs/world/passages.jsonl \
        --encoder hashed --out runs/index
    ragrl evaluate --systems instruct_rag --corpus runs/world/passages.jsonl \
        --questions runs/world/test.jsonl --index runs/index --llm runs/instruct_rag/checkpoint

Wei et al. 2025: the policy learns to write a rationale before its answer. The rule-based reader
writes the rationales: it states the facts that the documents contain on the way to the answer.
Questions whose documents do not contain the answer are left out.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "seed": 0,
            "policy": "tiny",  # the policy that ships with the package
            "examples": "explained",  # rationales, written by the model below
            "writer": {"kind": "world_reader"},
            "style": "baselines_tiny",
            "top_k": 4,
            "steps": 400,
            "batch_size": 32,  # examples per update
            "test_questions": 200,
            # A synthetic corpus about 240 people. The reader has memorized 30 % of its facts.
            "data": {"world": {"seed": 0, "size": 240, "famous_fraction": 0.3}},
            "index": {"encoder": "hashed", "kind": "scann"},
            "optimizer": {"policy_lr": 3e-3, "warmup_fraction": 0.1},
            # Prompts and batches are padded to these sizes: one compiled program per pair.
            "shapes": {
                "prompt_lengths": (80, 144, 256),
                "batch_sizes": (16, 64),
                "max_new_tokens": 64,
            },
            # Tokens per forward and backward pass, and the lengths of the packed rows.
            "packing": {"row_lengths": (112, 160, 256), "tokens_per_device": 1536},
        }
    )
