"""Methods for search agents against GRPO, at equal generated tokens, from a habit to undo.

    export PYTHONPATH=docs/lab
    ragrl warmup tiny --config=configs/tiny/warmup_auto_rag.py:search_r1 --out=runs/methods/warm
    python docs/lab/search_methods.py runs/methods/demos.jsonl
    ragrl warmup sft --config=configs/tiny/sft_mao_arag.py --out=runs/methods/hasty \
        --config.policy=runs/methods/warm/checkpoint --config.data.demos=runs/methods/demos.jsonl \
        --config.steps=40 --config.packing.row_lengths='(160, 352)' \
        --config.packing.tokens_per_device=2112
    ragrl experiment run docs/lab/search_methods.py:20000 --out runs/methods/20000
    ragrl experiment run docs/lab/search_methods.py:60000 --out runs/methods/60000

The warm start mostly answers after one search, also where the question needs two.

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
  imitation  of the best of as many own rollouts, without a comparison of the others.

All are Search-R1 of `configs/tiny/search_r1.py` from one warm start. LLDS is meant for runs that
collapse: GRPO with it and without is also trained at a rate of 2e-3 (`fast`).
"""

import dataclasses
import pathlib
import random
import re
import sys
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array
from ml_collections import ConfigDict

from jax_ragrl.corpus.world import generate
from jax_ragrl.credit.assign import over_siblings
from jax_ragrl.llm.base import NoLLM
from jax_ragrl.losses.policy import clipped_policy_loss
from jax_ragrl.rollout.collect import Environment, collect
from jax_ragrl.rollout.effects import Segment
from jax_ragrl.rollout.expand import Tree, single_chain
from jax_ragrl.rollout.llm_policy import conversation
from jax_ragrl.rollout.tree import Record
from jax_ragrl.run.load import load_job
from jax_ragrl.run.models import load_policy
from jax_ragrl.run.overrides import load_config
from jax_ragrl.runtime.jsonl import write_rows
from jax_ragrl.systems.base import Recipe
from jax_ragrl.systems.baselines import executor, tree_grpo
from jax_ragrl.systems.opera.expert_pool import RecordingSampler
from jax_ragrl.types import Message
from jax_ragrl.warmstart.demos import Demo
from jax_ragrl.warmstart.teacher_examples import build_world_retriever
from jax_ragrl.warmstart.teachers.base import TeacherSampler
from jax_ragrl.warmstart.teachers.coda import Teacher

SEARCH_R1 = "configs/tiny/search_r1.py"
HASTY = 0.8  # how often the teacher answers with what its first search found
KEEP = np.float32(0.2)  # the weight of LLDS


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


@dataclasses.dataclass(frozen=True)
class Hasty(Teacher):
    """Answers in place of a further search with the entity that it would search for."""

    def write(
        self, role: str, messages: Sequence[Message], history: Sequence[Segment], rng: random.Random
    ) -> str:
        text = super().write(role, messages, history, rng)
        if not history or rng.random() >= HASTY:
            return text
        return re.sub("<search>.* of (.*)</search>", r"<answer>\1</answer>", text)


def write_demos(file: pathlib.Path) -> None:
    """Writes the turns of the hasty teacher on 100 questions of each of some worlds."""
    system = load_job(load_config(pathlib.Path(SEARCH_R1), [])).recipe.system
    tokenizer = load_policy("tiny")[1]
    sampler = RecordingSampler(TeacherSampler(Hasty(), tokenizer))
    demos = list[Demo]()
    for seed in range(9_100_000, 9_100_020):  # no evaluation uses them
        world = generate(seed, 160, hops=(1, 2))
        environment = Environment(sampler, build_world_retriever(world), NoLLM())
        questions = world.questions["train"][:100]
        forest = collect(system, single_chain, questions, environment, seed=seed)
        for role, x in ((r.role, r.action) for r in forest.records if r.action):
            prompt = conversation(tokenizer, sampler.prompts[x.prompt_ids])
            demos.append(Demo("", role, prompt, x.text))
    write_rows(file, (demo.row() for demo in demos))


def get_config(name: str = "60000") -> ConfigDict:
    """The experiment with a number of generated tokens; `c3`, `unsure`, `trees`: of its arms."""
    if not name.isdigit():
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
        "imitation": (
            "objective.advantage=best_of_group",
            "objective.loss=policy_gradient_loss",
        ),
    }
    own |= {f"{arm}, fast": (*own[arm], "optimizer.policy_lr=2e-3") for arm in ("GRPO", "LLDS")}
    ends = (
        *(f"run.token_budget={name}", "run.steps=100", "run.dev_questions=0"),
        *("policy=runs/methods/hasty/checkpoint", "optimizer.policy_lr=8e-4"),
    )
    arms = {arm: {"config": SEARCH_R1, "overrides": (*ends, *own[arm])} for arm in own}
    for arm, file in {"C3": "c3", "Tree-GRPO": "trees", "unsure": "unsure"}.items():
        arms[arm]["config"] = f"docs/lab/search_methods.py:{file}"
    arms["before"] = {"config": SEARCH_R1, "overrides": (*ends, "run.steps=0")}
    values = {"arms": arms, "baseline": "GRPO", "metrics": ("em", "f1"), "world_seeds": (100,)}
    return ConfigDict(values | {"training_seeds": tuple(range(5))})


if __name__ == "__main__":
    write_demos(pathlib.Path(sys.argv[1]))
