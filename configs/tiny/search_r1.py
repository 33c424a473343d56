"""Search-R1 on the embedded default: the generated encyclopedia, a tiny policy, two CPU cores.

    ragrl warmup --config=configs/tiny/warmup_auto_rag.py --config.recipe.kind=search_r1 \
        --out=runs/warm-search_r1
    ragrl train --config=configs/tiny/search_r1.py --workdir=runs/search_r1 \
        --config.policy=runs/warm-search_r1/checkpoint
    ragrl train --config=configs/tiny/search_r1.py:ppo ...     (with a critic, no groups)

Jin et al. 2025. GRPO compares five rollouts of a question and has its KL in the loss. PPO has one
rollout a question, its KL in the reward, and a critic, whose GAE (gamma and lambda 1) runs over the
turns of a rollout as one conversation. Learning rates, lengths and batch are scaled to the model.
"""

from ml_collections import ConfigDict

ROLLOUTS = {"grpo": 5, "ppo": 1}
OBJECTIVE = {
    "grpo": {
        "critic": "none",
        "advantage": "group_normalised",
        "kl": {"where": "loss", "estimator": "k3", "coefficient": 0.001},
    },
    "ppo": {
        "critic": "own",
        "advantage": "whitened_gae",
        "span": "conversation",
        "gamma": 1.0,
        "lam": 1.0,
        "kl": {"where": "reward", "estimator": "k1", "coefficient": 0.001},
    },
}
QUESTIONS = {"grpo": 12, "ppo": 60}


def get_config(preset: str = "grpo") -> ConfigDict:
    return ConfigDict(
        {
            "seed": 0,
            "policy": "tiny",
            "mesh": (),
            "compute": "float32",
            "remat": "none",
            "system": "jax_ragrl.systems.baselines.executor",
            "recipe": {
                "kind": "search_r1",
                "style": "coda_tiny",
                "top_k": 3,
                "max_turns": 3,
                "max_tokens": 56,
                "temperature": 1.0,
                "top_p": 1.0,
                "chat": True,
                "rollouts": ROLLOUTS[preset],
            },
            "data": {"world": {"seed": 0, "size": 240, "famous": 0.3, "hops": (1, 2)}},
            "index": {"encoder": "lexical", "kind": "scann"},
            "objective": {"ratio": "clip", "aggregation": "token_mean", **OBJECTIVE[preset]},
            "optimizer": {
                "policy_lr": 4e-4,
                "value_lr": 1e-3,
                "schedule": "constant",
                "minibatches": 2,
            },
            "run": {
                "steps": 18,
                "questions": QUESTIONS[preset],
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
