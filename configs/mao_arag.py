"""MAO-ARAG with a real planner, retriever and executors (Chen et al. 2025, tables 1 and 4).

    ragrl train --config=configs/mao_arag.py --workdir=runs/mao_arag \
        --config.policy=FOLDER --config.index.encoder=FOLDER \
        --config.data.files.corpus=corpus.jsonl ...
    ragrl train --config=configs/mao_arag.py:code ...          (as the authors published it)

Models: the planner is a Qwen2.5-7B-Instruct, the executors are GPT-4o-mini at temperature 0, the
retriever is E5-base-v2 over Wikipedia with 5 passages.

Result in the paper: trained on 2,400 questions of NQ and 4,800 of HotpotQA, a mean F1 of 52.91 over
seven sets (44.38 untrained, 49.83 for the best baseline). This config has not been run at that size
here. These results are without costs.

Costs (figure 4): `configs/mao_arag.py:code` with `--config.recipe.costs.alpha` up to 0.2, beyond
which workflows become trivial. The paper states equal weights, but its sweep was almost certainly
run with the code's: by tables 1 and 3, `R,AG` instead of `AG` adds 1.4e-4 dollars and a search. At
an alpha of 0.1 this costs 0.1 x (1.4e-4 / 6.02e-4 + 1) = 0.123 F1 with the preset `paper`, and
0.1 x (1.4e-4 / 5e-4 + 0.25) = 0.053 with `code`. A search adds 0.072 F1 on HotpotQA and 0.081 on
NQ, so that with equal weights it would not pay from an alpha of 0.06 or 0.07 on, with the code's
from 0.14 or 0.15 on.

Paper and code differ in the weights and the unit of costs (`systems/mao_arag`), in the KL (the
paper's eq. 9: the reward of the last token), in the clipping of values and of bad tokens, and in
the training of malformed turns (`recipe.train_malformed`). Both have the turn costs of the code;
the swapped rows of the paper's table 4 are `--config.recipe.costs.turn_table=paper`. The
KL coefficient, the learning rates, the temperature, gamma and lambda are the code's, because the
paper gives none; so is the whitening of advantages, where eq. 8 has plain ones. The code makes
one update per turn; here all turns of a batch are one update. Its script names one of the two sets
at a time; here both are in one run, as the paper reads:
    --config.data.files.train=nq/train.jsonl,hotpotqa/train.jsonl \
        --config.data.files.train_per_file="(2400,4800)"

Costs in an evaluation: the paper's turns are `policy_calls`, its dollars are `dollars`, at the
prices below. The fixed workflows that the planner selects from are systems too:
    ragrl evaluate --systems workflows --prices 0.225,0.9 --llm openai:gpt-4o-mini --style full ...

Small planners (table 2): a planner of 1.5B or 0.5B does not follow the format. It first learns the
workflows of the trained planner, here those whose answer had an F1 of 1; the rates are the code's:

    ragrl export runs/mao_arag --out runs/planner
    ragrl warmup demos --config=configs/mao_arag.py ... --writer=runs/planner --temperature=0 \
        --out=plans.jsonl
    ragrl warmup sft --config=configs/warmup_c3po.py --config.data.demos=plans.jsonl \
        --out=runs/small \
        --config.policy=FOLDER --config.epochs=1 --config.batch_size=96 \
        --config.optimizer.policy_lr=1e-5 --config.optimizer.warmup_fraction=0.1
    ragrl train --config=configs/mao_arag.py --config.policy=runs/small/checkpoint \
        --config.optimizer.policy_lr=3e-7 ...

Ablation: fewer executors, here no parallel decomposition:
    --config.recipe.system.executors="('QDS','QR','R','DS','AG')"
"""

import functools

from ml_collections import ConfigDict, config_dict

# Prices of the executors' model, in dollars.
DOLLARS = {
    "dollars_per_1k_prompt_tokens": 0.000225,
    "dollars_per_1k_completion_tokens": 0.0009,
}
# The same prices for metrics and tables. The retriever is the user's own, so a search has no price.
PRICES = {
    "dollars_per_million_prompt_tokens": 0.225,
    "dollars_per_million_completion_tokens": 0.9,
    "dollars_per_search": 0.0,
}
COSTS = {
    "paper": {
        "token_weight": 1.0,
        "retrieval_weight": 1.0,
        "turn_weight": 1.0,
        "dollars_per_cost_unit": 6.02e-4,  # the cost of the most expensive workflow
    },
    "code": {
        "token_weight": 1.0,
        "retrieval_weight": 0.25,
        "turn_weight": 0.5,
        "dollars_per_cost_unit": 5e-4,
    },
}
CLIPS = {
    "paper": {"loss": "clipped_policy_loss", "value_clip": 0.2},
    "code": {"loss": "dual_clipped_policy_loss", "dual_clip": 3.0, "value_clip": 0.5},
}
KL_PLACE = {"paper": "terminal", "code": "reward"}


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
            "data": {"files": {"corpus": path(), "train": path(), "dev": path(), "test": path()}},
            # Exact search: an approximate index would lower the recall.
            # 21 million vectors of 768 numbers take 8 GB on each of eight devices.
            # Without an encoder: --config.index.kind=bm25, which searches words.
            "index": {"encoder": path(), "kind": "exact", "folder": "runs/index"},
            # The frozen model that plays the executors.
            "llm": {"kind": "openai", "model": "gpt-4o-mini"},
            "prices": PRICES,
            "system": "mao_arag",
            "recipe": {
                "system": {
                    "style": "mao_arag",  # the folder of the prompts
                    "top_k": 5,
                    "max_turns": 5,  # planner calls: one plan, and one per sub-question
                    "max_tokens": 16,  # a workflow is a short list of names
                    "temperature": 1.0,
                    # Whether a plan that selects documents without a search is illegal.
                    "select_needs_search": False,
                    "executors": ("QDS", "QDP", "QR", "R", "DS", "AG"),
                    "reply_tokens": 256,  # of an executor
                },
                "costs": {"alpha": 0.0, **DOLLARS, **COSTS[preset], "turn_table": "code"},
                # Malformed planner calls before the first legal plan; the code masks them.
                "train_malformed": preset == "paper",
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
            "optimizer": {
                "policy_lr": 1e-6,
                "value_lr": 1e-5,
                "schedule": "constant",
                # One step per batch of rollouts, as in the code: no clip acts.
                "epochs": 1,
                "minibatches": 1,
            },
            # (metric, lowest, highest): the run stops after 3 steps in a row outside its bounds.
            "guard": {"bounds": (), "patience": 3},
            "run": {
                "steps": 75,  # one epoch of the 7,200 questions
                "questions_per_step": 96,
                # One half is sampled while the other waits for the executors.
                "save_every": 15,
                "eval_every": 15,
                "baseline_style": "c3po",
            },
            # Prompts and batches are padded to these sizes: one compiled program per pair.
            "shapes": {
                "prompt_lengths": (512, 1024),
                "batch_sizes": (16, 64),
                "max_new_tokens": 16,
                "max_prompt_tokens": 65536,  # per device
            },
            "packing": {
                "row_lengths": (512, 1024),
                "tokens_per_device": 16384,  # tokens per forward and backward pass
                "max_batch_halvings": 2,  # the last, partly empty batch may shrink to a quarter
            },
        }
    )
