"""Tree-GRPO: where its trees branch, and a turn's advantage by hand."""

from __future__ import annotations

import numpy as np
import pytest

from jax_ragrl.errors import UserError
from jax_ragrl.rollout.effects import Generate, Said, Told
from jax_ragrl.rollout.tree import LEAF
from jax_ragrl.systems.baselines import executor, tree_grpo
from jax_ragrl.systems.baselines.executor import AGENT
from jax_ragrl.systems.baselines.tree_grpo import RandomTree, Settings
from jax_ragrl.systems.tags import render_turn
from jax_ragrl.types import Message
from tests.systems.talk import ends, talk

ASKED = (Message("user", "p"),)


def agent(rollouts: int = 2) -> executor.Settings:
    return executor.Settings("search_r1", "coda_tiny", 1, 4, chat=True, rollouts=rollouts)


def look(query: str) -> str:
    return render_turn(think="t", search=query)


def said(answer: str) -> str:
    return render_turn(think="t", answer=answer)


def grown(share: float = 1.0, until: int = 2):
    """Two trees of Ann, each of one search and then two answers: right and wrong, both wrong."""
    recipe = tree_grpo.recipe(Settings(agent(), RandomTree(2, share, until)))
    texts = {AGENT: [look("a"), look("b"), said("Ulm"), said("Rom"), said("Rom"), said("Bonn")]}
    expander = recipe.expander(frozenset((AGENT,)))
    forest, _ = talk(recipe.system, texts, expander=expander, rollouts=recipe.rollouts)
    return recipe, forest


def test_trees_branch_after_their_first_turn():
    _, forest = grown()
    assert [answer for answer, _ in ends(forest)] == ["Ulm", "Rom", "Rom", "Bonn"]
    assert len(set(forest.roots().tolist())) == 2


def test_an_advantage_is_the_mean_of_that_in_the_tree_and_that_in_the_question():
    recipe, forest = grown()
    credit_N, weight_N = recipe.credit(forest, recipe.reward(forest))
    # Of the question's four: mean 1/4, deviation 1/2. Of the first tree's two: 1/2, sqrt(1/2).
    right = (0.75 / 0.5 + 0.5 / np.sqrt(0.5)) / 2
    wrong = (-0.25 / 0.5 - 0.5 / np.sqrt(0.5)) / 2
    other = (-0.25 / 0.5 + 0.0) / 2
    leaves = [i for i, r in enumerate(forest.records) if r.role == LEAF]
    np.testing.assert_allclose(credit_N[leaves], [right, wrong, other, other], atol=1e-5)
    # A turn that rollouts share has the mean of theirs, and counts them.
    roots = sorted(set(forest.roots().tolist()))
    np.testing.assert_allclose(credit_N[roots], [(right + wrong) / 2, other], atol=1e-5)
    assert weight_N[roots].tolist() == [2.0, 2.0]


def turn(depth: int, number: int = 0) -> Generate:
    return Generate(AGENT, ASKED, depth, (Said((number,)), Told("found")))


def test_the_first_turn_and_late_turns_never_branch():
    tree = RandomTree(3, 1.0, until=3)
    assert [tree(turn(depth), "q").samples for depth in (1, 2, 3, 4)] == [1, 3, 3, 1]


def test_a_share_of_the_turns_branches_and_a_turn_repeats_its_choice():
    tree = RandomTree(2, 0.3)
    wide = [tree(turn(2, i), "q").samples == 2 for i in range(1000)]
    assert abs(sum(wide) - 300) < 4 * (1000 * 0.3 * 0.7) ** 0.5
    assert wide == [tree(turn(2, i), "q").samples == 2 for i in range(1000)]
    assert wide != [tree(turn(2, i), "other").samples == 2 for i in range(1000)]


def test_one_tree_a_question_is_refused():
    with pytest.raises(UserError, match="rollouts 1.*2 or more"):
        Settings(agent(rollouts=1))
