"""MAO-ARAG with a real planner, retriever and executors (Chen et al. 2025, tables 1 and 4).

    ragrl train --config=configs/mao_arag.py --workdir=runs/mao_arag \
        --config.policy=FOLDER --config.index.encoder=FOLDER \
        --config.data.files.corpus=corpus.jsonl ...
    ragrl train --config=configs/mao_arag.py:code ...          (as the authors published it)

The planner is a Qwen2.5-7B-Instruct, the executors GPT-4o-mini at temperature 0, the retriever
E5-base-v2 over Wikipedia with 5 passages. Trained on 2,400 questions of NQ and 4,800 of HotpotQA,
the paper has a mean F1 of 52.91 over seven sets (44.38 untrained, 49.83 the best baseline); this
config has not been run at that size here. Those results are without costs: raise
`--config.recipe.costs.alpha`, up to 0.2, beyond which workflows become trivial.

Paper and code differ in the weights and the unit of costs (`systems/mao_arag.py`), in the KL (the
paper's eq. 9: the reward of the last token), in the clipping of values and of bad tokens. The
coefficient of the KL and the learning rates are the code's where the paper has none. The code makes
an update for each turn; here all turns of a batch are one. Its script names one of the two sets at
a time; here, as the paper reads, they are one (configs/c3po.py makes one file of several).

In an evaluation the paper's turns are `policy_calls`; its dollars are `llm_prompt_tokens` and
`llm_completion_tokens` at the prices below.

In the paper a planner of 1.5B or 0.5B (table 2) does not keep to the form. It learns the workflows
of the trained one first, here those whose answer had an F1 of 1; the rates are the code's:

    ragrl export runs/mao_arag --out runs/planner
    ragrl demos --config=configs/mao_arag.py ... --writer=runs/planner --temperature=0 \
        --out=plans.jsonl
    ragrl sft --config=configs/warmup_c3po.py --config.data.demos=plans.jsonl --out=runs/small \
        --config.policy=FOLDER --config.epochs=1 --config.batch=96 \
        --config.optimizer.policy_lr=1e-5 --config.optimizer.warmup=0.1
    ragrl train --config=configs/mao_arag.py --config.policy=runs/small/checkpoint \
        --config.optimizer.policy_lr=3e-7 ...

A planner that has fewer executors, here no parallel decomposition:
    --config.recipe.system.executors="('QDS','QR','R','DS','AG')"
"""

import functools

from ml_collections import ConfigDict, config_dict

DOLLARS = {"dollars_in": 0.000225, "dollars_out": 0.0009}
COSTS = {
    "paper": {"token": 1.0, "retrieval": 1.0, "turn": 1.0, "dollars_unit": 6.02e-4},
    "code": {"token": 1.0, "retrieval": 0.25, "turn": 0.5, "dollars_unit": 5e-4},
}
CLIPS = {
    "paper": {"ratio": "clip", "value_clip": 0.2},
    "code": {"ratio": "dual_clip", "dual": 3.0, "value_clip": 0.5},
}
KL_PLACE = {"paper": "terminal", "code": "reward"}


def get_config(preset: str = "paper") -> ConfigDict:
    # One for each key: a placeholder under two keys would give both the value of the last.
    path = functools.partial(config_dict.placeholder, str)
    return ConfigDict(
        {
            "seed": 0,
            "policy": path(),
            "mesh": (1, -1, 1),
            "compute": "bfloat16",
            "remat": "full",
            "data": {"files": {"corpus": path(), "train": path(), "dev": path(), "test": path()}},
            "index": {"encoder": path(), "kind": "scann", "folder": "runs/index", "url": ""},
            "llm": {"kind": "openai", "model": "gpt-4o-mini"},
            "system": "mao_arag",
            "recipe": {
                "system": {
                    "style": "mao_arag",
                    "top_k": 5,
                    "max_turns": 5,
                    "max_tokens": 16,
                    "temperature": 1.0,
                    "select_needs_search": False,
                    "executors": ("QDS", "QDP", "QR", "R", "DS", "AG"),
                },
                "costs": {"alpha": 0.0, **DOLLARS, **COSTS[preset]},
            },
            "objective": {
                "critic": "own",
                "advantage": "whitened_gae",
                "gamma": 1.0,
                "lam": 1.0,
                "kl": {"where": KL_PLACE[preset], "estimator": "k1", "coefficient": 0.001},
                "aggregation": "token_mean",
                **CLIPS[preset],
            },
            "optimizer": {"policy_lr": 1e-6, "value_lr": 1e-5, "schedule": "constant"},
            # One epoch of the 7,200 questions.
            "guard": {"bounds": (), "patience": 3},
            "run": {
                "steps": 75,
                "questions": 96,
                "cohorts": 2,
                "save_every": 15,
                "eval_every": 15,
                "baselines": "c3po",
            },
            "shapes": {
                "lengths": (512, 1024),
                "batches": (16, 64),
                "steps": 16,
                "tokens": 65536,
            },
            "layout": {"lengths": (512, 1024), "tokens": 16384, "halvings": 2},
        }
    )
