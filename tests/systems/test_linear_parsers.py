"""The parsers of frozen models' replies, which have any length, read a text once."""

from __future__ import annotations

import time

import pytest

from jax_ragrl.systems.baselines.agents import BEGIN, parse_marked, parse_react

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
