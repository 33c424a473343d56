"""Parsers of roles and replies: none raises, errors have a sentence, and a text is read once."""

import time

import hypothesis
import pytest
from hypothesis import strategies as st

from jax_ragrl.systems.baselines import agents, standard
from jax_ragrl.systems.baselines.adaptive import AdaptiveRAG
from jax_ragrl.systems.baselines.executor import SearchAgent
from jax_ragrl.systems.baselines.instruct_rag import InstructRAG, parse_rationale
from jax_ragrl.systems.baselines.iterative import IRCoT, parse_thought
from jax_ragrl.systems.baselines.self_rag import SelfRAG, parse_verdict
from jax_ragrl.systems.baselines.slim_plm import SlimPLM
from jax_ragrl.systems.c3po import C3PO
from jax_ragrl.systems.coda import CoDA
from jax_ragrl.systems.mao_arag import MAOARAG
from jax_ragrl.systems.mmoa_rag import MMOARAG
from jax_ragrl.systems.opera import Opera

SYSTEMS = (C3PO(), CoDA(), MAOARAG(select_needs_search=True), MMOARAG(), Opera(), SearchAgent())
PARSERS = {
    f"{type(system).__name__}-{name}": (role.parse, system.FAULTS)
    for system in (*SYSTEMS, AdaptiveRAG(), SlimPLM(queries=3))
    for name, role in system.roles.items()
}
PARSERS["SlimPLM-rewriter"] = (standard.parse_queries, standard.QueryRewrite.FAULTS)
PARSERS |= {
    "grade": (standard.parse_grade, standard.Reranker.FAULTS),
    "marked": (agents.parse_marked, agents.SearchO1.FAULTS),
    "rationale": (parse_rationale, InstructRAG.FAULTS),
    "react": (agents.parse_react, agents.ReAct.FAULTS),
    "selection": (lambda text: standard.parse_selection(text, 10), standard.Selection.FAULTS),
    "thought": (parse_thought, IRCoT.FAULTS),
    "verdict": (parse_verdict, SelfRAG.FAULTS),
}
# Any code point, including lone surrogates, and pieces that resemble the grammars.
ANYTHING = st.text(st.characters(exclude_categories=()))
WORDS = (
    *("Thought:", "Action:", "[Retrieval]", "[Planning]", "[LLM]", "[1, 2", "Document", "**"),
    *("Answer: ", "The answer is: ", "Search[", "Finish[", agents.BEGIN, agents.END),
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
MARKS += ["Search[", "Answer\n", "Final ", "\\boxed{", "\\boxed{ ", agents.BEGIN]
MARKS += ['{"a":', f"[{'9' * 5000}]"]


@pytest.mark.parametrize("name", PARSERS)
def test_a_long_text_is_parsed_in_linear_time(name):
    """Patterns that backtracked took minutes; the bound is generous, and of this thread alone."""
    for opening in ("", "1 a", '"', "Thought: a\nAction: ", "\\boxed{"):
        for mark in MARKS:
            text = opening + mark * (LENGTH // len(mark))
            start = time.thread_time()
            PARSERS[name][0](text)
            assert time.thread_time() - start < 1.0, (opening, mark)
