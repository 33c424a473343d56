"""CoDA on NQ and HotpotQA with a 3B base model (WSDM 2026, section 4; its code for the rest).

    ragrl data index --corpus corpus.jsonl --encoder FOLDER --kind exact --out runs/index
    ragrl train --config=configs/coda.py --workdir=runs/coda \
        --config.data.files.train=nq/train.jsonl,hotpotqa/train.jsonl \
        --config.policy=FOLDER --config.index.encoder=FOLDER \
        --config.data.files.corpus=corpus.jsonl ...
    ragrl train --config=configs/coda.py:code ...          (as the authors published it)
    ragrl train --config=configs/coda.py:alone ...         (AutoRefine: one agent, one context)

Policy: Qwen2.5-3B (base).

Retriever: e5-base-v2 over the Wikipedia of December 2018, top 3. Search-R1's vectors of this corpus
can be imported (`ragrl data index --passage-prefix="passage: " --query-prefix="query: "
--vectors e5_Flat.index ...`).

Result in the paper: mean exact match of .407 over seven sets, against .380 for AutoRefine and .312
for Search-R1. This config has not been run at that size here.

From the code: the number of optimizer steps is its least, one per 256 planners (300 steps of 256
questions with 8 rollouts each, in minibatches of 256 sequences); so are dual clip, the KL in the
loss and the entropy bonus. Paper and code differ in how executors are judged (`systems/coda`,
departure 5), and the code samples from the nucleus.

Ablations: without hierarchy (table 3) `:alone`, also with `--config.recipe.system.kind=search_r1`;
Search-R1 in the hierarchy, with a reward that the paper does not name,
    --config.recipe.system.refinement=False
without the refinement reward, and without the format reward too (table 4),
    --config.recipe.refinement_weight=0
    --config.recipe.refinement_weight=0 --config.recipe.format_weight=0
More passages than in training (figure 4), with contexts that hold them,
    ragrl evaluate --run runs/coda --config.recipe.system.top_k=30 \
        --config.shapes.prompt_lengths="(512,1024,2048,4096,8192,16384)" ...

Not included: one set of answers for PopQA questions that occur twice (table 2). The file of
questions has to contain the merged answers.
"""

import functools

from ml_collections import ConfigDict, config_dict

SYSTEMS = {"alone": "jax_ragrl.systems.baselines.executor"}
HIERARCHY = {
    "format_weight": 1.0,
    "refinement_weight": 0.5,  # the code's weight
}
AGENT = {
    "style": "coda",  # the folder of the prompts
    "top_k": 3,
    "max_turns": 6,
    "max_tokens": 512,
    "temperature": 1.0,
    "as_chat_turns": False,  # a base model: observations are plain text
}
PLANNER = {**AGENT, "max_executor_turns": 6, "refinement": True}
CHOICES = {
    "paper": {
        "system": {**PLANNER, "top_p": 1.0},
        "joint_executor_reward": True,
        **HIERARCHY,
    },
    "code": {
        "system": {**PLANNER, "top_p": 0.95},
        "joint_executor_reward": False,
        **HIERARCHY,
    },
    "alone": {"system": {**AGENT, "kind": "autorefine", "top_p": 1.0}},
}


def get_config(preset: str = "paper") -> ConfigDict:
    # A new placeholder per key: one object under two keys would give both the value of the last.
    path = functools.partial(config_dict.placeholder, str)
    return ConfigDict(
        {
            "seed": 0,
            "policy": path(),
            "mesh": (-1, -1, 1),  # data, fsdp, tensor: fsdp as the width allows
            "compute_dtype": "bfloat16",
            "remat": "full",  # recompute activations in the backward pass: least memory
            "system": SYSTEMS.get(preset, "coda"),
            "recipe": {"rollouts": 8, **CHOICES[preset]},  # rollouts per question: the group
            "data": {"files": {"corpus": path(), "train": path(), "dev": path(), "test": path()}},
            # Exact search: an approximate index would lower the recall.
            # 21 million vectors of 768 numbers take 8 GB on each of eight devices.
            # Without an encoder: --config.index.kind=bm25, which searches words.
            "index": {"encoder": path(), "kind": "exact", "folder": "runs/index"},
            "llm": {"kind": "none"},  # the policy answers itself
            "objective": {
                "loss": "dual_clipped_policy_loss",
                "eps_low": 0.2,
                "eps_high": 0.2,
                "dual_clip": 3.0,
                "critic": "none",
                "advantage": "group_normalised",
                "kl": {"where": "loss", "estimator": "k3", "coefficient": 0.001},
                "entropy_coefficient": 0.001,
                "aggregation": "token_mean",
            },
            "optimizer": {
                "policy_lr": 1e-6,
                "schedule": "constant",
                "max_grad_norm": 1.0,
                "epochs": 1,
                "minibatches": 8,
            },
            # (metric, lowest, highest): the run stops after 3 steps in a row outside its bounds.
            "guard": {"bounds": (), "patience": 3},
            "run": {
                "steps": 300,
                "questions_per_step": 256,
                "save_every": 20,
                "eval_every": 20,
                "baseline_style": "c3po",
            },
            # Prompts and batches are padded to these sizes: one compiled program per pair.
            "shapes": {
                # The context of a planner ends at 6,656 tokens, the longest prompt of the code.
                "prompt_lengths": (512, 1024, 2048, 4096, 6656),
                "batch_sizes": (16, 64),
                "max_new_tokens": 512,
                "max_prompt_tokens": 65536,  # per device
            },
            "packing": {
                "row_lengths": (1024, 2048, 4096, 8192),
                "tokens_per_device": 16384,  # tokens per forward and backward pass
                "max_batch_halvings": 2,  # the last, partly empty batch may shrink to a quarter
            },
        }
    )
