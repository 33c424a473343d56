import hypothesis
import pytest
from hypothesis import strategies as st

from jax_ragrl.rollout.roles import ParsedAction
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
        (parse_router, "Retrieval] who", FORMAT),
        (parse_router, "[]", ACTION),
        (parse_router, "[retrieval] who", ACTION),
        (parse_router, "[ Retrieval ] who", ACTION),
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
        (parse_decision, "Thought: t", FORMAT),
        (parse_decision, "Thought: \nAction: [LLM]", FORMAT),
        (parse_decision, "Thought: t\nAction: LLM", FORMAT),
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
