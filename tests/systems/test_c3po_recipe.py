"""C-3PO's table of choices: the effect of its settings on trees, credit and evaluation."""

import dataclasses

import numpy as np
import pytest

from jax_ragrl.rollout.effects import Generate
from jax_ragrl.rollout.expand import Branching, ForcedAction
from jax_ragrl.rollout.system import Execution
from jax_ragrl.rollout.tree import LEAF, NO_PARENT, Record, build_forest
from jax_ragrl.systems.c3po import C3PO, FILTER, ROUTER, Settings, TreeShape, parse_router, recipe
from jax_ragrl.warmstart.demo_sources import right_answers
from tests.rollout.tape import ANN


def test_a_route_is_worth_its_leaves():
    """Below a route, an action that was sampled three times leads to a right answer, which may say
    more than the gold one, and another to a dead end."""
    c3po_recipe = recipe(Settings())
    records = [
        Record(NO_PARENT, 0, ROUTER, 1, (0,)),
        Record(0, 0, FILTER, 2, (0, 0), multiplicity=3),
        Record(0, 0, FILTER, 2, (0, 1)),
        Record(1, 0, LEAF, 3, (0, 0), answer=f"in {ANN.answers[0]}"),
        Record(2, 0, LEAF, 3, (0, 1), finish_reason="Invalid Format"),
    ]
    forest = build_forest((ANN,), records)
    reward_N = c3po_recipe.reward(forest)
    assert reward_N.tolist() == [0, 0, 0, 1, 0]
    credit_N, weight_N = c3po_recipe.credit(forest, reward_N)
    np.testing.assert_allclose(credit_N, [0.5, 1, 0, 1, 0])
    assert (weight_N > 0).all()


@pytest.mark.parametrize(
    ("retrieval", "search"),
    [
        ("prefix", ForcedAction("[Retrieval]", complete=False)),
        ("text", ForcedAction("[Retrieval] Who?")),
    ],
)
def test_the_router_has_forced_and_sampled_actions(retrieval, search):
    tree = recipe(Settings(tree=TreeShape(3, 2, router_samples=5, router_forcing=retrieval)))
    expander = tree.expander(frozenset((ROUTER,)))
    forced_texts = (ForcedAction("[No Retrieval]"), search, ForcedAction("[Planning]"))
    assert expander(Generate(ROUTER, (), 1), "Who?") == Branching(5, forced_texts)
    assert [expander(Generate(FILTER, (), n), "Who?") for n in (2, 3)] == [
        Branching(3),
        Branching(1),
    ]
    assert tree.width == 5 and recipe(Settings()).width == TreeShape().width


def test_planning_need_not_be_forced():
    tree = TreeShape(router_forcing="no_planning").expander()
    search = ForcedAction("[Retrieval]", complete=False)
    actions = tree(Generate(ROUTER, (), 1), "Who?").forced_actions
    assert actions == (ForcedAction("[No Retrieval]"), search)


def test_evaluation_skips_faults():
    system = C3PO(max_depth=9)
    c3po_recipe = recipe(Settings(system=system))
    assert c3po_recipe.system == system
    acting = dataclasses.replace(system, strict=False)
    assert c3po_recipe.evaluation_system == acting
    deeper = recipe(Settings(system=system, evaluation_depth=15))
    assert deeper.evaluation_system == dataclasses.replace(acting, max_depth=15)
    assert deeper.system == system


def test_roadmaps_are_sampled_and_answers_are_greedy():
    system = C3PO(style="c3po_tiny")
    plan, answer = (
        Execution(system, ANN).advance(parse_router(route)).effects[0]
        for route in ("[Planning]", "[No Retrieval]")
    )
    assert plan.request.sampling.temperature == 0.3
    assert answer.request.sampling.temperature == 0.0
    longer = dataclasses.replace(system, reply_tokens=2048)
    (plan,) = Execution(longer, ANN).advance(parse_router("[Planning]")).effects
    assert plan.request.sampling.max_tokens == 2048


@pytest.mark.parametrize(
    ("answer", "gold", "reward"),
    [
        ("I do not know.", "no", 0.0),
        ("North Dakota", "no", 0.0),
        ("No, it is not.", "no", 1.0),
        ("Yesterday", "yes", 0.0),
        ("That is untrue.", "true", 0.0),
        ("In 19712 of them", "1971", 0.0),
        ("It was 1971.", "1971", 1.0),
        ("首都是北京市", "北京", 1.0),
    ],
)
def test_a_leaf_is_right_if_its_answer_has_the_words_of_a_gold_answer(answer, gold, reward):
    question = dataclasses.replace(ANN, answers=(gold,))
    records = [Record(NO_PARENT, 0, LEAF, 1, (), answer=answer)]
    forest = build_forest((question,), records)
    assert recipe(Settings()).reward(forest).tolist() == [reward]
    # Demonstrations are right by the same rule.
    assert right_answers(recipe(Settings()), forest).tolist() == [reward]
