"""Methods for search agents against GRPO, at equal generated tokens.

    PYTHONPATH=docs/lab ragrl experiment run docs/lab/search_methods.py --out runs/methods

  CalibAdv   Wu et al. 2026, 2604.18235: a credit, see `calibrated_advantage.py`.
  LLDS       Deng et al. 2025, 2512.04220: a term of the loss, with the gate and the weight of the
             published code (`verl/workers/actor/dp_actor.py`, `train_grpo_nqhot.sh`).
  C3         Chen et al. 2026, 2603.06859: alternatives in one state, each continued by the frozen
             policy, compared by leave one out. Here all turns of a tree have two.
  Tree-GRPO  Ji et al. 2025, with the published numbers of trees and branches.
  unsure     trees of the same size that branch where the policy was unsure, compared like C3.
  refill     questions whose rollouts all earn the same are replaced within the step, twice at most.
             Query recycling (Coelho et al. 2026, 2606.10709) asks them again later, as the next
             epoch does here.

All are Search-R1 of `configs/tiny/search_r1.py` from one warm start. LLDS is meant for runs that
collapse: GRPO with it and without is also trained at five times the rate (`fast`).
"""

import dataclasses
import pathlib
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array
from ml_collections import ConfigDict

from jax_ragrl.credit.assign import over_siblings
from jax_ragrl.losses.policy import clipped_policy_loss
from jax_ragrl.rollout.expand import Tree
from jax_ragrl.rollout.tree import Record
from jax_ragrl.run.overrides import load_config
from jax_ragrl.systems.base import Recipe
from jax_ragrl.systems.baselines import executor, tree_grpo

SEARCH_R1 = "configs/tiny/search_r1.py"
KEEP = np.float32(0.2)  # the weight of LLDS
TOKENS = 120_000


def likelihood_preserving_loss(
    logp: Array, old_logp: Array, advantage: Array, mask: Array, action_gap: Array
) -> Array:
    """PPO's loss, and what a turn with A >= 0 that became less likely loses in its tokens.

    L = L_PPO + KEEP [A >= 0] [mean over the turn of (logp - old_logp) < 0] max(0, old_logp - logp)
    """
    lost = jnp.maximum(jnp.where(mask, old_logp - logp, 0.0), 0.0)
    is_kept = mask & (advantage >= 0) & (action_gap < 0)
    loss = clipped_policy_loss(logp, old_logp, advantage, mask)
    return loss + KEEP * jnp.where(is_kept, lost, 0.0)


def surprise(groups: Sequence[Sequence[Record]]) -> list[float]:
    """How unsure the policy was in each decision: the mean of -log p over its first action.

    The entropy of a decision alone would not bias the gradient. This estimate depends on the action
    too, and so does a little.
    """
    actions = [group[0].action for group in groups]
    return [1e-6 - float(np.mean(action.logps or [0.0])) for action in actions if action]


@dataclasses.dataclass(frozen=True)
class Settings:
    """The config section `recipe` of C3, and with `unsure` of the trees that branch there."""

    system: executor.SearchAgent = executor.SearchAgent()
    unsure: bool = False


def recipe(settings: Settings) -> Recipe:
    """The agent in trees, whose actions are compared with those in the same state."""
    if settings.unsure:
        trees = tree_grpo.recipe(tree_grpo.Settings(settings.system))
        assert trees.growth is not None
        growth = trees.growth._replace(weigh=surprise)
        return dataclasses.replace(trees, compare=over_siblings, growth=growth)
    agent = executor.recipe(executor.Settings(settings.system, rollouts=1))
    tree = Tree(2, settings.system.max_turns)
    return dataclasses.replace(agent, compare=over_siblings, expander=lambda roles: tree, width=2)


def get_config(name: str = "") -> ConfigDict:
    """The experiment; `c3`, `unsure`, `trees`: a config of its arms."""
    if name:
        config = load_config(pathlib.Path(SEARCH_R1), [])
        config["system"] = "search_methods" if name != "trees" else tree_grpo.__name__
        config["recipe"] = {"system": config["recipe"]["system"]}
        if name == "unsure":
            config["recipe"]["unsure"] = True
        return ConfigDict(config)
    own = {
        "GRPO": (),
        "CalibAdv": ("credit=calibrated_advantage:calibrated",),
        "LLDS": ("objective.loss=search_methods:likelihood_preserving_loss",),
        "C3": ("objective.advantage=leave_one_out",),
        "Tree-GRPO": (),
        "unsure": ("objective.advantage=leave_one_out",),
        "refill": ("run.refill=2",),
    }
    own |= {f"{name}, fast": (*own[name], "optimizer.policy_lr=2e-3") for name in ("GRPO", "LLDS")}
    ends = (f"run.token_budget={TOKENS}", "run.steps=100", "run.dev_questions=0")
    arms = {name: {"config": SEARCH_R1, "overrides": (*ends, *own[name])} for name in own}
    for name, file in {"C3": "c3", "Tree-GRPO": "trees", "unsure": "unsure"}.items():
        arms[name]["config"] = f"docs/lab/search_methods.py:{file}"
    arms["before"] = {"config": SEARCH_R1, "overrides": ("run.steps=0",)}
    for arm in arms.values():
        arm["warm_up"] = "configs/tiny/warmup_auto_rag.py:search_r1"
    return ConfigDict(
        {"arms": arms, "baseline": "GRPO", "metrics": ("em", "f1"), "world_seeds": (100,)}
    )
