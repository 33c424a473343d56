"""RAG-DDR on the embedded default: the generated encyclopedia, a tiny policy, two CPU cores.

    ragrl warmup --config=configs/tiny/warmup_mmoa_rag.py --out=runs/warm-mmoa_rag
    ragrl train --config=configs/tiny/rag_ddr.py --workdir=runs/rag_ddr \
        --config.policy=runs/warm-mmoa_rag/checkpoint

Li et al. 2025. The generator learns from pairs of its own answers first, then the selector from
what its selections led to. MMOA-RAG's warm-up knows both.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "seed": 0,
            "policy": "tiny",
            "mesh": (),
            "compute": "float32",
            "remat": "none",
            "system": "jax_ragrl.systems.baselines.rag_ddr",
            "recipe": {
                "system": {
                    "style": "mmoa_rag_tiny",
                    "modules": "S+G",
                    "top_k": 4,
                    "word": "D",
                    "rewriter_tokens": 40,
                    "selector_tokens": 12,
                    "generator_tokens": 16,
                    "temperature": 1.0,
                    "top_p": 1.0,
                },
                "samples": 5,
            },
            "data": {"world": {"seed": 0, "size": 240, "famous": 0.3}},
            "index": {"encoder": "lexical", "kind": "scann"},
            "preference": {"beta": 0.1},
            # Of the objective DPO reads only that there is a reference.
            "objective": {
                "critic": "none",
                "advantage": "group_centred",
                "kl": {"where": "reward"},
            },
            "schedule": {
                "phases": (
                    {"steps": 9, "roles": ("generator",)},
                    {"steps": 9, "roles": ("selector",)},
                ),
            },
            "optimizer": {"policy_lr": 1e-4, "schedule": "constant", "minibatches": 2},
            "run": {
                "steps": 18,
                "questions": 48,
                "save_every": 6,
                "eval_every": 6,
                "dev_questions": 40,
                "test_questions": 400,
                "trees_every": 6,
                "trees": 2,
            },
            "shapes": {"lengths": (80, 144, 256), "batches": (16, 64), "steps": 16},
            "layout": {"lengths": (160, 256), "tokens": 1536},
        }
    )
