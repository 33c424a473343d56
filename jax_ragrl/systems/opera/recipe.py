"""OPERA's table of choices: groups of one role's decisions, the role's own reward, in stages.

Liu et al. 2026, "OPERA: A Reinforcement Learning-Enhanced Orchestrated Planner-Executor
Architecture for Reasoning-Oriented Multi-Hop Retrieval". A plan consists of sub-goals. Each is
searched and analyzed and, if the passages do not answer it, searched with a rewritten query. Three
roles with separate parameters learn one after the other (`mapgrpo.py`), each from its own reward
(`rewards.py`).

Departures from the paper and its published code
  1. The paper states no limits. Here a plan has at most six steps (a longer plan is cut and counts
     as a fault), a step has at most two rewritten queries, and k is constant; the code searches
     deeper with every attempt.
  2. The answer of the last step is the answer; the code asks for a synthesis and corrects answers
     by rules, and there is no role for a synthesis here. A step that needs a missing answer fails,
     and the other steps continue.
  3. Text without a plan becomes a plan of one step, the question; text without a verdict counts as
     `no`; without a readable query the previous one stays. Each is counted and costs reward.
  4. The preset `code` of the config has the published scoring of plans, and the expert as in the
     published notes.
  5. The reward of a rewritten query needs its search, so every query in a group is searched. The
     paper does not state which query or analysis of a group the rollout continues with: here it is
     the first one that the policy sampled, never the expert's, as the paper trains on the states
     that the policies' own actions produce. `recipe.expert.continue_with=expert` continues with the
     expert's. Plans are all executed, also the expert's, since their reward needs it: if all roles
     learn at once, the other roles also learn from the states of the expert's plan.
  6. There is no trajectory memory: placeholders are filled from the answers so far, and the records
     and calls of a finished rollout contain every event.
  7. Algorithm 1's expert of an analysis is the best candidate for a sub-goal, without a condition
     on the documents it was scored for. With other documents, only an analysis that can be right is
     used here: a `no`, or a `yes` whose answer occurs in the prompt (`expert_pool.py`).
  8. Eqs. 3 and 4 sum the policy terms of a group and add one KL term per prompt. In
     `configs/opera.py` both are means over the tokens of all actions, so that the weight of the KL
     relative to the policy term is the group size times higher; an eighth of each coefficient is
     the literal weight. The estimator of `paper` is k2, whose gradient is that of eq. 4's
     KL(pi || ref); `code` has k3, the usual one, whose gradient is that of KL(ref || pi).
  9. Near duplicates in the pool are found by the cosine of the vectors of the index's encoder. With
     hashed words, BM25 or a search server it is that of word counts; the paper's is semantic.
 10. If the gold answer of a step is unknown (the middle steps of HotpotQA, and of 2WikiMultiHopQA
     in a layout without its triples, such as FlashRAG's), the reward of an analysis is its form
     only.
 11. An analysis has no confidence and no type of missing information (eq. 8).
 12. The paper calls the training of the GRPO that it compares with trajectory-level, and says also
     that all variants are trained on decomposed sub-problems. `group_size=1` is the first reading.
 13. Algorithm 1 has one set of gold passages per question, and the reward of a rewritten query is
     per sub-goal (eq. 10). If a plan has as many steps as MuSiQue's decomposition, only the passage
     of its step counts; otherwise all gold passages of the question do.
 14. A placeholder of the paper has the type of the answer, `[t from step j]` (section 3, figure 9);
     the prompt here asks for `[answer j]`. Both forms are read.
 15. The rewriter's strategy is free text in the paper (figure 11). Here the prompt offers four
     (`grammar.STRATEGIES`), and any other costs a tenth of the form's reward.
 16. `--writer labels` writes plans of one step, so that the paper's supervised row (tables 2 and
     3), trained on decomposed sub-problems, needs a large model as the writer.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Mapping

import numpy as np

from jax_ragrl.config.ranges import Count, Natural, Share
from jax_ragrl.config.schema import one_of
from jax_ragrl.credit.assign import reachable_leaves
from jax_ragrl.errors import UserError
from jax_ragrl.rollout.expand import Expander
from jax_ragrl.rollout.rewards import answer_rewards
from jax_ragrl.rollout.tree import Forest
from jax_ragrl.systems.base import Recipe
from jax_ragrl.systems.opera import rewards
from jax_ragrl.systems.opera.expert_pool import load_pool
from jax_ragrl.systems.opera.grammar import ANALYSIS, PLAN, REWRITE
from jax_ragrl.systems.opera.mapgrpo import (
    Expert,
    Groups,
    Injection,
    over_answers,
    sibling_advantages,
)
from jax_ragrl.systems.opera.system import ROLES, Opera
from jax_ragrl.systems.opera.world import WorldExpert, read_gold
from jax_ragrl.text.metrics import exact_match

PLAN_REWARDS = {"paper": rewards.plan_reward, "code": rewards.plan_reward_code}
WORLD = "world"
GOLD: Mapping[str, rewards.GoldOf] = {
    "steps": rewards.steps_gold,
    # A sub-goal about a wrong entity is judged by its own text.
    WORLD: lambda question, goal, passages: read_gold(goal.text, passages),
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """The config section `recipe`; the defaults are the paper's.

    Fields:
      system: the steps and how actions are sampled.
      group_size: actions sampled per decision of the role in training. With 1, whole rollouts of a
        question (`config.rollouts` of them) are compared by their answers instead, a reading of
        the paper's trajectory-level GRPO. It has no expert.
      expert: when an expert's action is in a group, and in whose place.
      expert_pool: a file of scored actions (`expert_pool.py`), or `world` for the rules of the
        synthetic corpus.
      gold: the source of the gold answers of sub-goals: the data set's `steps`, or `world`.
      plan_reward: the scoring of plans, `paper` or `code`.
      min_plan_steps: a plan of fewer steps loses structure reward.
      ndcg_power: the exponent of the NDCG in the rewriter's reward; 1 leaves out the root.
    """

    system: Opera = Opera()
    group_size: Count = 8
    expert: Injection = Injection()
    expert_pool: str = ""
    gold: str = "steps"
    plan_reward: str = "paper"
    min_plan_steps: Natural = 2
    ndcg_power: Share = 0.5

    def __post_init__(self) -> None:
        one_of("recipe.plan_reward", self.plan_reward, PLAN_REWARDS)
        one_of("recipe.gold", self.gold, GOLD)
        for role in self.expert.roles:
            # An unknown role would never be due, and the run would train without an expert.
            one_of("a role in recipe.expert.roles", role, ROLES)
        if self.group_size == 1 and self.expert.when != "off":
            raise UserError(
                f"recipe.group_size is {self.group_size} with recipe.expert.when "
                f"{self.expert.when!r}: use 2 or more; or 1, which compares whole rollouts, with "
                "recipe.expert.when=off"
            )


def role_rewards(forest: Forest, settings: Settings) -> np.ndarray:
    """Returns each action's reward by its role, and exact match on leaves, float32 `[N]`."""
    reward_N = answer_rewards(forest, exact_match)
    # Read the mean over leaves first: the loop below overwrites the rewards of actions.
    success_N, _ = reachable_leaves(forest, reward_N)
    for node, record in enumerate(forest.records):
        if record.action is None:
            continue
        question = forest.questions[record.question]
        if record.role == PLAN:
            assert record.parsed is not None
            score, success = PLAN_REWARDS[settings.plan_reward], float(success_N[node])
            reward_N[node] = score(question.text, record.parsed, success, settings.min_plan_steps)
        else:
            action, state, gold_of = record.parsed, record.state, GOLD[settings.gold]
            subgoal, power = state.latest(rewards.SubGoal), settings.ndcg_power
            assert action is not None
            if record.role == ANALYSIS:
                gold = gold_of(question, subgoal, state.candidates)
                reward_N[node] = rewards.analysis_reward(action, gold)
            else:
                gold = gold_of(question, subgoal, record.passages)
                reward_N[node] = rewards.rewrite_reward(action, gold, power)
    return reward_N


# Cached: an expander is built for every step, and a pool has 30,000 lines.
@functools.cache
def load_expert(when: str, pool: str, style: str) -> Expert | None:
    """Returns the expert of a run from its `pool` (see `Settings`); None if `when` is `off`.

    Raises:
      UserError: an expert is needed, but `pool` is empty or not a pool.
    """
    if when == "off":
        return None
    if not pool:
        raise UserError(
            f"recipe.expert.when is {when!r}, but there is no pool of scored actions: name its "
            "file in recipe.expert_pool, or set recipe.expert.when=off"
        )
    if pool == WORLD:
        return WorldExpert(style)
    return load_pool(pathlib.Path(pool))


def groups(trained_roles: frozenset[str], settings: Settings) -> Expander:
    """Returns the groups of the roles in training; all plans are executed, all queries searched."""
    return Groups(
        trained_roles=trained_roles,
        size=settings.group_size,
        injection=settings.expert,
        expert=load_expert(settings.expert.when, settings.expert_pool, settings.system.style),
        # The reward of a plan needs its execution, that of a query its search.
        continue_all=frozenset((PLAN,)),
        search_all=frozenset((REWRITE,)),
    )


def recipe(settings: Settings) -> Recipe:
    """Returns MAPGRPO: groups of one role's decisions, its own reward, centered in the group."""
    reward = functools.partial(role_rewards, settings=settings)
    base = Recipe(settings.system, reward, compare=over_answers, metric="em")
    # Single actions leave nothing to compare at a decision: compare whole rollouts.
    if settings.group_size == 1:
        return base
    pool = settings.expert_pool if settings.expert.when != "off" else ""
    return dataclasses.replace(
        base,
        files=(pool,) if pool not in ("", WORLD) else (),
        compare=functools.partial(sibling_advantages, injection=settings.expert),
        expander=functools.partial(groups, settings=settings),
        width=settings.group_size,
        # With any credit: the actions that the policy sampled, and not an expert alone.
        trainable=None if settings.expert.gradient else lambda f: f.multiplicity_N > f.forced_N,
        reads_leaves=False,  # roles have their own rewards
    )


def table_system(style: str, top_k: int, *, tiny: bool) -> Opera:
    """Returns the system for `ragrl evaluate`, see `systems.registry`; `tiny` changes nothing."""
    del tiny
    return Opera(style, top_k)
