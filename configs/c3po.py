"""C-3PO with a real policy, retriever and frozen language model (Chen et al. 2025).

    ragrl data index --corpus corpus.jsonl --encoder FOLDER --kind exact --out runs/index
    ragrl train --config=configs/c3po.py --workdir=runs/c3po \
        --config.policy=FOLDER --config.index.encoder=FOLDER \
        --config.data.files.corpus=corpus.jsonl ...

The settings are from tables 1, 7 and 8.

Policy: Qwen2-0.5B or 1.5B in Hugging Face layout, after a warm start on demonstrations of the 72B
model: `ragrl warmup demos` with this config, then `ragrl warmup sft` with configs/warmup_c3po.py,
which lists the commands.

Data: 6,000 training questions from each of six data sets, sampled from their files:
    --config.data.files.train=nq/train.jsonl,hotpotqa/train.jsonl,...

Result in the paper: mean judge accuracy over six sets of 62.08 (0.5B) and 63.53 (1.5B), against
51.35 for Standard RAG with Qwen2-72B-Instruct. This config has not been run at that size here.

Not in the paper: the clip range, gamma, lambda, whitening, the place of the KL, the betas of Adam,
the ends of the cosine schedule, epochs and minibatches. They are the defaults of the trainer that
the authors name, OpenRLHF, in version 0.5.6 (January 2025), the last before the paper in which
lambda is 0.95; from 0.5.7 on it is 1. That version divides 1,024 sequences into minibatches of 128.
If the paper's batch of 1,024 is that of an optimizer step instead, a batch of rollouts is one step,
in which no clip acts: `--config.optimizer.minibatches=1`.
The temperature is that of their published sampler, which generated the demonstrations.

Ablations: a single trajectory (section 6.4), and a tree in which no route is forced,
    --config.recipe.tree.router_forcing=sampled --config.recipe.tree.width=1 \
        --config.run.questions_per_step=240
    --config.recipe.tree.router_forcing=sampled
A trajectory has about a fifth of the actions of a tree. Five times the questions per step give its
batch about 1,024 actions, too. `run.token_budget` makes the costs of all three equal: give each the
tokens of the run with forced routes, the sum of `policy_tokens` in its `metrics.jsonl`.
configs/experiments/tree_or_chain.py compares both at tiny size.
One strategy for all questions (table 3) works without training: `ragrl export`, then `ragrl
evaluate --systems c3po_none,c3po_single,c3po_planning --style full --policy FOLDER ...`.

The out-of-distribution test (table 2) searches with Google and asks another model:
    ragrl evaluate --systems direct,standard_rag --run runs/c3po --retriever serper --top-k 10 \
        --data freshqa.csv multihop_rag.json --judge openai:MODEL --llm openai:MODEL ...
"""

import functools

from ml_collections import ConfigDict, config_dict

RECIPE = {
    "system": {
        "style": "c3po",  # the folder of the prompts
        "top_k": 10,
        "max_depth": 13,  # a deeper branch fails
        "max_documents": 10,  # with more of them, the only action offered is to answer
        "strict": True,  # in training, a selection of a missing document fails the branch
        "max_tokens": 2048,
        "temperature": 0.6,
        "reply_tokens": 2048,  # of a roadmap or an answer, in the code
    },
    "tree": {
        "width": 2,
        "branching_depth": 4,  # deeper decisions sample one action, which bounds the tree
        "router_samples": 0,  # the router's three actions are all forced
        "router_forcing": "prefix",  # the policy writes the query of a forced search
    },
    "evaluation_depth": 15,  # the code's limit
}
OBJECTIVE = {
    "loss": "clipped_policy_loss",
    "critic": "own",
    "advantage": "whitened_gae",
    "gamma": 1.0,
    "lam": 0.95,
    "kl": {"where": "reward", "estimator": "k1", "coefficient": 0.005},
    "aggregation": "role_sum",  # eq. 8 adds up the roles, each a mean of its tokens
}
OPTIMIZER = {
    "policy_lr": 5e-7,
    "value_lr": 5e-6,
    "schedule": "cosine",
    "warmup_fraction": 0.03,
    "final_lr_fraction": 0.1,
    "b2": 0.95,
    "epochs": 1,
    "minibatches": 8,
}


def get_config() -> ConfigDict:
    # A new placeholder per key: one object under two keys would give both the value of the last.
    path = functools.partial(config_dict.placeholder, str)
    return ConfigDict(
        {
            "seed": 0,
            "policy": path(),
            "mesh": (-1, -1, 1),  # data, fsdp, tensor: fsdp as the width allows
            "compute_dtype": "bfloat16",
            "remat": "full",  # recompute activations in the backward pass: least memory
            "data": {
                "files": {
                    "corpus": path(),
                    "train": path(),
                    "max_train_per_file": 6000,
                    "dev": path(),
                    "test": path(),
                }
            },
            # Exact search: an approximate index would lower the recall.
            # 21 million vectors of 768 numbers take 8 GB on each of eight devices.
            # Without an encoder: --config.index.kind=bm25, which searches words.
            "index": {"encoder": path(), "kind": "exact", "folder": "runs/index"},
            # The frozen model that plans and answers.
            "llm": {
                "kind": "openai",
                "model": "Qwen/Qwen2-72B-Instruct",
                "base_url": "http://localhost:8000/v1",
            },
            # The reward is the judge's verdict, as in the paper. With kind none it is whether the
            # answer contains a gold answer.
            "judge": {
                "kind": "openai",
                "model": "Qwen/Qwen2-72B-Instruct",
                "base_url": "http://localhost:8000/v1",
            },
            "system": "c3po",
            "recipe": RECIPE,
            "objective": OBJECTIVE,
            "optimizer": OPTIMIZER,
            # (metric, lowest, highest): the run stops after 3 steps in a row outside its bounds.
            "guard": {"bounds": (), "patience": 3},
            "run": {
                "steps": 750,  # one epoch of the 36,000 questions
                # About 1,024 actions per update (table 7): a tree of the paper has about 20.
                "questions_per_step": 48,
                # One half is sampled while the other waits for the frozen model.
                "save_every": 20,
                "eval_every": 20,
                "baseline_style": "c3po",
            },
            # Prompts and batches are padded to these sizes: one compiled program per pair.
            "shapes": {
                "prompt_lengths": (512, 1024, 2048, 4096),
                "batch_sizes": (16, 64),
                "max_new_tokens": 2048,
                "max_prompt_tokens": 65536,  # per device; 16384 on devices of 16 GB
            },
            "packing": {
                "row_lengths": (2048, 4096, 8192),
                "tokens_per_device": 16384,  # tokens per forward and backward pass
                "max_batch_halvings": 2,  # the last, partly empty batch may shrink to a quarter
            },
        }
    )
