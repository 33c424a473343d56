"""InstructRAG on the embedded default: the tiny policy learns to explain, then to answer.

    ragrl sft --config=configs/tiny/instruct_rag.py --out=runs/instruct_rag
    ragrl world --out runs/world && ragrl index --corpus runs/world/passages.jsonl --out runs/index
    ragrl evaluate --systems instruct_rag --corpus runs/world/passages.jsonl \
        --questions runs/world/test.jsonl --index runs/index --llm runs/instruct_rag/checkpoint

Wei et al. 2025. The rationales are written by the rule-based reader, which states the facts that
the documents tell on the way to the answer; questions whose answer these do not hold are left out.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "seed": 0,
            "policy": "tiny",
            "rows": "explained",
            "writer": {"kind": "world_reader"},
            "style": "baselines_tiny",
            "top_k": 4,
            "steps": 400,
            "batch": 32,
            "test_questions": 200,
            "data": {"world": {"seed": 0, "size": 240, "famous": 0.3}},
            "index": {"encoder": "lexical", "kind": "scann"},
            "optimizer": {"policy_lr": 3e-3, "warmup": 0.1},
            "shapes": {"lengths": (80, 144, 256), "batches": (16, 64), "steps": 64},
            "layout": {"lengths": (112, 160, 256), "tokens": 1536},
        }
    )
