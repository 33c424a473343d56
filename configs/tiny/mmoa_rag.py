"""MMOA-RAG on the embedded default: the generated encyclopedia, a tiny policy, two CPU cores.

    ragrl warmup --config=configs/tiny/warmup_mmoa_rag.py --out=runs/warm-mmoa_rag
    ragrl train --config=configs/tiny/mmoa_rag.py --workdir=runs/mmoa_rag \
        --config.policy=runs/warm-mmoa_rag/checkpoint

Chen et al. 2025, "Improving Retrieval-Augmented Generation through Multi-Agent Reinforcement
Learning". Modules, penalties, shared reward and the KL of the last token are the paper's; learning
rates, lengths and batch are scaled to the model. `D3` stands for `Document3`: the mask needs a word
that is one token. All searches are made at once, which finds single facts and what is compared,
but not the second link of a chain: none is asked. The loss sums over roles, whose answers differ in
length. Without a critic, and with GRPO's groups of each role: `--config.recipe.rollouts=4
--config.objective.critic=none --config.objective.advantage=group_normalised`, and a quarter of the
questions.
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
            "data": {"world": {"seed": 0, "size": 240, "famous": 0.3, "hops": (1,)}},
            "index": {"encoder": "lexical", "kind": "scann"},
            "system": "mmoa_rag",
            "recipe": {
                "system": {
                    "style": "mmoa_rag_tiny",
                    "modules": "QR+S+G",
                    "top_k": 4,
                    "word": "D",
                    "rewriter_tokens": 40,
                    "selector_tokens": 12,
                    "generator_tokens": 16,
                    "temperature": 1.0,
                    "top_p": 1.0,
                },
                "penalties": {
                    "rewriter": -0.5,
                    "queries": "count",
                    "selector": -1.0,
                    "generator": -0.5,
                    "words": 30,
                },
                "reward": "f1",
                "rollouts": 1,
            },
            "objective": {
                "ratio": "clip",
                "critic": "own",
                "advantage": "whitened_gae",
                "gamma": 1.0,
                "lam": 0.95,
                "kl": {"where": "terminal", "estimator": "k1", "coefficient": 0.01},
                "aggregation": "role_sum",
            },
            "optimizer": {"policy_lr": 8e-4, "value_lr": 1e-3, "epochs": 1, "minibatches": 4},
            "run": {
                "steps": 30,
                "questions": 64,
                "save_every": 6,
                "eval_every": 6,
                "dev_questions": 40,
                "test_questions": 400,
                "trees_every": 6,
                "trees": 2,
            },
            "shapes": {"lengths": (80, 144, 256), "batches": (16, 64), "steps": 40},
            "layout": {"lengths": (112, 160, 256), "tokens": 1536},
        }
    )
