"""RetRobust on the embedded default: the tiny policy learns to answer from documents.

    ragrl sft --config=configs/tiny/retrobust.py --out=runs/retrobust
    ragrl world --out runs/world && ragrl index --corpus runs/world/passages.jsonl --out runs/index
    ragrl evaluate --systems standard_rag --corpus runs/world/passages.jsonl \
        --questions runs/world/test.jsonl --index runs/index --llm runs/retrobust/checkpoint

A row shows what bears on the question, or low ranks, or passages drawn at random.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "seed": 0,
            "policy": "tiny",
            "rows": "robust",
            "style": "baselines_tiny",
            "top_k": 4,
            "steps": 400,
            "batch": 32,
            "test_questions": 200,
            "data": {"world": {"seed": 0, "size": 240, "famous": 0.3}},
            "index": {"encoder": "lexical", "kind": "scann"},
            "optimizer": {"policy_lr": 3e-3, "warmup": 0.1},
            "shapes": {"lengths": (80, 144, 256), "batches": (16, 64), "steps": 16},
            "layout": {"lengths": (112, 160, 256), "tokens": 1536},
        }
    )
