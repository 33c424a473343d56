from __future__ import annotations

import hypothesis
import pytest
from hypothesis import strategies as st

from jax_ragrl.rollout.roles import ParsedAction, invalid_action
from jax_ragrl.systems.c3po import (
    LLM,
    MAX_QUERY_WORDS,
    NO_RETRIEVAL,
    PLANNING,
    RETRIEVAL,
    parse_decision,
    parse_filter,
    parse_router,
    render_decision,
    render_filter,
    render_router,
)
from tests.systems.test_parsers import ANYTHING, PIECES


@hypothesis.given(text=ANYTHING | PIECES)
def test_a_valid_action_has_complete_arguments(text):
    for parse in (parse_router, parse_decision):
        result = parse(text)
        if result.action == RETRIEVAL:
            (query,) = result.args
            assert query == " ".join(query.split()) and 1 <= len(query.split()) <= MAX_QUERY_WORDS
        else:
            assert result.args == ()
    selection = parse_filter(text)
    assert len(set(selection.args)) == len(selection.args)
    assert all(isinstance(i, int) for i in selection.args)


# --- Rendered actions parse back ---------------------------------------------------------------

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


@hypothesis.given(query=QUERIES)
def test_a_rendered_route_parses_back(query):
    assert parse_router(render_router(RETRIEVAL, query)).args == (query,)
    for action in (NO_RETRIEVAL, PLANNING):
        assert parse_router(render_router(action)).action == action


@hypothesis.given(thought=THOUGHTS, numbers=st.lists(st.integers(0, 999_999_999), unique=True))
def test_a_rendered_selection_parses_back(thought, numbers):
    result = parse_filter(render_filter(thought, tuple(numbers)))
    assert result == ParsedAction("Select", tuple(numbers), thought)


@hypothesis.given(thought=THOUGHTS, query=QUERIES)
def test_a_rendered_decision_parses_back(thought, query):
    result = parse_decision(render_decision(thought, RETRIEVAL, query))
    assert result == ParsedAction(RETRIEVAL, (query,), thought)
    assert parse_decision(render_decision(thought, LLM)) == ParsedAction(LLM, (), thought)


# --- Case by case -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "action", "args"),
    [
        ("[No Retrieval]", NO_RETRIEVAL, ()),
        ("[Planning]", PLANNING, ()),
        ("[Retrieval] who directed Jaws", RETRIEVAL, ("who directed Jaws",)),
        ("[Retrieval]   spaces \n and lines ", RETRIEVAL, ("spaces and lines",)),
        # The first bracket is the action, the text around it the query.
        ("I choose [Planning].", PLANNING, ()),
        ("please [Retrieval] who", RETRIEVAL, ("please who",)),
        ("[Planning] [Retrieval] who", PLANNING, ()),
        ("[Retrieval] a [1] b", RETRIEVAL, ("a [1] b",)),
        ("[No Retrieval] because I know", NO_RETRIEVAL, ()),
    ],
)
def test_the_router_parses(text, action, args):
    assert parse_router(text) == ParsedAction(action, args)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "Invalid Format"),
        ("Retrieval who", "Invalid Format"),
        ("[Retrieval who", "Invalid Format"),
        ("Retrieval] who", "Invalid Format"),
        ("[]", "Invalid Action"),
        ("[retrieval] who", "Invalid Action"),
        ("[ Retrieval ] who", "Invalid Action"),
        ("[[Retrieval]] who", "Invalid Action"),
        ("[LLM]", "Invalid Action"),
        ("[Retrieval]", "Invalid Action"),
        ("[Retrieval] \n ", "Invalid Action"),
        ("[1] [Retrieval] who", "Invalid Action"),
    ],
)
def test_the_router_rejects(text, error):
    assert parse_router(text) == invalid_action(error)


@pytest.mark.parametrize(
    "parse", [parse_router, lambda t: parse_decision(f"Thought: t\nAction:{t}")]
)
def test_a_query_is_cut_to_a_hundred_words(parse):
    words = [f"w{i}" for i in range(150)]
    assert parse("[Retrieval] " + " ".join(words)).args == (" ".join(words[:100]),)


@pytest.mark.parametrize(
    ("text", "numbers", "thought"),
    [
        ("Thought: both\nAction: [1, 2]", (1, 2), "both"),
        ("Thought: both\nAction:[1,2]", (1, 2), "both"),
        ("the tag may be missing Action: [3]", (3,), "the tag may be missing"),
        ("Thought: none\nAction: []", (), "none"),
        ("Thought: none\nAction: [ \n ]", (), "none"),
        ("Thought: twice\nAction: [2, 1, 2]", (2, 1), "twice"),
        ("Thought: t\nAction: [1] and [2]", (1,), "t"),
        ("Thought: [4] helps\nAction: [1]", (1,), "[4] helps"),
        ("noise Thought: t\nAction: [-1, +2, 007]", (-1, 2, 7), "t"),
        ("Thought: t Action: keep [1", None, None),
    ],
)
def test_the_filter_parses(text, numbers, thought):
    result = parse_filter(text)
    if numbers is None:
        assert result.error == "Invalid Format"
    else:
        assert result == ParsedAction("Select", numbers, thought)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "Invalid Format"),
        ("[1]", "Invalid Format"),
        ("Thought: t\n[1]", "Invalid Format"),
        ("Action: [1]", "Invalid Format"),
        ("Thought:  \nAction: [1]", "Invalid Format"),
        ("Thought: t\nAction: 1", "Invalid Format"),
        ("[1] Action:", "Invalid Format"),
        ("Thought: t\nAction: [one]", "Invalid Document Idx"),
        ("Thought: t\nAction: [1.5]", "Invalid Document Idx"),
        ("Thought: t\nAction: [1,]", "Invalid Document Idx"),
        ("Thought: t\nAction: [1 2]", "Invalid Document Idx"),
        ("Thought: t\nAction: [[1]]", "Invalid Document Idx"),
        ("Thought: t\nAction: [1_0]", "Invalid Document Idx"),
        ("Thought: t\nAction: [Document 1]", "Invalid Document Idx"),
        (f"Thought: t\nAction: [{'9' * 5000}]", "Invalid Document Idx"),
    ],
)
def test_the_filter_rejects(text, error):
    assert parse_filter(text) == invalid_action(error)


@pytest.mark.parametrize(
    ("text", "action", "args", "thought"),
    [
        ("Thought: done\nAction: [LLM]", LLM, (), "done"),
        ("Thought: next\nAction: [Retrieval] who", RETRIEVAL, ("who",), "next"),
        ("the tag may be missing\nAction: [LLM]", LLM, (), "the tag may be missing"),
        ("Thought: [Retrieval] was tried\nAction: [LLM]", LLM, (), "[Retrieval] was tried"),
        ("Thought: t\nAction: [LLM]\nAction: [Retrieval] who", LLM, (), "t"),
    ],
)
def test_the_decision_maker_parses(text, action, args, thought):
    assert parse_decision(text) == ParsedAction(action, args, thought)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("[LLM]", "Invalid Format"),
        ("Thought: t", "Invalid Format"),
        ("Action: [LLM]", "Invalid Format"),
        ("Thought: \nAction: [LLM]", "Invalid Format"),
        ("Thought: t\nAction: LLM", "Invalid Format"),
        ("Thought: t\nAction: [Planning]", "Invalid Action"),
        ("Thought: t\nAction: [No Retrieval]", "Invalid Action"),
        ("Thought: t\nAction: [Retrieval]", "Invalid Action"),
    ],
)
def test_the_decision_maker_rejects(text, error):
    result = parse_decision(text)
    assert (result.valid, result.error, result.action, result.args) == (False, error, "", ())
