"""C-3PO with a real policy, retriever and frozen language model (Chen et al. 2025, tables 1, 7, 8).

    ragrl index --corpus corpus.jsonl --encoder FOLDER --kind scann --out runs/index
    ragrl train --config=configs/c3po.py --workdir=runs/c3po \
        --config.policy=FOLDER --config.index.encoder=FOLDER \
        --config.data.files.corpus=corpus.jsonl ...

The policy is a Qwen2-0.5B or 1.5B in Hugging Face layout after a warm start on demonstrations of
the 72B model: `ragrl demos` with this config, then `ragrl sft` with configs/warmup_c3po.py, which
has the commands. The paper's headline is a mean judge accuracy of 62.08 (0.5B) and 63.53 (1.5B)
over six sets against 51.35 for Standard RAG with Qwen2-72B-Instruct; this config has not been run
at that size here. Clip, gamma, lambda, whitening, where the KL goes, the betas of Adam, and how the
cosine begins and ends are not in the paper: they are the defaults of the trainer that its authors
name. The temperature is that of their published sampler, which made the demonstrations.

It learns from 6,000 questions of each of six sets, which are drawn from their files:
    --config.data.files.train=nq/train.jsonl,hotpotqa/train.jsonl,...

Its ablations: a single trajectory (section 6.4), and a tree in which no route is forced,
    --config.recipe.tree.retrieval=sampled --config.recipe.tree.width=1
    --config.recipe.tree.retrieval=sampled
and one strategy for all questions (table 3), which needs no training: `ragrl export`, then `ragrl
evaluate --systems c3po_none,c3po_single,c3po_planning --style full --policy FOLDER ...`.

Its test out of distribution (table 2) searches with Google, and asks another model:
    ragrl evaluate --systems direct,standard_rag --run runs/c3po --retriever serper --top-k 10 \
        --data freshqa.csv multihop_rag.json --judge openai:MODEL --llm openai:MODEL ...
"""

import functools

from ml_collections import ConfigDict, config_dict

RECIPE = {
    "system": {
        "style": "c3po",
        "top_k": 10,
        "max_depth": 13,
        "max_documents": 10,
        "roadmaps": 1,
        "strict": True,
        "hint": "",
        "max_tokens": 2048,
        "temperature": 0.6,
    },
    "tree": {
        "width": 2,
        "until": 4,
        "free": 0,
        "retrieval": "prefix",
        "dead_leaf": "zero",
        "multiplicity": False,
    },
}
OBJECTIVE = {
    "ratio": "clip",
    "critic": "own",
    "advantage": "whitened_gae",
    "gamma": 1.0,
    "lam": 0.95,
    "kl": {"where": "reward", "estimator": "k1", "coefficient": 0.005},
    "aggregation": "role_sum",
}
OPTIMIZER = {
    "policy_lr": 5e-7,
    "value_lr": 5e-6,
    "schedule": "cosine",
    "warmup": 0.03,
    "final": 0.1,
    "b2": 0.95,
}


def get_config() -> ConfigDict:
    # One for each key: a placeholder under two keys would give both the value of the last.
    path = functools.partial(config_dict.placeholder, str)
    return ConfigDict(
        {
            "seed": 0,
            "policy": path(),
            "mesh": (1, -1, 1),
            "compute": "bfloat16",
            "remat": "full",
            "data": {
                "files": {
                    "corpus": path(),
                    "train": path(),
                    "train_each": 6000,
                    "dev": path(),
                    "test": path(),
                }
            },
            "index": {"encoder": path(), "kind": "scann", "folder": "runs/index", "url": ""},
            "llm": {
                "kind": "openai",
                "model": "Qwen/Qwen2-72B-Instruct",
                "base_url": "http://localhost:8000/v1",
            },
            # The paper measures by a judge's verdict; kind none: the answer holds a gold one.
            "judge": {
                "kind": "openai",
                "model": "Qwen/Qwen2-72B-Instruct",
                "base_url": "http://localhost:8000/v1",
            },
            "system": "c3po",
            "recipe": RECIPE,
            "objective": OBJECTIVE,
            "optimizer": OPTIMIZER,
            "guard": {"bounds": (), "patience": 3},
            # About 1,024 actions an update (table 7): a tree of the paper has some 20.
            "run": {
                "steps": 700,
                "questions": 48,
                "cohorts": 2,
                "save_every": 20,
                "eval_every": 20,
                "baselines": "c3po",
            },
            "shapes": {
                "lengths": (512, 1024, 2048, 4096),
                "batches": (16, 64),
                "steps": 2048,
                "tokens": 65536,  # 16384 on devices of 16 GB
            },
            "layout": {"lengths": (2048, 4096, 8192), "tokens": 16384, "halvings": 2},
        }
    )
