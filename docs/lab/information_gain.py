"""The credit of IGPO (Wang et al. 2025, 2510.14967) from log-probabilities, to be audited.

    PYTHONPATH=docs/lab ragrl bench credit --config=configs/tiny/search_r1.py --folder runs/gain \
        --rules information_gain:gain,rollouts

A turn of a search agent earns what it adds to the probability of the first gold answer, the last
turn the reward of the answer:

  r_t = p(gold | context after turn t) - p(gold | context before it),  p = exp(mean log-probability)

The group rule compares all turns of a question, and a turn has the sum from itself on.

    python docs/lab/information_gain.py --config.policy=runs/warm/checkpoint

prints as JSON what asking for the gold answer after every turn takes of a step of six turns.
"""

import json
import pathlib
import sys
import tempfile
import time

import jax
import numpy as np

from jax_ragrl.credit.assign import Rule, compare, reachable_leaves
from jax_ragrl.rollout.tree import NO_PARENT, Forest, Text
from jax_ragrl.run.build import build_components
from jax_ragrl.run.load import load_job
from jax_ragrl.run.overrides import load_config
from jax_ragrl.training.setup import acting_environment, method_of, prepare_policies
from jax_ragrl.training.step import learn, roll_out, turns_to_train, with_scorer


def gain(forest: Forest, reward_N: np.ndarray, rule: Rule) -> tuple[np.ndarray, np.ndarray]:
    """IGPO without discounting (gamma 1); credit and weight, float32 `[N]`."""
    advantage_N = compare(rule, turn_rewards(forest, reward_N), groups(forest))
    credit_N, leaves_N = reachable_leaves(forest, advantage_N)
    return credit_N, (leaves_N > 0).astype(np.float32)


def groups(forest: Forest) -> np.ndarray:
    """The question of each action; -1: leaves, which are compared with nothing."""
    return np.where(forest.leaf_N, -1, forest.question_N)


def turn_rewards(forest: Forest, reward_N: np.ndarray) -> np.ndarray:
    """The reward of each turn, float32 `[N]`; over several children of one node their mean."""
    actions = np.flatnonzero(~forest.leaf_N)
    records = [forest.records[n] for n in actions]
    texts = [
        Text(r.role, r.action.prompt_ids, forest.questions[r.question].answers[0], "<answer>")
        for r in records
    ]
    # What a node stands for: the probability before an action, the reward of a leaf.
    value_N = np.where(forest.leaf_N, reward_N, 0).astype(np.float64)
    value_N[actions] = [np.exp(logp_T.mean()) for logp_T in forest.score(texts)]
    has_parent = forest.parent_N != NO_PARENT
    parents = forest.parent_N[has_parent]
    sum_N, count_N, last_N = (np.zeros(len(value_N)) for _ in range(3))
    np.add.at(sum_N, parents, value_N[has_parent])
    np.add.at(count_N, parents, 1)
    np.add.at(last_N, parents, forest.leaf_N[has_parent])
    after_N = sum_N / np.maximum(count_N, 1)
    # The last turn has the reward of its answer, not a difference of two kinds.
    before_N = np.where(last_N > 0, 0, value_N)
    return np.where(count_N > 0, after_N - before_N, 0).astype(np.float32)


def main(overrides: list[str]) -> None:
    turns = ["--config.recipe.system.max_turns=6", "--config.credit=information_gain:gain"]
    job = load_job(load_config("configs/tiny/search_r1.py", [*turns, *overrides]))
    with tempfile.TemporaryDirectory() as folder:
        parts = build_components(job, pathlib.Path(folder))
    policies, method = prepare_policies(job, parts.policies, parts.tokenizer), method_of(job)
    questions = parts.questions["train"][: job.run.questions_per_step]
    for _ in range(3):  # the first step compiles
        seconds, start = 0.0, time.perf_counter()
        forest = roll_out(method, acting_environment(job, parts, policies), questions, 0)
        asked = with_scorer(forest, method, policies, parts.tokenizer)

        def score(texts, scorer=asked.scorer):
            nonlocal seconds
            before = time.perf_counter()
            found = scorer(texts)
            seconds += time.perf_counter() - before
            return found

        turns, _ = turns_to_train(method, asked._replace(scorer=score))
        policies, _ = learn(method, policies, forest, turns, 0)
        jax.block_until_ready([policy.state.policy.params for policy in policies.values()])
        step = time.perf_counter() - start
    sizes = np.bincount(forest.question_N[~forest.leaf_N]) / method.recipe.rollouts
    facts = {"turns_per_rollout": sizes.mean(), "score_s": seconds, "step_s": step}
    print(json.dumps({**facts, "share": seconds / step}))


if __name__ == "__main__":
    main(sys.argv[1:])
