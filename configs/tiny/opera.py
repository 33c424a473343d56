"""OPERA on the embedded default: the generated encyclopedia, a tiny policy, two CPU cores.

    ragrl warmup --config=configs/tiny/warmup_opera.py --out=runs/warm-opera
    ragrl train --config=configs/tiny/opera.py --workdir=runs/opera \
        --config.policy=runs/warm-opera/checkpoint

Rewards and expert injection are the paper's; groups, learning rate and KL are scaled to the model,
and most steps go to the role that needs them. The roles share one tiny policy, the expert and the
gold of sub-goals come from the rules of the encyclopedia, and a plan of a single step is not held
against a question of one hop. With two passages a search about one first query in eight finds
nothing, which is what the rewriter is for.
"""

from ml_collections import ConfigDict

RECIPE = {
    "style": "opera_tiny",
    "top_k": 2,
    "max_steps": 6,
    "max_rewrites": 2,
    "temperature": 1.0,
    "max_tokens": (48, 40, 24),
    "shared": True,
    "group": 6,
    "expert": {
        "when": "always",
        "replaces": "extra",
        "gradient": True,
        "period": 4,
        "roles": (),
        "carried": "sampled",
    },
    "pool": "world",
    "gold": "world",
    "plan_reward": "paper",
    "least_steps": 1,
    "ndcg_power": 0.5,
}


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "seed": 0,
            "policy": "tiny",
            "mesh": (),
            "compute": "float32",
            "remat": "none",
            "system": "opera",
            "recipe": RECIPE,
            "data": {"world": {"seed": 0, "size": 240, "famous": 0.3}},
            "index": {"encoder": "lexical", "kind": "scann"},
            "objective": {
                "ratio": "clip",
                "critic": "none",
                "advantage": "group_centred",
                "kl": {"where": "loss", "estimator": "k3", "coefficient": 0.01},
                "aggregation": "token_mean",
            },
            "schedule": {
                "phases": (
                    {"steps": 6, "roles": ("plan",)},
                    {"steps": 20, "roles": ("analysis",)},
                    {"steps": 4, "roles": ("rewrite",), "policy_lr": 1e-4},
                ),
            },
            "optimizer": {"policy_lr": 1e-3, "schedule": "cosine", "minibatches": 6},
            "run": {
                "steps": 30,
                "questions": 32,
                "save_every": 10,
                "eval_every": 10,
                "dev_questions": 40,
                "test_questions": 400,
                "trees_every": 10,
                "trees": 2,
            },
            "shapes": {"lengths": (80, 144), "batches": (16, 64), "steps": 48},
            "layout": {"lengths": (128, 256), "tokens": 1536},
        }
    )
