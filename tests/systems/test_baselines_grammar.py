"""The replies of frozen roles: what each parser reads, and that none ever raises."""

from __future__ import annotations

import hypothesis
import pytest
from hypothesis import strategies as st

from jax_ragrl.rollout.roles import Parsed
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
from jax_ragrl.systems.baselines.rerank import TOP_GRADE, parse_grade
from jax_ragrl.systems.baselines.rewrite import dealt, parse_queries
from jax_ragrl.systems.baselines.selection import parse_selection
from jax_ragrl.systems.baselines.self_rag import critique, parse_verdict
from jax_ragrl.systems.baselines.slim_plm import parse_draft, parse_gate
from tests.rollout.tape import passage

PARSERS = {
    parse_class: {"Invalid Class"},
    parse_draft: {"Empty Draft"},
    parse_gate: {"Invalid Gate"},
    parse_grade: {"Invalid Grade"},
    parse_marked: {"No Action", "Empty Action"},
    parse_queries: {"No Query"},
    parse_rationale: {"No Answer"},
    parse_react: {"No Action", "Empty Action"},
    parse_thought: {"Empty Thought", "Empty Answer"},
    parse_verdict: {"Invalid Verdict"},
}

ANYTHING = st.text(st.characters(exclude_categories=()))
PIECES = st.lists(
    st.sampled_from(
        [
            *("Search[", "Finish[", "]", "[", BEGIN, END, "Answer:", "\\boxed{", "}", "answer is"),
            *("yes", "no", "A", "1.", "- ", '"', ".", "?", " ", "\n", "\r", "\x1c", "\u2028"),
            *("9" * 5000, "-1", "10", "11", "٣", "²", "\ud800", "\x00", "word"),
        ]
    )
).map("".join)


@pytest.mark.parametrize("parse", PARSERS)
@hypothesis.given(text=ANYTHING | PIECES)
def test_a_parser_never_raises_and_says_what_is_wrong(parse, text):
    parsed = parse(text)
    assert parsed.valid == (not parsed.error) and parsed.error in PARSERS[parse] | {""}
    assert parsed.valid or (not parsed.action and not parsed.args)


@hypothesis.given(text=ANYTHING | PIECES)
def test_what_is_searched_or_answered_is_never_empty(text):
    for parse in (parse_draft, parse_marked, parse_queries, parse_rationale, parse_react,
                  parse_thought):  # fmt: skip
        assert all(isinstance(said, str) and said.strip() for said in parse(text).args)
    grade = parse_grade(text)
    assert not grade.valid or 0 <= grade.args[0] <= TOP_GRADE


@hypothesis.given(text=ANYTHING | PIECES)
def test_a_selection_is_of_distinct_documents_that_are_there(text):
    parsed = parse_selection(text, 10)
    assert set(parsed.args) <= set(range(1, 11)) and len(set(parsed.args)) == len(parsed.args)
    assert parsed.valid or parsed.error in ("Invalid Selection", "Invalid Document Idx")


@hypothesis.given(text=ANYTHING | PIECES)
def test_a_cut_turn_is_the_beginning_of_the_turn(text):
    react = parse_react(text)
    assert not react.valid or text.startswith(react.thought)
    marked = parse_marked(text)
    # The end mark may be missing, as where a server takes it for a stop string and leaves it out.
    assert not marked.valid or (text + END).startswith(marked.thought)


@pytest.mark.parametrize(
    ("text", "action", "said"),
    [
        ("I look.\nSearch[Ann Lee]\nFinish[x]", SEARCH, "Ann Lee"),
        ("Finish[ Ulm, Germany ]", FINISH, "Ulm, Germany"),
        ("Research[x] Search[y]", SEARCH, "y"),
        ("Search[a\nb]", "", ""),
        ("Finish[  ]", "", ""),
        ("search[x]", "", ""),
    ],
)
def test_react_reads_the_first_action(text, action, said):
    parsed = parse_react(text)
    assert parsed.action == action and "".join(parsed.args) == said


@pytest.mark.parametrize(
    ("text", "action", "said"),
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
def test_search_o1_reads_the_first_query_or_else_the_answer(text, action, said):
    parsed = parse_marked(text)
    assert parsed.action == action and "".join(parsed.args) == said


@pytest.mark.parametrize(
    ("text", "action", "said"),
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
def test_a_thought_is_the_first_sentence(text, action, said):
    parsed = parse_thought(text)
    assert parsed.action == action and "".join(parsed.args) == said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Facts.\nSo the answer is: Ulm.", "Ulm"),
        ("The answer is unclear, but the answer is the U.S. Army.\nmore", "the U.S. Army"),
        ("the answer is:\nUlm", "Ulm"),
    ],
)
def test_a_rationale_holds_its_last_answer(text, said):
    assert parse_rationale(text) == Parsed("Answer", (said,), text)


@pytest.mark.parametrize(
    ("parse", "text", "expected"),
    [
        (parse_grade, "Grade: 7/10", Parsed("Grade", (7,))),
        (parse_grade, "0", Parsed("Grade", (0,))),
        (parse_verdict, " Yes, it does", Parsed("yes")),
        (parse_verdict, '"No."\nbecause', Parsed("no")),
        (parse_class, " B\n", Parsed("B")),
        (parse_gate, "A ", Parsed("A")),
        (parse_draft, " Ulm.\n", Parsed("Draft", ("Ulm.",))),
        (parse_queries, "1. a b\n2) c\n* d\n- e\na  b", Parsed("Search", ("a b", "c", "d", "e"))),
        (parse_queries, "1984 film\n-40 degrees", Parsed("Search", ("1984 film", "-40 degrees"))),
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


def test_passages_are_dealt_in_turn_each_once():
    one, two, three, four = (passage(i) for i in range(4))
    assert dealt([[one, two, three], [two], [], [four, one]], 3) == (one, two, four)
    assert dealt([[one], [two]], 9) == (one, two) and dealt([], 3) == ()


def test_a_critique_is_the_weighted_sum_of_its_verdicts():
    assert critique((True, False, True), (1.0, 1.0, 0.5)) == 1.5
    assert critique((False, False, False), (1.0, 1.0, 0.5)) == 0.0
