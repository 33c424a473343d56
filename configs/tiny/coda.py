"""CoDA on the embedded default: the generated encyclopedia, a tiny policy, two CPU cores.

    ragrl warmup --config=configs/tiny/warmup_coda.py --out=runs/warm-coda
    ragrl train --config=configs/tiny/coda.py --workdir=runs/coda \
        --config.policy=runs/warm-coda/checkpoint

Reward, group statistics and objective are the paper's; turns, groups, learning rate, KL and batch
are scaled to the model, and observations are turns of the chat template. Chains have two hops at
most: a decoder of this size loses longer ones in reading, whatever its planner does.
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
            "system": "coda",
            "recipe": {
                "style": "coda_tiny",
                "top_k": 3,
                "max_turns": 4,
                "executor_turns": 3,
                "max_tokens": 56,
                "temperature": 1.0,
                "top_p": 1.0,
                "chat": True,
                "rollouts": 6,
                "formats": 1.0,
                "refine": 0.5,
                "together": True,
                "refining": True,
            },
            "data": {"world": {"seed": 0, "size": 240, "famous": 0.3, "hops": (1, 2)}},
            "index": {"encoder": "lexical", "kind": "scann"},
            "objective": {
                "ratio": "dual_clip",
                "critic": "none",
                "advantage": "group_normalised",
                "kl": {"where": "loss", "estimator": "k3", "coefficient": 0.01},
                "entropy": 0.001,
                "aggregation": "token_mean",
            },
            "optimizer": {"policy_lr": 6e-4, "schedule": "cosine", "minibatches": 5},
            "run": {
                "steps": 18,
                "questions": 10,
                "save_every": 6,
                "eval_every": 6,
                "dev_questions": 40,
                "test_questions": 400,
                "trees_every": 6,
                "trees": 2,
            },
            "shapes": {"lengths": (80, 160, 288), "batches": (16, 64), "steps": 56},
            "layout": {"lengths": (160, 352), "tokens": 2112},
        }
    )
