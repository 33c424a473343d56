"""Runs of C-3PO that collapse for a known reason, and healthy ones, on two CPU cores.

    ragrl train --config=configs/tiny/collapse.py:rate_30 --config.seed=1 \
        --workdir=runs/rate_30-1

The numbers of the guard's page come from such runs (docs/howto/guard.md). A rollout is one chain of
actions, five per question are compared.
"""

import importlib.util
import pathlib

from ml_collections import ConfigDict

# The reward, the factor of the learning rate, and whether the KL term of the loss has a weight.
KINDS = {
    "healthy": ("answer", 1, True),
    "slow": ("answer", 0.25, True),
    "rate_10": ("answer", 10, True),
    "rate_30": ("answer", 30, True),
    "rate_100": ("answer", 100, True),
    "free": ("answer", 1, False),
    "free_10": ("answer", 10, False),
    "free_30": ("answer", 30, False),
    "free_100": ("answer", 100, False),
    "format": ("format", 2, False),
    "short": ("short", 2, False),
}
# A rate that is too high ruins a policy within four steps; a reward that pays for a form takes ten.
STEPS = dict.fromkeys(KINDS, 4) | {"healthy": 6, "slow": 6, "free": 6, "format": 10, "short": 10}


def base_config() -> ConfigDict:
    """Returns the config of C-3PO's trees."""
    file = pathlib.Path(__file__).with_name("c3po.py")
    spec = importlib.util.spec_from_file_location("c3po", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.get_config()


def get_config(kind: str = "healthy") -> ConfigDict:
    reward, factor, has_kl = KINDS[kind]
    values = base_config().to_dict()
    # Not `where=none`: the divergence is measured either way.
    coefficient = 0.005 if has_kl else 0.0
    return ConfigDict(
        values
        | {
            "system": "jax_ragrl.bench.collapse",
            "recipe": {"system": values["recipe"]["system"], "reward": reward, "rollouts": 5},
            "credit": "rollouts",
            "objective": {
                "loss": "clipped_policy_loss",
                "critic": "none",
                "advantage": "group_normalised",
                "kl": {"where": "loss", "estimator": "k3", "coefficient": coefficient},
                "aggregation": "role_sum",
            },
            "optimizer": {"policy_lr": 8e-4 * factor, "epochs": 1, "minibatches": 2},
            "run": values["run"]
            | {"steps": STEPS[kind], "questions_per_step": 4, "dev_questions": 60}
            | {"save_every": 2, "eval_every": 2, "save_trees_every": 100},
            # Four rows per pass, of one length: few programs and little padding.
            "packing": {"row_lengths": (256,), "tokens_per_device": 1024},
        }
    )
