"""CoDA on NQ and HotpotQA with a 3B base model (WSDM 2026, section 4; its code for the rest).

    ragrl index --corpus corpus.jsonl --encoder FOLDER --kind scann --out runs/index
    ragrl train --config=configs/coda.py --workdir=runs/coda \
        --config.data.files.train=nq/train.jsonl,hotpotqa/train.jsonl \
        --config.policy=FOLDER --config.index.encoder=FOLDER \
        --config.data.files.corpus=corpus.jsonl ...
    ragrl train --config=configs/coda.py:code ...          (as the authors published it)
    ragrl train --config=configs/coda.py:alone ...         (AutoRefine: one agent, one context)

The policy is Qwen2.5-3B (base), the retriever e5-base-v2 over the Wikipedia of December 2018, top
3; Search-R1's vectors of it need not be made again (`ragrl index --passage-prefix="passage: "
--query-prefix="query: " --vectors e5_Flat.index ...`). The paper's headline is a mean exact match
of .407 over seven sets, against .380 for AutoRefine and .312 for Search-R1; this config has not
been run at that size here. 300 steps of 256 questions with 8 rollouts each, in minibatches of 256
sequences: the number of optimizer steps is the code's least, one for every 256 planners. Dual clip,
KL in the loss and the entropy bonus are the code's. Paper and code differ in how executors are
judged (`systems/coda.py`, departure 5), and the code samples from the nucleus.

Its ablations: without hierarchy (table 3) `:alone`, also with `--config.recipe.kind=search_r1`;
Search-R1 in the hierarchy, with a reward that the paper does not name,
    --config.recipe.refining=False
without the reward of refinement, and without that of the form too (table 4),
    --config.recipe.refine=0
    --config.recipe.refine=0 --config.recipe.formats=0
More passages than were trained with (figure 4), and contexts that hold them,
    ragrl evaluate --run runs/coda --config.recipe.top_k=30 \
        --config.shapes.lengths="(512,1024,2048,4096,8192,16384)" ...
Not here: one set of answers for questions of PopQA that are asked twice (table 2), which a file has
to hold already.
"""

import functools

from ml_collections import ConfigDict, config_dict

SYSTEMS = {"alone": "jax_ragrl.systems.baselines.executor"}
HIERARCHY = {"executor_turns": 6, "formats": 1.0, "refine": 0.5, "refining": True}
CHOICES = {
    "paper": {**HIERARCHY, "top_p": 1.0, "together": True},
    "code": {**HIERARCHY, "top_p": 0.95, "together": False},
    "alone": {"kind": "autorefine", "top_p": 1.0},
}


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
            "system": SYSTEMS.get(preset, "coda"),
            "recipe": {
                "style": "coda",
                "top_k": 3,
                "max_turns": 6,
                "max_tokens": 512,
                "temperature": 1.0,
                "chat": False,
                "rollouts": 8,
                **CHOICES[preset],
            },
            "data": {"files": {"corpus": path(), "train": path(), "dev": path(), "test": path()}},
            "index": {"encoder": path(), "kind": "scann", "folder": "runs/index", "url": ""},
            "llm": {"kind": "none"},
            "objective": {
                "ratio": "dual_clip",
                "eps_low": 0.2,
                "eps_high": 0.2,
                "dual": 3.0,
                "critic": "none",
                "advantage": "group_normalised",
                "kl": {"where": "loss", "estimator": "k3", "coefficient": 0.001},
                "entropy": 0.001,
                "aggregation": "token_mean",
            },
            "optimizer": {
                "policy_lr": 1e-6,
                "schedule": "constant",
                "max_grad_norm": 1.0,
                "epochs": 1,
                "minibatches": 8,
            },
            "guard": {"bounds": (), "patience": 3},
            "run": {
                "steps": 300,
                "questions": 256,
                "save_every": 20,
                "eval_every": 20,
                "baselines": "c3po",
            },
            # A planner's context ends at 6,656 tokens, the longest prompt of the code.
            "shapes": {
                "lengths": (512, 1024, 2048, 4096, 6656),
                "batches": (16, 64),
                "steps": 512,
                "tokens": 65536,
            },
            "layout": {"lengths": (1024, 2048, 4096, 8192), "tokens": 16384, "halvings": 2},
        }
    )
