"""C-3PO's table of choices: what its settings make of trees, credit and evaluation."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jax_ragrl.rollout.effects import Generate
from jax_ragrl.rollout.expand import Branching, Forced
from jax_ragrl.rollout.tree import LEAF, NO_PARENT, Record, plant
from jax_ragrl.systems.c3po import C3PO, FILTER, ROUTER, Settings, TreeShape, recipe
from tests.rollout.tape import ANN


@pytest.mark.parametrize(
    ("shape", "root"),
    [
        ({}, 0.5),
        ({"dead_leaf": "ignore"}, 1.0),
        ({"multiplicity": True}, 0.75),
        ({"multiplicity": True, "dead_leaf": "ignore"}, 1.0),
    ],
)
def test_a_route_is_worth_its_leaves_as_the_shape_of_the_tree_counts_them(shape, root):
    """Below a route an action that was written three times leads to a right answer, which may say
    more than the gold one, and another to a dead end."""
    made = recipe(Settings(tree=TreeShape(**shape)))
    records = [
        Record(NO_PARENT, 0, ROUTER, 1, (0,)),
        Record(0, 0, FILTER, 2, (0, 0), multiplicity=3),
        Record(0, 0, FILTER, 2, (0, 1)),
        Record(1, 0, LEAF, 3, (0, 0), answer=f"in {ANN.answers[0]}"),
        Record(2, 0, LEAF, 3, (0, 1), why="Invalid Format"),
    ]
    forest = plant((ANN,), records)
    reward_N = made.reward(forest)
    assert reward_N.tolist() == [0, 0, 0, 1, 0]
    credit_N, weight_N = made.credit(forest, reward_N)
    np.testing.assert_allclose(credit_N, [root, 1, 0, 1, 0])
    ignored = shape.get("dead_leaf") == "ignore"
    assert (weight_N > 0).tolist() == [True, True, not ignored, True, not ignored]


@pytest.mark.parametrize(
    ("retrieval", "search"),
    [("prefix", Forced("[Retrieval]", complete=False)), ("text", Forced("[Retrieval] Who?"))],
)
def test_a_router_is_forced_to_each_strategy_beside_what_it_is_free_to_try(retrieval, search):
    grown = recipe(Settings(tree=TreeShape(3, 2, free=5, retrieval=retrieval)))
    expander = grown.expander(frozenset((ROUTER,)))
    forced = (Forced("[No Retrieval]"), search, Forced("[Planning]"))
    assert expander(Generate(ROUTER, (), 1), "Who?") == Branching(5, forced)
    assert [expander(Generate(FILTER, (), n), "Who?") for n in (2, 3)] == [
        Branching(3),
        Branching(1),
    ]
    assert grown.width == 5 and recipe(Settings()).width == TreeShape().width


def test_what_is_evaluated_skips_what_training_kills_and_follows_one_roadmap():
    system = C3PO(roadmaps=2, max_depth=9)
    made = recipe(Settings(system=system))
    assert made.system == system
    assert made.evaluated == dataclasses.replace(system, strict=False, roadmaps=1)


def test_roadmaps_are_drawn_and_answers_are_greedy():
    system = C3PO(style="c3po_tiny", roadmaps=2)
    plan, answer = (
        system.wants(dataclasses.replace(system.start(ANN), phase=phase))
        for phase in ("plan", "answer")
    )
    assert (plan.request.sampling.temperature, plan.samples) == (0.3, 2)
    assert (answer.request.sampling.temperature, answer.samples) == (0.0, 1)
