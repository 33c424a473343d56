"""OPERA on the synthetic corpus with a tiny policy, on two CPU cores.

    ragrl warmup tiny --config=configs/tiny/warmup_opera.py --out=runs/warm-opera
    ragrl train --config=configs/tiny/opera.py --workdir=runs/opera \
        --config.policy=runs/warm-opera/checkpoint

From the paper: rewards and expert injection. Scaled to the model: groups, learning rate and KL.
Not from the paper: the estimator k3 of the KL, which is the code's; six optimizer steps per batch
of rollouts, and therefore a clipped ratio; most steps train the role that needs them. The roles
share one tiny policy. The expert and the gold answers of sub-goals come from the rules of the
synthetic corpus.
"""

from ml_collections import ConfigDict

RECIPE = {
    "system": {
        "style": "opera_tiny",
        "top_k": 2,  # about one first query in eight finds nothing: work for the rewriter
        "max_plan_steps": 6,
        "max_rewrites": 2,
        "temperature": 1.0,
        "max_tokens": (48, 40, 24),  # plan, analysis, rewrite
        "shared_policy": True,
    },
    "group_size": 6,
    "expert": {
        "when": "always",
        "replaces": "extra",
        "gradient": True,
        "period": 4,  # of `when` periodic: one question in four
        "roles": (),  # all roles
        "continue_with": "sampled",
    },
    "expert_pool": "world",  # the rules of the synthetic corpus
    "gold": "world",
    "plan_reward": "paper",
    "min_plan_steps": 1,  # questions of one hop need one step
    "ndcg_power": 0.5,
}


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "seed": 0,
            "policy": "tiny",  # the policy that ships with the package
            "mesh": (),  # the first device
            "compute_dtype": "float32",
            "remat": "none",  # a small model: activations fit in memory
            "system": "opera",
            "recipe": RECIPE,
            # A synthetic corpus about 240 people. The reader has memorized 30 % of its facts.
            "data": {"world": {"seed": 0, "size": 240, "famous_fraction": 0.3}},
            "index": {"encoder": "hashed", "kind": "scann"},
            "objective": {
                "loss": "clipped_policy_loss",
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
                "questions_per_step": 32,
                "save_every": 10,
                "eval_every": 10,
                "dev_questions": 40,
                "test_questions": 400,
                # Trees for the report: how often they are saved, and how many.
                "save_trees_every": 10,
                "trees_per_save": 2,
            },
            # Prompts and batches are padded to these sizes: one compiled program per pair.
            "shapes": {
                "prompt_lengths": (80, 144),
                "batch_sizes": (16, 64),
                "max_new_tokens": 48,
            },
            # Tokens per forward and backward pass, and the lengths of the packed rows.
            "packing": {"row_lengths": (128, 256), "tokens_per_device": 1536},
        }
    )
