"""The parsers of replies read a text once, because replies of frozen models have any length."""

from __future__ import annotations

import time

import pytest

from jax_ragrl.systems.baselines.agents import BEGIN, parse_marked, parse_react
from jax_ragrl.systems.c3po import parse_filter, parse_router
from jax_ragrl.systems.mao_arag import parse_plan as parse_workflow
from jax_ragrl.systems.mmoa_rag import parse_selection
from jax_ragrl.systems.opera.grammar import Step, parse_analysis, parse_plan, parse_rewrite
from jax_ragrl.systems.tags import parse_turn

LENGTH = 100_000
PIECES = ["\n", "\n ", " ", "Search[", "Answer\n", "Final ", "\\boxed{", "\\boxed{ ", "{}", BEGIN]


@pytest.mark.parametrize("parse", [parse_react, parse_marked])
@pytest.mark.parametrize("opening", ["", "\\boxed{"])
@pytest.mark.parametrize("piece", PIECES)
def test_a_long_reply_is_parsed_in_linear_time(parse, opening, piece):
    """Patterns that backtracked took minutes; the bound is generous, and of this thread alone."""
    text = opening + piece * (LENGTH // len(piece))
    start = time.thread_time()
    parse(text)
    assert time.thread_time() - start < 1.0


ROLES = {
    "filter": parse_filter,
    "router": parse_router,
    "workflow": lambda text: parse_workflow(text, first=True),
    "selection": parse_selection,
    "analysis": parse_analysis,
    "plan": parse_plan,
    "rewrite": parse_rewrite,
    "turn": lambda text: parse_turn(text, ("search", "answer")),
}
MARKS = [
    "\n",
    " ",
    "[",
    '"',
    '\\"',
    ", ",
    "{",
    "{deps:",
    "<search>",
    "<answer></search>",
    "<think>",
]
MARKS += ["<subquestion", "<subquestion>", "1 ", "Document1,", "R,", "Action: ["]


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("mark", MARKS)
def test_a_long_action_is_parsed_in_linear_time(role, mark):
    for opening in ("", "1 a", '"', "Thought: a\nAction: "):
        text = opening + mark * (LENGTH // len(mark))
        start = time.thread_time()
        ROLES[role](text)
        assert time.thread_time() - start < 1.0, opening


def test_a_comma_is_removed_before_a_bracket_but_not_in_a_string():
    assert parse_plan('["a, ]", "b",]').args == (Step("a, ]"), Step("b"))
    # A quote that is never closed begins no string.
    assert parse_plan('He said "no: \\" [3, "c",\n]').args == (Step("c"),)


@pytest.mark.parametrize(
    "text, answer",
    [
        ("\\boxed{ \\text{New Ulm} }", "New Ulm"),
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed{a{b{c}}} \\boxed{d}", "d"),
        ("\\boxed{open", "\\boxed{open"),
        ("so\n\n ** Final Answer:**\nUlm", "Ulm"),
        ("Answer: Rom\nAnswer: Ulm", "Ulm"),
        ("The Answer: Rom", "The Answer: Rom"),
    ],
)
def test_an_answer_is_in_the_last_box_or_line(text, answer):
    assert parse_marked(text).args == (answer,)


def test_the_first_whole_action_counts():
    action = parse_react("I Search[a\nxSearch[b] Finish[c\n] Finish[d] Search[e]")
    assert (action.action, action.args) == ("Finish", ("d",))
    assert action.thought == "I Search[a\nxSearch[b] Finish[c\n] Finish[d]"
