"""OPERA with MAPGRPO on MuSiQue, HotpotQA and 2WikiMultiHopQA (Liu et al. 2026, table 6).

    ragrl data index --corpus corpus.jsonl --encoder FOLDER --kind exact --out runs/index
    ragrl warmup pool --config=configs/opera.py --config.recipe.plan_reward=code \
        --writer openai:MODEL@URL --out pool.jsonl ...
    ragrl train --config=configs/opera.py --workdir=runs/opera \
        --config.policy=FOLDER --config.index.encoder=FOLDER \
        --config.recipe.expert_pool=pool.jsonl ...
    ragrl train --config=configs/opera.py:code ...     (as the authors published it)

Models: Qwen2.5-7B-Instruct for plan and analysis, the 3B model for the rewriter, BGE-M3 with top 5
as the retriever.

Training: the roles are trained one after another, each at the learning rate and KL coefficient of
its stage. An update is 64 questions: 64 groups of 8 plans, and for the other roles one group per
decision in their rollouts. (The paper counts such decisions.)

Result in the paper: 57.3, 60.2 and 39.7 exact match over a corpus that is sure to contain the gold
passages. This config has not been run at that size here.

Its 3,000 questions are 60 % MuSiQue, 25 % HotpotQA and 15 % 2WikiMultiHopQA:
    --config.data.files.train=musique.jsonl,hotpotqa.json,2wiki.json \
        --config.data.files.train_per_file="(1800,750,450)"

Expert pool: `ragrl warmup pool` writes and scores the actions of `pool.jsonl`, plans by eq. 14,
which is also the code's reward. The paper has about 30,000 actions from DeepSeek-R1, for questions
of MuSiQue (60 %), HotpotQA (25 %) and 2WikiMultiHopQA (15 %); in addition to twelve plans per
question it has a plan written from the supporting facts, which `ragrl warmup pool` does not
request. Paper and code differ in the scoring of plans and in the expert (`systems/opera`, departure
4).

Ablations of inference (table 2) remove planner, rewriter or both from a trained run, and table 10
changes the number of passages:
    ragrl evaluate --run runs/opera --config.recipe.system.max_plan_steps=0 \
        --config.recipe.system.max_rewrites=0 ...
    ragrl evaluate --run runs/opera --config.recipe.system.top_k=10 ...

Ablations of training: without planner; without rewriter (phases and `policies` must not name a role
that is removed); without experts (rollouts continue with a sampled action with and without them, so
that this changes the groups and not which states occur); with rollouts that continue with the
expert's query or analysis; all roles at once; GRPO, which compares whole rollouts by their answers;
and the same groups divided by their deviation:
    --config.recipe.system.max_plan_steps=0 --config.run.steps=188 \
        --config.schedule.phases="({'steps':94,'roles':('analysis',)},{'steps':94,'roles':('rewrite',)})"
    --config.recipe.system.max_rewrites=0 --config.policies="()" --config.run.steps=235 \
        --config.schedule.phases="({'steps':141,'roles':('plan',)},{'steps':94,'roles':('analysis',)})"
    --config.recipe.expert.when=off --config.recipe.expert_pool=none
    --config.recipe.expert.continue_with=expert
    --config.schedule.phases="()"
    --config.recipe.group_size=1 --config.rollouts=8 --config.recipe.expert.when=off \
        --config.recipe.expert_pool=none --config.schedule.phases="()" \
        --config.objective.advantage=group_normalised
    --config.objective.advantage=group_normalised
Without phases all roles have one rate and one KL coefficient, 5e-6 and 0.05.
The KL with the weight of eq. 4, which adds it once per group of 8 actions and not to each:
    --config.schedule.phases="({'steps':141,'roles':('plan',),'policy_lr':5e-6,'kl_coefficient':0.00625},\
{'steps':94,'roles':('analysis',),'policy_lr':1e-5,'kl_coefficient':0.005},\
{'steps':94,'roles':('rewrite',),'policy_lr':2e-5,'kl_coefficient':0.005})"
"""

import functools

from ml_collections import ConfigDict, config_dict

CHOICES = {
    "paper": {
        # The expert's action is in each group, in place of one sample, and is trained on.
        "expert": {
            "when": "always",
            "replaces": "extra",
            "gradient": True,
            "period": 4,  # of `when` periodic: one question in four
            "roles": (),  # all roles
            "continue_with": "sampled",
        },
        "plan_reward": "paper",
    },
    "code": {
        # The expert's plan replaces the worst sample of some groups, and is not trained on.
        "expert": {
            "when": "periodic",
            "replaces": "worst",
            "gradient": False,
            "period": 4,
            "roles": ("plan",),
            "continue_with": "sampled",
        },
        "plan_reward": "code",
    },
}


# The gradient of k2 is that of KL(policy | reference), as in eq. 4.
ESTIMATORS = {"paper": "k2", "code": "k3"}
# 3,000 questions, 64 per update: three epochs for plans, two for each other role.
SCHEDULE = {
    "phases": (
        {"steps": 141, "roles": ("plan",), "policy_lr": 5e-6, "kl_coefficient": 0.05},
        {"steps": 94, "roles": ("analysis",), "policy_lr": 1e-5, "kl_coefficient": 0.04},
        {"steps": 94, "roles": ("rewrite",), "policy_lr": 2e-5, "kl_coefficient": 0.04},
    ),
}


def get_config(preset: str = "paper") -> ConfigDict:
    # A new placeholder per key: one object under two keys would give both the value of the last.
    path = functools.partial(config_dict.placeholder, str)
    return ConfigDict(
        {
            "seed": 0,
            "policy": path(),
            # data, fsdp, tensor: fsdp as the width allows. Rollouts copy the weights of three
            # policies without fsdp, 37 GB, of which a tensor axis of 2 leaves each device 18 GB.
            "mesh": (-1, -1, 2),
            "compute_dtype": "bfloat16",
            "remat": "full",  # recompute activations in the backward pass: least memory
            # The rewriter starts from this folder, relative to the current directory.
            "policies": (("rewrite", "Qwen2.5-3B-Instruct"),),
            "system": "opera",
            "recipe": {
                "system": {
                    "style": "opera",  # the folder of the prompts
                    "top_k": 5,
                    "max_plan_steps": 6,
                    "max_rewrites": 2,  # rewritten queries per plan step
                    "temperature": 1.0,
                    "max_tokens": (512, 512, 256),  # plan, analysis, rewrite
                    "shared_policy": False,  # one policy per role
                },
                "group_size": 8,
                "expert_pool": path(),
                "gold": "steps",  # gold sub-answers from the data set's decomposition
                **CHOICES[preset],
                "min_plan_steps": 2,
                "ndcg_power": 0.5,
            },
            "data": {"files": {"corpus": path(), "train": path(), "dev": path(), "test": path()}},
            # Exact search: an approximate index would lower the recall.
            # 1.8 million vectors of 1,024 numbers take 1 GB on each of eight devices.
            # Without an encoder: --config.index.kind=bm25, which searches words.
            "index": {"encoder": path(), "kind": "exact", "folder": "runs/index"},
            "llm": {"kind": "none"},  # the policy answers itself
            # Equations 2 to 4: no ratio, no clip, and the log-probability of a whole action.
            "objective": {
                "loss": "policy_gradient_loss",
                "critic": "none",
                "advantage": "group_centred",
                "kl": {"where": "loss", "estimator": ESTIMATORS[preset], "coefficient": 0.05},
                "aggregation": "token_mean",
            },
            "optimizer": {"policy_lr": 5e-6, "schedule": "constant", "epochs": 1, "minibatches": 1},
            "schedule": SCHEDULE,
            # (metric, lowest, highest): the run stops after 3 steps in a row outside its bounds.
            "guard": {"bounds": (), "patience": 3},
            "run": {
                "steps": 329,
                "questions_per_step": 64,
                "save_every": 20,
                "eval_every": 20,
                "baseline_style": "c3po",
            },
            # Prompts and batches are padded to these sizes: one compiled program per pair.
            "shapes": {
                "prompt_lengths": (512, 1024, 2048, 4096),
                "batch_sizes": (4, 16),
                "max_new_tokens": 512,
                "max_prompt_tokens": 8192,  # per device
            },
            "packing": {
                "row_lengths": (1024, 2048, 4096, 8192),
                "tokens_per_device": 16384,  # tokens per forward and backward pass
                "max_batch_halvings": 2,  # the last, partly empty batch may shrink to a quarter
            },
        }
    )
