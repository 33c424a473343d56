"""Parsers for the replies of frozen roles; no parser raises."""

from __future__ import annotations

import hypothesis
import pytest

from jax_ragrl.rollout.roles import ParsedAction
from jax_ragrl.systems.baselines.adaptive import parse_class
from jax_ragrl.systems.baselines.agents import (
    BEGIN,
    END,
    FINISH,
    SEARCH,
    parse_marked,
    parse_react,
)
from jax_ragrl.systems.baselines.instruct_rag import parse_rationale
from jax_ragrl.systems.baselines.iterative import parse_thought
from jax_ragrl.systems.baselines.self_rag import critique, parse_verdict
from jax_ragrl.systems.baselines.slim_plm import parse_draft, parse_gate
from jax_ragrl.systems.baselines.standard import interleave, parse_grade, parse_queries
from tests.rollout.tape import passage
from tests.systems.test_parsers import ANYTHING, PIECES


@hypothesis.given(text=ANYTHING | PIECES)
def test_a_thought_is_a_prefix_of_the_turn(text):
    react = parse_react(text)
    assert not react.valid or text.startswith(react.thought)
    text_marked = parse_marked(text)
    # A server that stops at the end mark leaves it out, and blanks may stand before it.
    assert not text_marked.valid or text.startswith(text_marked.thought.removesuffix(END))


@pytest.mark.parametrize(
    ("text", "action", "argument"),
    [
        ("I look.\nSearch[Ann Lee]\nFinish[x]", SEARCH, "Ann Lee"),
        ("Finish[ Ulm, Germany ]", FINISH, "Ulm, Germany"),
        ("Research[x] Search[y]", SEARCH, "y"),
        ("Search[a\nb]", "", ""),
        ("Finish[  ]", "", ""),
        ("search[x]", "", ""),
    ],
)
def test_react_parses_the_first_action(text, action, argument):
    result = parse_react(text)
    assert result.action == action and "".join(result.args) == argument


@pytest.mark.parametrize(
    ("text", "action", "argument"),
    [
        (f"so {BEGIN} Ann\nLee {END} and {BEGIN}Bob{END}", SEARCH, "Ann Lee"),
        (f"so {BEGIN}Ann", SEARCH, "Ann"),
        (f"Answer: x {BEGIN} {END}", "", ""),
        ("Answer: Rom\nno:\n**Answer:** Ulm", FINISH, "Ulm"),
        ("Final Answer: Ulm\nI hope this helps", FINISH, "Ulm"),
        ("thus \\boxed{Ulm \\& Rom}.", FINISH, "Ulm \\& Rom"),
        ("thus \\boxed{\\text{Ulm}}, and {x}.", FINISH, "Ulm"),
        ("\\( \\boxed{\\textbf{Ulm} } \\)", FINISH, "Ulm"),
        ("**Answer:** \\boxed{\\text{Ulm}}", FINISH, "Ulm"),
        ("\\boxed{}", "", ""),
        ("\\boxed{a}{b} or \\boxed{Ulm {c} d", FINISH, "a"),
        ("I think\nUlm", FINISH, "Ulm"),
        ("\n", "", ""),
        ("Answer:", "", ""),
    ],
)
def test_search_o1_parses_the_query_or_the_answer(text, action, argument):
    result = parse_marked(text)
    assert result.action == action and "".join(result.args) == argument


@pytest.mark.parametrize(
    ("text", "action", "argument"),
    [
        ("Ann is a duck. Ducks swim.", "Thought", "Ann is a duck."),
        ("\n  It fell 3.5 m! So the answer is 2.", "Thought", "It fell 3.5 m!"),
        ("no end", "Thought", "no end"),
        ("It is by J. J. Abrams. He is 59.", "Thought", "It is by J. J. Abrams."),
        ("The U.S. Army is old. More.", "Thought", "The U.S. Army is old."),
        ("Dr. Lee met Mrs. Ray. More.", "Thought", "Dr. Lee met Mrs. Ray."),
        ("Is it vitamin A? Yes.", "Thought", "Is it vitamin A?"),
        ("He was Henry V. So the answer is: Henry V.", "Answer", "Henry V"),
        ("So the answer is: the U.S. Army.\nmore", "Answer", "the U.S. Army"),
        ("the Answer is Ulm", "Answer", "Ulm"),
        ("The answer is:", "", ""),
    ],
)
def test_a_thought_is_the_first_sentence(text, action, argument):
    result = parse_thought(text)
    assert result.action == action and "".join(result.args) == argument


@pytest.mark.parametrize(
    ("text", "argument"),
    [
        ("Facts.\nSo the answer is: Ulm.", "Ulm"),
        ("The answer is unclear, but the answer is the U.S. Army.\nmore", "the U.S. Army"),
        ("the answer is:\nUlm", "Ulm"),
    ],
)
def test_a_rationale_yields_its_last_answer(text, argument):
    assert parse_rationale(text) == ParsedAction("Answer", (argument,), text)


@pytest.mark.parametrize(
    ("parse", "text", "expected"),
    [
        (parse_grade, "Grade: 7/10", ParsedAction("Grade", (7,))),
        (parse_grade, "0", ParsedAction("Grade", (0,))),
        (parse_verdict, " Yes, it does", ParsedAction("yes")),
        (parse_verdict, '"No."\nbecause', ParsedAction("no")),
        (parse_class, " B\n", ParsedAction("B")),
        (parse_gate, "A ", ParsedAction("A")),
        (parse_draft, " Ulm.\n", ParsedAction("Draft", ("Ulm.",))),
        (
            parse_queries,
            "1. a b\n2) c\n* d\n- e\na  b",
            ParsedAction("Search", ("a b", "c", "d", "e")),
        ),
        (
            parse_queries,
            "1984 film\n-40 degrees",
            ParsedAction("Search", ("1984 film", "-40 degrees")),
        ),
    ],
)
def test_legal_replies(parse, text, expected):
    assert parse(text) == expected


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        *((parse_grade, text) for text in ("", "ten", "11", "100", "-")),
        *((parse_verdict, text) for text in ("", "yesterday", "it is: yes", "not")),
        *((parse_class, text) for text in ("", "AB", "a", "A: none")),
        *((parse_gate, text) for text in ("", "C", "b", "AB")),
        *((parse_rationale, text) for text in ("", "Ulm", "the answer is", "The answer is: .")),
        *((parse_queries, text) for text in ("", " \n- \n", '""', '" "')),
    ],
)
def test_malformed_replies(parse, text):
    assert not parse(text).valid


def test_interleaving_has_no_duplicates():
    one, two, three, four = (passage(i) for i in range(4))
    assert interleave([[one, two, three], [two], [], [four, one]], 3) == (one, two, four)
    assert interleave([[one], [two]], 9) == (one, two) and interleave([], 3) == ()


def test_a_critique_is_the_weighted_verdict_sum():
    assert critique((True, False, True), (1.0, 1.0, 0.5)) == 1.5
    assert critique((False, False, False), (1.0, 1.0, 0.5)) == 0.0


def test_the_first_whole_action_counts():
    action = parse_react("I Search[a\nxSearch[b] Finish[c\n] Finish[d] Search[e]")
    assert (action.action, action.args) == ("Finish", ("d",))
    assert action.thought == "I Search[a\nxSearch[b] Finish[c\n] Finish[d]"


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
