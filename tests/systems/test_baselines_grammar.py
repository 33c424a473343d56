"""Parsers for the replies of frozen roles."""

import hypothesis
import pytest

from jax_ragrl.rollout.roles import ParsedAction
from jax_ragrl.systems.baselines.adaptive import parse_class
from jax_ragrl.systems.baselines.agents import BEGIN, END, FINISH, SEARCH, parse_marked, parse_react
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
    ("parse", "text", "action", "argument"),
    [
        (parse_react, "I look.\nSearch[Ann Lee]\nFinish[x]", SEARCH, "Ann Lee"),
        (parse_react, "Finish[ Ulm, Germany ]", FINISH, "Ulm, Germany"),
        (parse_react, "Research[x] Search[y]", SEARCH, "y"),
        *((parse_react, text, "", "") for text in ("Search[a\nb]", "Finish[  ]", "search[x]")),
        (parse_marked, f"so {BEGIN} Ann\nLee {END} and {BEGIN}Bob{END}", SEARCH, "Ann Lee"),
        (parse_marked, f"so {BEGIN}Ann", SEARCH, "Ann"),
        (parse_marked, f"Answer: x {BEGIN} {END}", "", ""),
        (parse_marked, "Answer: Rom\nno:\n**Answer:** Ulm", FINISH, "Ulm"),
        (parse_marked, "Final Answer: Ulm\nI hope this helps", FINISH, "Ulm"),
        (parse_marked, "so\n\n ** Final Answer:**\nUlm", FINISH, "Ulm"),
        (parse_marked, "The Answer: Rom", FINISH, "The Answer: Rom"),
        (parse_marked, "thus \\boxed{Ulm \\& Rom}.", FINISH, "Ulm \\& Rom"),
        (parse_marked, "thus \\boxed{\\text{Ulm}}, and {x}.", FINISH, "Ulm"),
        (parse_marked, "\\( \\boxed{\\textbf{New Ulm} } \\)", FINISH, "New Ulm"),
        (parse_marked, "**Answer:** \\boxed{\\text{Ulm}}", FINISH, "Ulm"),
        (parse_marked, "\\boxed{\\frac{1}{2}}", FINISH, "\\frac{1}{2}"),
        (parse_marked, "\\boxed{a{b{c}}} \\boxed{d}", FINISH, "d"),
        (parse_marked, "\\boxed{open", FINISH, "\\boxed{open"),
        (parse_marked, "\\boxed{a}{b} or \\boxed{Ulm {c} d", FINISH, "a"),
        (parse_marked, "I think\nUlm", FINISH, "Ulm"),
        *((parse_marked, text, "", "") for text in ("\\boxed{}", "\n", "Answer:")),
        (parse_thought, "Ann is a duck. Ducks swim.", "Thought", "Ann is a duck."),
        (parse_thought, "\n  It fell 3.5 m! So the answer is 2.", "Thought", "It fell 3.5 m!"),
        (parse_thought, "no end", "Thought", "no end"),
        (parse_thought, "It is by J. J. Abrams. He is 59.", "Thought", "It is by J. J. Abrams."),
        (parse_thought, "The U.S. Army is old. More.", "Thought", "The U.S. Army is old."),
        (parse_thought, "Dr. Lee met Mrs. Ray. More.", "Thought", "Dr. Lee met Mrs. Ray."),
        (parse_thought, "Is it vitamin A? Yes.", "Thought", "Is it vitamin A?"),
        (parse_thought, "He was Henry V. So the answer is: Henry V.", "Answer", "Henry V"),
        (parse_thought, "So the answer is: the U.S. Army.\nmore", "Answer", "the U.S. Army"),
        (parse_thought, "the Answer is Ulm", "Answer", "Ulm"),
        (parse_thought, "The answer is:", "", ""),
        (parse_rationale, "Facts.\nSo the answer is: Ulm.", "Answer", "Ulm"),
        (parse_rationale, "The answer is odd, but the answer is the U.S.\nA", "Answer", "the U.S"),
        (parse_rationale, "the answer is:\nUlm", "Answer", "Ulm"),
        *((parse_rationale, text, "", "") for text in ("", "Ulm", "the answer is", "answer is: .")),
        (parse_draft, " Ulm.\n", "Draft", "Ulm."),
        (parse_verdict, " Yes, it does", "yes", ""),
        (parse_verdict, '"No."\nbecause', "no", ""),
        *((parse_verdict, text, "", "") for text in ("", "yesterday", "it is: yes", "not")),
        (parse_class, " B\n", "B", ""),
        *((parse_class, text, "", "") for text in ("", "AB", "a", "A: none")),
        (parse_gate, "A ", "A", ""),
        *((parse_gate, text, "", "") for text in ("", "C", "b", "AB")),
        *((parse_grade, text, "", "") for text in ("", "ten", "11", "100", "-")),
        *((parse_queries, text, "", "") for text in ("", " \n- \n", '""', '" "')),
    ],
)
def test_a_reply_is_an_action_or_malformed(parse, text, action, argument):
    result = parse(text)
    assert (result.action, "".join(result.args)) == (action, argument)
    assert result.valid == bool(action)


def test_grades_are_numbers_and_queries_have_no_marks():
    assert parse_grade("Grade: 7/10") == ParsedAction("Grade", (7,))
    assert parse_grade("0") == ParsedAction("Grade", (0,))
    queries = parse_queries("1. a b\n2) c\n* d\n- e\na  b")
    assert queries == ParsedAction("Search", ("a b", "c", "d", "e"))
    assert parse_queries("1984 film\n-40 degrees").args == ("1984 film", "-40 degrees")


def test_the_first_whole_action_counts():
    action = parse_react("I Search[a\nxSearch[b] Finish[c\n] Finish[d] Search[e]")
    assert (action.action, action.args) == ("Finish", ("d",))
    assert action.thought == "I Search[a\nxSearch[b] Finish[c\n] Finish[d]"


def test_interleaving_has_no_duplicates_and_a_critique_is_a_weighted_sum():
    one, two, three, four = (passage(i) for i in range(4))
    assert interleave([[one, two, three], [two], [], [four, one]], 3) == (one, two, four)
    assert interleave([[one], [two]], 9) == (one, two) and interleave([], 3) == ()
    assert critique((True, False, True), (1.0, 1.0, 0.5)) == 1.5
    assert critique((False, False, False), (1.0, 1.0, 0.5)) == 0.0
