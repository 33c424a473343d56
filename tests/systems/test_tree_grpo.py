"""Tree-GRPO: where trees branch, and the advantage of a turn by hand."""

import numpy as np
import pytest

from jax_ragrl.credit.advantages import group_normalised
from jax_ragrl.errors import UserError
from jax_ragrl.rollout.effects import Generate, ModelOutput, Observation
from jax_ragrl.rollout.tree import LEAF
from jax_ragrl.systems.baselines import executor, tree_grpo
from jax_ragrl.systems.baselines.executor import AGENT
from jax_ragrl.systems.baselines.tree_grpo import RandomTree, Settings
from jax_ragrl.systems.tags import render_turn
from jax_ragrl.types import Message
from tests.rollout.tape import leaves_of, talk

EXAMPLE = (Message("user", "p"),)


AGENT_SYSTEM = executor.SearchAgent("search_r1", "coda_tiny", 1, 4, as_chat_turns=True)


def look(query: str) -> str:
    return render_turn(think="t", search=query)


def outputs(answer: str) -> str:
    return render_turn(think="t", answer=answer)


def forest_of(share: float = 1.0, until: int = 2):
    """Two trees for Ann, each with a search and two answers: right and wrong, both wrong."""
    recipe = tree_grpo.recipe(Settings(AGENT_SYSTEM, RandomTree(2, share, until), rollouts=2))
    texts = {
        AGENT: [
            look("a"),
            look("b"),
            outputs("Ulm"),
            outputs("Rom"),
            outputs("Rom"),
            outputs("Bonn"),
        ]
    }
    expander = recipe.expander(frozenset((AGENT,)))
    forest, _ = talk(recipe.system, texts, expander=expander, rollouts=recipe.rollouts)
    return recipe, forest


def test_trees_branch_after_their_first_turn_and_not_in_late_ones():
    _, forest = forest_of()
    assert [answer for answer, _ in leaves_of(forest)] == ["Ulm", "Rom", "Rom", "Bonn"]
    assert len(set(forest.roots().tolist())) == 2
    tree = RandomTree(3, 1.0, branching_depth=3)
    assert [tree(turn(depth), "q").samples for depth in (1, 2, 3, 4)] == [1, 3, 3, 1]


def test_the_advantage_averages_tree_and_question():
    recipe, forest = forest_of()
    credit_N, weight_N = recipe.compare(forest, recipe.reward(forest), rule=group_normalised)
    # Of the question's four: mean 1/4, deviation 1/2. Of the first tree's two: 1/2, sqrt(1/2).
    right = (0.75 / 0.5 + 0.5 / np.sqrt(0.5)) / 2
    wrong = (-0.25 / 0.5 - 0.5 / np.sqrt(0.5)) / 2
    other = (-0.25 / 0.5 + 0.0) / 2
    leaves = [i for i, r in enumerate(forest.records) if r.role == LEAF]
    np.testing.assert_allclose(credit_N[leaves], [right, wrong, other, other], atol=1e-5)
    # A shared turn has the mean of its rollouts, and their number.
    roots = sorted(set(forest.roots().tolist()))
    np.testing.assert_allclose(credit_N[roots], [(right + wrong) / 2, other], atol=1e-5)
    assert weight_N[roots].tolist() == [2.0, 2.0]


def turn(depth: int, number: int = 0) -> Generate:
    return Generate(AGENT, EXAMPLE, depth, (ModelOutput((number,)), Observation("found")))


def test_branching_is_random_but_repeatable():
    tree = RandomTree(2, 0.3)
    wide = [tree(turn(2, i), "q").samples == 2 for i in range(1000)]
    assert abs(sum(wide) - 300) < 4 * (1000 * 0.3 * 0.7) ** 0.5
    assert wide == [tree(turn(2, i), "q").samples == 2 for i in range(1000)]
    assert wide != [tree(turn(2, i), "other").samples == 2 for i in range(1000)]


def test_one_tree_per_question_is_rejected():
    with pytest.raises(UserError, match="rollouts 1.*2 or more"):
        Settings(AGENT_SYSTEM, rollouts=1)
