"""CalibAdv (Wu et al. 2026, 2604.18235), a credit for search agents, to be audited.

    PYTHONPATH=docs/lab ragrl bench credit --config=configs/tiny/search_r1.py --folder runs/calib \
        --config.policy=runs/warm-search_r1/checkpoint \
        --rules calibrated_advantage:calibrated,rollouts

It changes the advantage A of a rollout in its group, GRPO's, from turn to turn by the passages that
the turn found. Rollouts that branch are refused, and trees are left out of the table.

By its code (github.com/wujwyi/CalibAdv, `train_grpo.sh`, `verl/trainer/main_ppo_format.py` and
`verl/trainer/ppo/core_algos.py`). Departures:
  1. The reward is that of the config (exact match for Search-R1) in place of F1.
  2. A turn whose thought repeats an earlier one of its rollout is not told apart: the code gives it
     no silver passages.
"""

from collections.abc import Iterator

import numpy as np

from jax_ragrl.credit.assign import Rule, over_rollouts
from jax_ragrl.rollout.tree import NO_PARENT, Forest
from jax_ragrl.systems.base import path_from_root

RIGHT = 0.7  # the least reward of a rollout whose passages are silver


def calibrated(forest: Forest, reward_N: np.ndarray, rule: Rule) -> tuple[np.ndarray, np.ndarray]:
    """Useful searches lose less, and last turns lose as much as they gain.

      A(turn) = A (1 - q(turn)) if A < 0                                  q: see `silver_share`
      A(last turn) = A L / G    if A > 0

    `G` is the sum of the positive advantages of the last turns of a question, each times its number
    of tokens, `L` that of the negative ones without the sign. Credit and weight, float32 `[N]`.
    """
    credit_N, weight_N = over_rollouts(forest, reward_N, rule)
    credit_N = np.where(credit_N < 0, credit_N * (1 - silver_share(forest, reward_N)), credit_N)
    parents = forest.parent_N[forest.leaf_N]
    parents = parents[parents != NO_PARENT]
    tokens_N = np.zeros_like(credit_N)
    tokens_N[parents] = [len(forest.records[n].action.ids) for n in parents]
    for question in np.unique(forest.question_N):
        of_N = (forest.question_N == question) & (tokens_N > 0)
        gained, lost = (of_N & (sign * credit_N > 0) for sign in (1, -1))
        if gained.any() and lost.any():
            total = (credit_N * tokens_N)[gained].sum()
            credit_N[gained] *= -(credit_N * tokens_N)[lost].sum() / total
    return credit_N, weight_N


def silver_share(forest: Forest, reward_N: np.ndarray) -> np.ndarray:
    """The share of the passages of each search that are silver and new in its rollout, `[N]`.

    Silver are the passages of the best rollouts of a question, if their reward is `RIGHT` or more.
    It is 0 after an earlier search with two or more of the same passages, and without an answer.
    """
    share_N, rollouts = np.zeros(len(reward_N), np.float32), list(searches(forest))
    for question in range(len(forest.questions)):
        own = [(leaf, turns) for leaf, turns in rollouts if forest.question_N[leaf] == question]
        best = max([RIGHT, *(float(reward_N[leaf]) for leaf, _ in own)])
        right = [turns for leaf, turns in own if reward_N[leaf] >= best]
        silver = {p.id for turns in right for n in turns for p in forest.records[n].passages}
        for _, turns in own:
            earlier: list[set[str]] = []
            for n in turns:
                ids = {p.id for p in forest.records[n].passages}
                if all(len(ids & other) < 2 for other in earlier):
                    share_N[n] = len((ids & silver).difference(*earlier)) / len(ids)
                earlier.append(ids)
    return share_N


def searches(forest: Forest) -> Iterator[tuple[int, list[int]]]:
    """The leaf of each rollout with an answer, and its turns that found passages, in order."""
    for leaf in np.flatnonzero(forest.leaf_N & ~forest.unanswered_N).tolist():
        turns = path_from_root(forest, leaf)
        yield leaf, [n for n in turns if forest.records[n].passages]
