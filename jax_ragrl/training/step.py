"""One step of training on one page: collect, reward, credit, turns, update.

    questions -> collect -> reward -> credit -> turns -> update -> policies
                 forest     reward_N  credit_N  prompts and actions

`train_step` is the whole step. The loop (`training.loop`) takes the same step in its parts, because
it measures them, and begins the rollouts of the next step in between (`training.rollouts`).
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from jax_ragrl.learner.dpo import Preference, pairs_of, prefer_all
from jax_ragrl.learner.packing import Turn, carry_credit, turns_of
from jax_ragrl.learner.policies import Policies, Schedule, score_texts, update_all
from jax_ragrl.rollout.collect import Environment, collect
from jax_ragrl.rollout.data_parallel import join_forests, merge_shards, own_shard
from jax_ragrl.rollout.rewards import rewards_of
from jax_ragrl.rollout.tree import Forest
from jax_ragrl.runtime.multihost import all_gather_object
from jax_ragrl.systems.base import Credit, Recipe, checked_credit
from jax_ragrl.text.tokenizer import ChatTokenizer
from jax_ragrl.types import Question


class Method(NamedTuple):
    """What all steps of a run have in common.

    Fields:
      credit: from a forest and its rewards to a credit and a weight per node.
      seed: names the run: equal seeds repeat it.
      lockstep: whether all branches wait for each other, see `rollout.scheduler`.
      refill: the rounds in which a step may ask further questions in place of dead ones, see
        `dead_questions`, which are not trained then.
      carry_tokens: the longest conversation in tokens over which credit is carried; 0: it ends with
        its turn.
      preference: with it, the update is DPO on pairs of rollouts.
      is_measured: whether it is measured how far an update moves a policy.
      role_gradients_every: steps between measurements of each role's part in the gradient; 0: none.
    """

    recipe: Recipe
    credit: Credit
    seed: int = 0
    schedule: Schedule = Schedule()
    lockstep: bool = True
    train_forced: bool = True
    refill: int = 0
    carry_tokens: int = 0
    preference: Preference | None = None
    is_measured: bool = False
    role_gradients_every: int = 0

    @property
    def policy_of(self) -> dict[str, str]:
        return {name: role.policy for name, role in self.recipe.system.roles.items()}

    def roles(self, step: int) -> tuple[str, ...]:
        """Returns the roles trained at a step (from 0), which branch."""
        return self.schedule.roles(step, tuple(self.policy_of))


def train_step(
    method: Method,
    policies: Policies,
    environment: Environment,
    questions: Sequence[Question],
    step: int,
    tokenizer: ChatTokenizer | None = None,
) -> tuple[Policies, dict[str, float], Forest]:
    """Takes one step; on several processes all of them call it (a collective).

    Args:
      method: what all steps have in common.
      policies: the policies by name; the buffers of their states are donated.
      environment: a sampler of the policies, retriever and language models.
      questions: of the step, on all processes the same.
      step: from 0; part of every seed.
      tokenizer: of the policies, for a credit that scores texts (`Forest.score`).

    Returns the updated policies, the metrics of the update and the rollouts with their rewards.
    """
    forest = roll_out(method, environment, questions, step)
    turns, _ = turns_to_train(method, with_scorer(forest, method, policies, tokenizer))
    policies, metrics = learn(method, policies, forest, turns, step)
    return policies, metrics, forest


def roll_out(
    method: Method, environment: Environment, questions: Sequence[Question], step: int
) -> Forest:
    """Rolls out questions on all processes, with rewards; arguments as in `train_step`."""
    return gather(method, questions, lambda: collect_shard(method, environment, questions, step))


def collect_shard(
    method: Method,
    environment: Environment,
    questions: Sequence[Question],
    step: int,
    refill: int = 0,
) -> Forest:
    """Rolls out the questions of this process, without rewards; arguments as in `train_step`.

    `refill` is the number of the round in which they replace dead questions, from 1.
    """
    recipe = method.recipe
    own, copies = own_shard(questions, recipe.rollouts)
    return collect(
        recipe.system,
        recipe.expander(frozenset(method.roles(step))),
        own,
        environment,
        # Distinct for all runs of up to a million steps; in a round for a question asked before.
        seed=(refill << 64) + method.seed * 1_000_003 + step,
        rollouts=recipe.rollouts,
        copies=copies,
        lockstep=method.lockstep,
        growth=recipe.growth,
    )


def gather(method: Method, questions: Sequence[Question], shard: Callable[[], Forest]) -> Forest:
    """Returns the rollouts of all processes with their rewards (a collective).

    `shard` returns the rollouts of this process, see `collect_shard`.
    """
    forest = merge_shards(questions, all_gather_object(shard), method.recipe.rollouts)
    return forest._replace(reward_N=rewards_of(method.recipe.reward, forest))


def join(method: Method, first: Forest, second: Forest) -> Forest:
    """Returns the rollouts of the questions of both forests, with their rewards."""
    questions, size = first.questions + second.questions, len(first.questions)
    numbers = range(size), range(size, len(questions))
    forest = join_forests(questions, (first, second), numbers)
    return forest._replace(reward_N=rewards_of(method.recipe.reward, forest))


def with_scorer(
    forest: Forest, method: Method, policies: Policies, tokenizer: ChatTokenizer | None
) -> Forest:
    """Returns the forest as a credit may read it: `Forest.score` asks the policies."""
    if tokenizer is None:
        return forest
    scorer = functools.partial(score_texts, policies, method.policy_of, tokenizer)
    return forest._replace(scorer=scorer)


def turns_to_train(method: Method, forest: Forest) -> tuple[list[Turn], np.ndarray]:
    """Returns the turns to train with their credit, and the credit of all nodes.

    The latter is float32 `[N]`; nan where it is undefined, because no leaf is reachable. Raises
    `UserError` if the credit rule does not return that, see `checked_credit`.
    """
    found = method.credit(forest, forest.reward_N)
    credit_N, weight_N = checked_credit("config.credit", found, len(forest.records))
    turns = turns_of(forest, credit_N, weight_N, include_forced=method.train_forced)
    if method.refill:
        dead = dead_questions(forest, turns)
        turns = [turn for turn in turns if forest.records[turn.node].question not in dead]
    if method.carry_tokens:
        turns = carry_credit(turns, forest, credit_N, method.carry_tokens)
    return turns, np.where(weight_N > 0, credit_N, np.nan)


def dead_questions(forest: Forest, turns: Sequence[Turn]) -> set[int]:
    """Returns the indices of the questions whose turns all have credit 0; failed ones are not.

    With a group rule their rollouts all earned the same. Failed questions are no dead ones: further
    questions would fail too.
    """
    live = {forest.records[turn.node].question for turn in turns if turn.credit}
    return set(range(len(forest.questions))) - live - set(forest.failed_questions)


def learn(
    method: Method, policies: Policies, forest: Forest, turns: Sequence[Turn], step: int
) -> tuple[Policies, dict[str, float]]:
    """Updates the policies, whose states are donated, on the turns of a step or on its pairs."""
    rng, roles = random.Random(f"{method.seed} {step}"), method.roles(step)
    if method.preference is not None:
        pairs = pairs_of(forest, turns, roles, method.preference.margin)
        return prefer_all(
            policies,
            method.policy_of,
            pairs,
            method.preference.beta,
            rng,
            is_measured=method.is_measured,
        )
    every = method.role_gradients_every
    return update_all(
        policies,
        method.policy_of,
        roles,
        turns,
        rng,
        is_measured=method.is_measured,
        by_role=bool(every) and step % every == 0,
    )
