"""Parsers of roles and replies: none raises, errors have a sentence, and a text is read once."""

import functools
import gc
import time

import hypothesis
import pytest
from hypothesis import strategies as st

from jax_ragrl.rollout.roles import ParsedAction
from jax_ragrl.systems.baselines import agents, standard
from jax_ragrl.systems.baselines.adaptive import AdaptiveRAG
from jax_ragrl.systems.baselines.agents import BEGIN, END, FINISH, SEARCH, parse_marked, parse_react
from jax_ragrl.systems.baselines.executor import SearchAgent
from jax_ragrl.systems.baselines.instruct_rag import InstructRAG, parse_rationale
from jax_ragrl.systems.baselines.iterative import IRCoT, parse_thought
from jax_ragrl.systems.baselines.script import parse_letter
from jax_ragrl.systems.baselines.self_rag import SelfRAG, critique, parse_verdict
from jax_ragrl.systems.baselines.slim_plm import SlimPLM, parse_draft
from jax_ragrl.systems.baselines.standard import interleave, parse_grade, parse_queries
from jax_ragrl.systems.c3po import C3PO
from jax_ragrl.systems.coda import CoDA
from jax_ragrl.systems.mao_arag import MAOARAG
from jax_ragrl.systems.mmoa_rag import MMOARAG
from jax_ragrl.systems.opera import Opera
from tests.rollout.tape import passage

SYSTEMS = (C3PO(), CoDA(), MAOARAG(select_needs_search=True), MMOARAG(), Opera(), SearchAgent())
PARSERS = {
    f"{type(system).__name__}-{name}": (role.parse, system.FAULTS)
    for system in (*SYSTEMS, AdaptiveRAG(), SlimPLM(queries=3))
    for name, role in system.roles.items()
}
PARSERS["SlimPLM-rewriter"] = (parse_queries, standard.QueryRewrite.FAULTS)
PARSERS |= {
    "grade": (parse_grade, standard.Reranker.FAULTS),
    "marked": (parse_marked, agents.SearchO1.FAULTS),
    "rationale": (parse_rationale, InstructRAG.FAULTS),
    "react": (parse_react, agents.ReAct.FAULTS),
    "selection": (lambda text: standard.parse_selection(text, 10), standard.Selection.FAULTS),
    "thought": (parse_thought, IRCoT.FAULTS),
    "verdict": (parse_verdict, SelfRAG.FAULTS),
}
# Any code point, including lone surrogates, and pieces that resemble the grammars.
ANYTHING = st.text(st.characters(exclude_categories=()))
WORDS = (
    *("Thought:", "Action:", "[Retrieval]", "[Planning]", "[LLM]", "[1, 2", "Document", "**"),
    *("Answer: ", "The answer is: ", "Search[", "Finish[", BEGIN, END),
    *("\\boxed{", "yes", "no", "A"),
    *("QDS", "QR", "R", "AG", " and ", "Workflow:", "status", "answer", "rewritten_query", "1) "),
    *("<task>", "</task>", "<search>", "</search>", "<answer>", "</answer>", "<subquestion>"),
    *'[]{}()",:*.?-+ \n\r\x00\u2028\x1c',
    *("9" * 5000, "-1", "10", "٣", "²", "\ud800", "e", "1_0", "0x1", "word", "[answer 1]"),
)
PIECES = st.lists(st.sampled_from(WORDS)).map("".join)


@pytest.mark.parametrize("name", PARSERS)
@hypothesis.given(text=ANYTHING | PIECES)
def test_a_parser_never_raises_and_names_errors(name, text):
    parse, faults = PARSERS[name]
    action = parse(text)
    assert action.valid == (not action.error) and action.error in {"", *faults}
    assert action.action or not action.valid
    assert all(argument != "" for argument in action.args)


LENGTH = 30_000
MARKS = ["\n", "\n ", " ", "[", '"', '\\"', ", ", "{", "{}", "{deps:", "<think>", "<search>", "1 "]
MARKS += ["<answer></search>", "<subquestion", "<subquestion>", "Document1,", "R,", "Action: ["]
MARKS += ["Search[", "Answer\n", "Final ", "\\boxed{", "\\boxed{ ", BEGIN]
MARKS += ['{"a":', f"[{'9' * 5000}]"]


@pytest.fixture
def no_collection():
    """Objects of earlier tests, of which a collection takes a second, are none of a parser's."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("name", PARSERS)
def test_a_long_text_is_parsed_in_linear_time(name, no_collection):
    """Patterns that backtracked took minutes; the bound is generous, and of this thread alone."""
    for opening in ("", "1 a", '"', "Thought: a\nAction: ", "\\boxed{"):
        for mark in MARKS:
            text = opening + mark * (LENGTH // len(mark))
            start = time.thread_time()
            PARSERS[name][0](text)
            assert time.thread_time() - start < 1.0, (opening, mark)


@hypothesis.given(text=ANYTHING | PIECES)
def test_a_thought_is_a_prefix_of_the_turn(text):
    react = parse_react(text)
    assert not react.valid or text.startswith(react.thought)
    text_marked = parse_marked(text)
    # A server that stops at the end mark leaves it out, and blanks may stand before it.
    assert not text_marked.valid or text.startswith(text_marked.thought.removesuffix(END))


parse_abc = functools.partial(parse_letter, letters="ABC", fault="Invalid Class")


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
        (parse_rationale, "The answer is odd, but the Answer is the U.S.\nA", "Answer", "the U.S"),
        (parse_rationale, "the answer is:\nUlm", "Answer", "Ulm"),
        *((parse_rationale, text, "", "") for text in ("", "Ulm", "the answer is", "answer is: .")),
        (parse_draft, " Ulm.\n", "Draft", "Ulm."),
        (parse_verdict, " Yes, it does", "yes", ""),
        (parse_verdict, '"No."\nbecause', "no", ""),
        *((parse_verdict, text, "", "") for text in ("", "yesterday", "it is: yes", "not")),
        (parse_abc, " B\n", "B", ""),
        *((parse_abc, text, "", "") for text in ("", "D", "AB", "a", "A: none")),
        *((parse_grade, text, "", "") for text in ("", "ten", "11", "100", "-")),
        *((parse_queries, text, "", "") for text in ("", " \n- \n", '""', '" "')),
    ],
)
def test_a_reply_is_an_action_or_malformed(parse, text, action, argument):
    result = parse(text)
    assert (result.action, "".join(result.args)) == (action, argument)
    assert result.valid == bool(action)


def test_grades_are_numbers_queries_have_no_marks_and_the_first_whole_action_counts():
    assert parse_grade("Grade: 7/10") == ParsedAction("Grade", (7,))
    assert parse_grade("0") == ParsedAction("Grade", (0,))
    queries = parse_queries("1. a b\n2) c\n* d\n- e\na  b")
    assert queries == ParsedAction("Search", ("a b", "c", "d", "e"))
    assert parse_queries("1984 film\n-40 degrees").args == ("1984 film", "-40 degrees")
    action = parse_react("I Search[a\nxSearch[b] Finish[c\n] Finish[d] Search[e]")
    assert (action.action, action.args) == ("Finish", ("d",))
    assert action.thought == "I Search[a\nxSearch[b] Finish[c\n] Finish[d]"


def test_interleaving_has_no_duplicates_and_a_critique_is_a_weighted_sum():
    one, two, three, four = (passage(i) for i in range(4))
    assert interleave([[one, two, three], [two], [], [four, one]], 3) == (one, two, four)
    assert interleave([[one], [two]], 9) == (one, two) and interleave([], 3) == ()
    assert critique((True, False, True), (1.0, 1.0, 0.5)) == 1.5
    assert critique((False, False, False), (1.0, 1.0, 0.5)) == 0.0
