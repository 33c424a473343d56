"""C-3PO: its grammar, and the effect of its settings on trees, credit and evaluation."""

import dataclasses

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from jax_ragrl.rollout.effects import Generate
from jax_ragrl.rollout.expand import Branching, ForcedAction
from jax_ragrl.rollout.roles import ParsedAction
from jax_ragrl.rollout.system import Execution
from jax_ragrl.rollout.tree import LEAF, NO_PARENT, Record, build_forest
from jax_ragrl.systems.c3po import (
    C3PO,
    FILTER,
    LLM,
    MAX_QUERY_WORDS,
    NO_RETRIEVAL,
    PLANNING,
    RETRIEVAL,
    ROUTER,
    Settings,
    TreeShape,
    parse_decision,
    parse_filter,
    parse_router,
    recipe,
    render_decision,
    render_filter,
    render_router,
)
from jax_ragrl.warmstart.demo_sources import right_answers
from tests.rollout.tape import ANN

WORDS = st.lists(
    st.text(st.characters(exclude_categories=("Z", "C"), exclude_characters="[]"), min_size=1),
    min_size=1,
    max_size=MAX_QUERY_WORDS,
).map(" ".join)
QUERIES = WORDS.filter(lambda text: text == " ".join(text.split()))
THOUGHTS = (
    st.text(min_size=1)
    .map(str.strip)
    .filter(lambda text: text and "Action:" not in text and "Thought:" not in text)
)
NUMBERS = st.lists(st.integers(0, 999_999_999), unique=True).map(tuple)


@hypothesis.given(query=QUERIES, thought=THOUGHTS, numbers=NUMBERS)
def test_a_rendered_action_parses_back(query, thought, numbers):
    search = ParsedAction(RETRIEVAL, (query,))
    assert parse_router(render_router(RETRIEVAL, query)) == search
    for action in (NO_RETRIEVAL, PLANNING):
        assert parse_router(render_router(action)) == ParsedAction(action)
    assert parse_filter(render_filter(thought, numbers)) == ParsedAction("Select", numbers, thought)
    decision = parse_decision(render_decision(thought, RETRIEVAL, query))
    assert decision == search._replace(thought=thought)
    assert parse_decision(render_decision(thought, LLM)) == ParsedAction(LLM, (), thought)


def search(query: str, thought: str = "") -> ParsedAction:
    return ParsedAction(RETRIEVAL, (query,), thought)


def select(*numbers: int, thought: str = "t") -> ParsedAction:
    return ParsedAction("Select", numbers, thought)


FORMAT, ACTION, INDEX = "Invalid Format", "Invalid Action", "Invalid Document Idx"


@pytest.mark.parametrize(
    ("parse", "text", "action"),
    [
        (parse_router, "[No Retrieval]", ParsedAction(NO_RETRIEVAL)),
        (parse_router, "[Retrieval] who directed Jaws", search("who directed Jaws")),
        (parse_router, "[Retrieval]   spaces \n and lines ", search("spaces and lines")),
        # The first bracket is the action, the text around it the query.
        (parse_router, "I choose [Planning].", ParsedAction(PLANNING)),
        (parse_router, "please [Retrieval] who", search("please who")),
        (parse_router, "[Planning] [Retrieval] who", ParsedAction(PLANNING)),
        (parse_router, "[Retrieval] a [1] b", search("a [1] b")),
        (parse_router, "[No Retrieval] because I know", ParsedAction(NO_RETRIEVAL)),
        (parse_router, "", FORMAT),
        (parse_router, "[Retrieval who", FORMAT),
        (parse_router, "[]", ACTION),
        (parse_router, "[retrieval] who", ACTION),
        (parse_router, "[[Retrieval]] who", ACTION),
        (parse_router, "[LLM]", ACTION),
        (parse_router, "[Retrieval] \n ", ACTION),
        (parse_router, "[1] [Retrieval] who", ACTION),
        (parse_filter, "Thought: t\nAction: [1, 2]", select(1, 2)),
        (parse_filter, "Thought: t\nAction:[1,2]", select(1, 2)),
        (
            parse_filter,
            "the tag may be missing Action: [3]",
            select(3, thought="the tag may be missing"),
        ),
        (parse_filter, "Thought: t\nAction: [ \n ]", select()),
        (parse_filter, "Thought: t\nAction: [2, 1, 2]", select(2, 1)),
        (parse_filter, "Thought: t\nAction: [1] and [2]", select(1)),
        (parse_filter, "Thought: [4] helps\nAction: [1]", select(1, thought="[4] helps")),
        (parse_filter, "noise Thought: t\nAction: [-1, +2, 007]", select(-1, 2, 7)),
        (parse_filter, "", FORMAT),
        (parse_filter, "Thought: t Action: keep [1", FORMAT),
        (parse_filter, "Thought: t\n[1]", FORMAT),
        (parse_filter, "Thought:  \nAction: [1]", FORMAT),
        (parse_filter, "Thought: t\nAction: 1", FORMAT),
        (parse_filter, "[1] Action:", FORMAT),
        *((parse_filter, f"Thought: t\nAction: [{x}]", INDEX) for x in ("one", "1.5", "1,", "1 2")),
        *((parse_filter, f"Thought: t\nAction: [{x}]", INDEX) for x in ("[1]", "1_0", "9" * 5000)),
        (parse_decision, "Thought: t\nAction: [LLM]", ParsedAction(LLM, (), "t")),
        (parse_decision, "Thought: next\nAction: [Retrieval] who", search("who", "next")),
        (parse_decision, "no tag\nAction: [LLM]", ParsedAction(LLM, (), "no tag")),
        (parse_decision, "Thought: [LLM]\nAction: [Retrieval] who", search("who", "[LLM]")),
        (
            parse_decision,
            "Thought: t\nAction: [LLM]\nAction: [Retrieval] a",
            ParsedAction(LLM, (), "t"),
        ),
        (parse_decision, "[LLM]", FORMAT),
        (parse_decision, "Thought: \nAction: [LLM]", FORMAT),
        (parse_decision, "Thought: t\nAction: [Planning]", ACTION),
        (parse_decision, "Thought: t\nAction: [Retrieval]", ACTION),
    ],
)
def test_a_text_is_an_action_or_an_error(parse, text, action):
    result = parse(text)
    if isinstance(action, str):
        assert (result.valid, result.error, result.action, result.args) == (False, action, "", ())
    else:
        assert result == action


@pytest.mark.parametrize(
    "parse", [parse_router, lambda t: parse_decision(f"Thought: t\nAction:{t}")]
)
def test_a_query_is_cut_to_a_hundred_words(parse):
    words = [f"w{i}" for i in range(150)]
    assert parse("[Retrieval] " + " ".join(words)).args == (" ".join(words[:100]),)


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
    ("retrieval", "forced"),
    [
        ("prefix", (ForcedAction("[Retrieval]", complete=False), ForcedAction("[Planning]"))),
        ("text", (ForcedAction("[Retrieval] Who?"), ForcedAction("[Planning]"))),
        ("no_planning", (ForcedAction("[Retrieval]", complete=False),)),
    ],
)
def test_the_router_has_forced_and_sampled_actions(retrieval, forced):
    tree = recipe(Settings(tree=TreeShape(3, 2, router_samples=5, router_forcing=retrieval)))
    expander = tree.expander(frozenset((ROUTER,)))
    forced = (ForcedAction("[No Retrieval]"), *forced)
    assert expander(Generate(ROUTER, (), 1), "Who?") == Branching(5, forced)
    assert [expander(Generate(FILTER, (), n), "Who?") for n in (2, 3)] == [
        Branching(3),
        Branching(1),
    ]
    assert tree.width == 5 and recipe(Settings()).width == TreeShape().width


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
        ("No, it is not.", "no", 1.0),
        ("In 19712 of them", "1971", 0.0),
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
