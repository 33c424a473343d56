"""Baselines of frozen roles on recorded replies: what they ask for, in order, and how they end."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pytest

from jax_ragrl.rollout.collect import collect
from jax_ragrl.rollout.effects import Done, Search
from jax_ragrl.rollout.expand import once
from jax_ragrl.rollout.tree import Forest
from jax_ragrl.run.evaluate import evaluate
from jax_ragrl.systems.baselines.adaptive import AdaptiveRAG
from jax_ragrl.systems.baselines.agents import BEGIN, END, ReAct, SearchO1
from jax_ragrl.systems.baselines.fixed import FixedStrategy
from jax_ragrl.systems.baselines.instruct_rag import InstructRAG
from jax_ragrl.systems.baselines.iterative import IRCoT, IterRetGen
from jax_ragrl.systems.baselines.replug import Replug, mixed, passage_weights
from jax_ragrl.systems.baselines.rerank import Reranker
from jax_ragrl.systems.baselines.rewrite import QueryRewrite
from jax_ragrl.systems.baselines.scripted import Chosen, Fault, Scripted, Steps, ask
from jax_ragrl.systems.baselines.selection import Selection
from jax_ragrl.systems.baselines.self_rag import SelfRAG
from jax_ragrl.systems.baselines.slim_plm import SlimPLM
from jax_ragrl.systems.baselines.standard import StandardRAG, direct
from jax_ragrl.systems.c3po import NO_RETRIEVAL, PLANNING, RETRIEVAL
from jax_ragrl.text.prompts import read_numbered, template
from jax_ragrl.types import Hits, LLMRequest, Passage
from tests.rollout.tape import ANN, BOB, Tape, passage, system

STYLES = ("baselines", "baselines_tiny")
NOTHING = Hits((), ())
ASKED = ANN.text


def in_order(replies: Sequence[str]) -> Callable[[LLMRequest], str]:
    """Replies one after the other, the last one again and again."""
    rest = list(replies)
    return lambda request: rest.pop(0) if len(rest) > 1 else rest[0]


def recorded(
    told: Mapping[str, Sequence[str]],
    found: Mapping[str, Sequence[Passage]] | None = None,
    texts: Mapping[str, list[str]] | None = None,
) -> Tape:
    return Tape(
        texts or {}, found or {}, {name: in_order(replies) for name, replies in told.items()}
    )


def played(baseline: object, tape: Tape) -> Forest:
    return collect(baseline, once, [ANN], tape.environment())


def ended(baseline: object, tape: Tape) -> tuple[str | None, str, tuple[str, ...]]:
    """The answer, why it ended, and the faults on the way."""
    leaf = played(baseline, tape).records[-1]
    return leaf.answer, leaf.why, getattr(leaf.state, "faults", ())


def searches(tape: Tape) -> list[str]:
    return [entry[1] for entry in tape.log if entry[0] == "search"]


def purposes(tape: Tape) -> list[str]:
    return [entry[0] for entry in tape.log]


# --- Scripts -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Noted(Scripted):
    """Two replies, a fault and a choice between them."""

    def steps(self, question) -> Steps:
        first = yield ask("baselines_tiny", "answer_direct", question=question.text)
        yield Fault(f"not {first}")
        yield Chosen("single")
        hits = yield Search("q", self.top_k)
        yield Done(f"{first} {len(hits.passages)}", "answered")


def test_a_script_is_a_function_of_its_replies():
    script = Noted(top_k=2)
    states = [script.start(ANN)]
    hits = Hits((passage(1), passage(2)), (1.0, 0.5))
    for reply in ("Ulm", hits):
        states.append(script.advance(states[-1], reply))
    assert [type(s.wants).__name__ for s in states] == ["Ask", "Search", "Done"]
    assert states[-1].wants == Done("Ulm 2", "answered")
    assert (states[0].faults, states[1].faults) == ((), ("not Ulm",))
    assert (states[0].strategy, states[1].strategy) == (None, "single")
    # A state is a value: going on twice from the same one gives equal states, and keeps the first.
    assert script.advance(states[0], "Ulm") == states[1] == script.advance(states[0], "Ulm")
    other = script.advance(script.advance(states[0], "Rom"), NOTHING)
    assert other.wants == Done("Rom 0", "answered")


def test_faults_and_choices_of_scripts_are_counted():
    result = evaluate(Noted(top_k=2), [ANN, BOB], recorded({}).environment())
    assert result.malformed == {"not Ulm": 2} and result.strategies == {"single": 2}
    plain = evaluate(IterRetGen("baselines_tiny", 2), [ANN], recorded({}).environment())
    assert plain.malformed == {} and plain.strategies == {}


@pytest.mark.parametrize("name", ["answer", "answer_direct", "document"])
def test_all_systems_are_asked_for_the_answer_in_the_same_words(name):
    for mine, theirs in zip(STYLES, ("c3po", "c3po_tiny"), strict=True):
        assert template(mine, name).template == template(theirs, name).template


# --- Reranker ------------------------------------------------------------------------------------


def test_the_reranker_answers_from_the_best_grades():
    tape = recorded({"grade": ["1", "Grade: 9.", "none", "9", "10/10", "11"]})
    reranker = Reranker("baselines_tiny", 2, pool=3)
    assert ended(reranker, tape) == ("Ulm", "answered", ("Invalid Grade", "Invalid Grade"))
    assert tape.log == [("search", ASKED, 6), *[("grade",)] * 6, ("answer",)]
    assert "1 title 2: text 2" in tape.prompts[1] and ASKED in tape.prompts[1]
    # Passage 5 has 10; of the two with 9 the first found comes first; 11 is no grade.
    assert "1 title 5: text 5\n2 title 2: text 2\n" in tape.prompts[-1]
    assert "title 4" not in tape.prompts[-1]


def test_malformed_grades_leave_the_retrievers_order():
    tape = recorded({"grade": ["I do not know."]})
    ended(Reranker("baselines_tiny", 2), tape)
    assert "1 title 1: text 1\n2 title 2: text 2\n" in tape.prompts[-1]


@pytest.mark.parametrize("count", [0, 1])
def test_the_reranker_takes_what_there_is(count):
    tape = recorded({"grade": ["3"]}, found={ASKED: [passage(1)][:count]})
    assert ended(Reranker("baselines_tiny", 2), tape)[:2] == ("Ulm", "answered")
    assert purposes(tape) == ["search"] + ["grade"] * count + [["answer_direct", "answer"][count]]


# --- REPLUG --------------------------------------------------------------------------------------


def test_replug_answers_from_each_passage_alone_and_returns_what_weighs_most():
    tape = recorded({"answer": ["Rom", "Ulm", "the Ulm."]})
    assert ended(Replug("baselines_tiny", 3), tape) == ("Ulm", "answered", ())
    assert tape.log == [("search", ASKED, 3), *[("answer",)] * 3]
    for number, prompt in enumerate(tape.prompts, start=1):
        assert f"1 title {number}: text {number}\n" in prompt and prompt.count("title") == 1


@pytest.mark.parametrize("count", [0, 1])
def test_replug_takes_what_there_is(count):
    tape = recorded({}, found={ASKED: [passage(1)][:count]})
    assert ended(Replug("baselines_tiny", 2), tape)[:2] == ("Ulm", "answered")
    assert purposes(tape) == ["search", ["answer_direct", "answer"][count]]


def test_a_passage_counts_by_the_softmax_of_its_score():
    np.testing.assert_allclose(passage_weights([2.0, 1.0, 1.0]), [0.576117, 0.211942, 0.211942],
                               atol=1e-6)  # fmt: skip
    np.testing.assert_allclose(passage_weights([1e4, 1e4]), [0.5, 0.5])
    assert passage_weights([1.0, 0.0], temperature=0.1)[0] > 0.9999


@pytest.mark.parametrize(
    ("weights", "answer"),
    [([0.5, 0.3, 0.2], "Rom"), ([0.4, 0.3, 0.3], "Ulm"), ([0.5, 0.25, 0.25], "Rom")],
)
def test_answers_that_are_one_add_their_weights(weights, answer):
    assert mixed(["Rom", "Ulm", "the ULM"], weights) == answer


# --- Selection -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reply", "titles", "faults"),
    [
        ("3, 3 ,1,2", ["title 3", "title 1"], ()),
        ("None.", [], ()),
        ("all of them", ["title 1", "title 2"], ("Invalid Selection",)),
        ("2, 5", ["title 1", "title 2"], ("Invalid Document Idx",)),
        ("0", ["title 1", "title 2"], ("Invalid Document Idx",)),
    ],
)
def test_the_chosen_passages_are_read_in_the_chosen_order(reply, titles, faults):
    tape = recorded({"select": [reply]})
    assert ended(Selection("baselines_tiny", 2), tape) == ("Ulm", "answered", faults)
    asked = "answer" if titles else "answer_direct"
    assert tape.log == [("search", ASKED, 4), ("select",), (asked,)]
    assert [title for title, _ in read_numbered("baselines_tiny", tape.prompts[-1])] == titles


# --- QueryRewrite --------------------------------------------------------------------------------


def test_queries_are_searched_together_and_their_passages_dealt_in_turn():
    found = {"Ann": [passage(1), passage(2), passage(3)], "birth": [passage(2), passage(4)]}
    tape = recorded({"rewrite": ['1. Ann\n- "birth"\n\nAnn\n3) too many\n']}, found)
    assert ended(QueryRewrite("baselines_tiny", 3, queries=2), tape) == ("Ulm", "answered", ())
    assert tape.log == [("rewrite",), ("search", "Ann", 3), ("search", "birth", 3), ("answer",)]
    shown = "1 title 1: text 1\n2 title 2: text 2\n3 title 4: text 4\nQuestion"
    assert shown in tape.prompts[-1]


def test_without_a_readable_query_the_question_is_searched():
    tape = recorded({"rewrite": [" \n "]})
    assert ended(QueryRewrite("baselines_tiny", 2), tape) == ("Ulm", "answered", ("No Query",))
    assert searches(tape) == [ASKED]


# --- Iter-RetGen and IRCoT -----------------------------------------------------------------------


def test_each_round_searches_with_the_answer_before():
    tape = recorded({"answer": ["Linz", "Graz", "Ulm"]})
    assert ended(IterRetGen("baselines_tiny", 2, rounds=3), tape) == ("Ulm", "answered", ())
    assert searches(tape) == [ASKED, f"Linz {ASKED}", f"Graz {ASKED}"]
    assert purposes(tape) == ["search", "answer"] * 3


def test_thoughts_and_searches_alternate_until_the_answer():
    thoughts = [
        "Ann is a duck. Ducks swim.",
        "\n She was born there\nor not",
        "So the ANSWER is U.S.",
    ]
    found = {"Ann is a duck.": [passage(1), passage(7)], "She was born there": [passage(8)]}
    tape = recorded({"thought": thoughts}, found)
    assert ended(IRCoT("baselines_tiny", 2, max_documents=3), tape) == ("U.S", "answered", ())
    assert searches(tape) == [ASKED, "Ann is a duck.", "She was born there"]
    assert purposes(tape) == ["search", "thought"] * 3
    # Passages accumulate, each once, up to the limit; so does the chain.
    assert "2 title 2: text 2\n3 title 7: text 7\nQuestion" in tape.prompts[1]
    assert "title 7" in tape.prompts[2] and "title 8" not in tape.prompts[2]
    assert tape.prompts[2].endswith("Thoughts: Ann is a duck. She was born there")


@pytest.mark.parametrize(
    ("reply", "fault"), [(" \n", "Empty Thought"), ("The answer is: .", "Empty Answer")]
)
def test_a_chain_that_breaks_off_is_answered_from_its_passages(reply, fault):
    tape = recorded({"thought": ["Ducks swim.", reply]})
    assert ended(IRCoT("baselines_tiny", 2), tape) == ("Ulm", "answered", (fault,))
    assert purposes(tape) == ["search", "thought"] * 2 + ["answer"]


def test_a_chain_has_a_limit():
    tape = recorded({"thought": ["Ducks swim."]})
    assert ended(IRCoT("baselines_tiny", 2, thoughts=3), tape) == ("Ulm", "answered", ())
    assert purposes(tape) == ["search", "thought"] * 3 + ["search", "answer"]


# --- ReAct and Search-o1 -------------------------------------------------------------------------


def test_react_sees_what_it_searched_for_until_it_finishes():
    turns = ["Who is Ann?\nSearch[Ann  Lee]\nObservation: made up", "Finish[Ulm]"]
    tape = recorded({"react": turns})
    assert ended(ReAct("baselines_tiny", 2), tape) == ("Ulm", "answered", ())
    assert tape.log == [("react",), ("search", "Ann Lee", 2), ("react",)]
    assert tape.prompts[-1] == "found\n1 title 1: text 1\n2 title 2: text 2"


def test_a_turn_is_cut_behind_its_action():
    heard: list[LLMRequest] = []

    def reply(request: LLMRequest) -> str:
        heard.append(request)
        return "so\nSearch[Ann]\nmade up" if len(heard) == 1 else "Finish[x]"

    ended(ReAct("baselines_tiny", 2), Tape({}, told={"react": reply}))
    assert [m.role for m in heard[1].messages] == ["user", "assistant", "user"]
    assert heard[1].messages[1].content == "so\nSearch[Ann]"


def test_turns_without_an_action_are_reminded_and_used_up():
    tape = recorded({"react": ["hm", "Search[]", "Search[Ann]", "hm"]})
    faults = ("No Action", "Empty Action", "No Action", "No Action")
    assert ended(ReAct("baselines_tiny", 2, turns=5), tape) == ("Ulm", "answered", faults)
    assert purposes(tape) == ["react"] * 3 + ["search"] + ["react"] * 2 + ["answer"]
    assert tape.prompts[1] == tape.prompts[2] == "Search[] or Finish[]"


def test_searches_have_a_limit_and_repeats_are_not_made():
    turns = [f"{BEGIN}{query}{END}" for query in ("a", "a", "b", "c")] + ["Answer: Ulm"]
    tape = recorded({"search_o1": turns, "distil": ["gist"]})
    assert ended(SearchO1("baselines_tiny", 2, searches=2), tape) == ("Ulm", "answered", ())
    assert searches(tape) == ["a", "b"] and purposes(tape).count("distil") == 2
    assert [p for p in tape.prompts if p.startswith(("again", "answer now"))] == [
        "again a",
        "answer now",
    ]


def test_search_o1_reads_in_the_light_of_its_reasoning():
    turns = [f"First Ann.{BEGIN}Ann{END} and then", f"{BEGIN}Lee{END}", "So.\nAnswer: Ulm"]
    tape = recorded({"search_o1": turns, "distil": [" Ann: Ulm \n"]})
    assert ended(SearchO1("baselines_tiny", 2), tape) == ("Ulm", "answered", ())
    assert purposes(tape) == ["search_o1", "search", "distil"] * 2 + ["search_o1"]
    distil, after, second = tape.prompts[1:4]
    assert f"First Ann.{BEGIN}Ann{END}" in distil and "and then" not in distil
    assert "1 title 1: text 1" in distil and "Query: Ann" in distil and ASKED in distil
    assert after == "found\nAnn: Ulm"
    assert f"First Ann.{BEGIN}Ann{END}\nfound\nAnn: Ulm\n{BEGIN}Lee{END}" in second


def test_an_unmarked_turn_of_search_o1_answers_and_an_empty_one_goes_on():
    tape = recorded({"search_o1": ["", "so be it\nUlm"]})
    assert ended(SearchO1("baselines_tiny", 2), tape) == ("Ulm", "answered", ("No Action",))
    assert tape.prompts[1] == "search or Answer:"


# --- Self-RAG ------------------------------------------------------------------------------------


def test_the_answer_with_the_best_verdicts_wins():
    told = {
        "retrieve": ["Yes."],
        "answer": ["Rom", "Ulm", "Wien"],
        "relevant": ["no", "yes", "yes"],
        "supported": ["yes", "yes", "no"],
        "useful": ["yes", "no", "yes"],
    }
    tape = recorded(told)
    # 1 + .5, 1 + 1 and 1 + .5 by the paper's weights.
    assert ended(SelfRAG("baselines_tiny", 3), tape) == ("Ulm", "answered", ())
    critiques = [("relevant",), ("supported",), ("useful",)] * 3
    search = ("search", ASKED, 3)
    assert tape.log == [("retrieve",), search, *[("answer",)] * 3, *critiques]
    assert "title 2" in tape.prompts[2] and "title 1" not in tape.prompts[2]
    tape = recorded(told)
    assert ended(SelfRAG("baselines_tiny", 3, weights=(0.0, 0.0, 1.0)), tape)[0] == "Rom"


def test_no_search_where_none_is_wanted():
    tape = recorded({"retrieve": ["NO, surely"]})
    assert ended(SelfRAG("baselines_tiny", 3), tape) == ("Ulm", "answered", ())
    assert purposes(tape) == ["retrieve", "answer_direct"]


def test_malformed_verdicts_search_and_count_against_a_segment():
    told = {"retrieve": ["perhaps"], "answer": ["Rom", "Ulm"], "relevant": ["", "yes"]}
    tape = recorded(told | {"supported": ["no"], "useful": ["no"]})
    faults = ("Invalid Verdict", "Invalid Verdict")
    assert ended(SelfRAG("baselines_tiny", 2), tape) == ("Ulm", "answered", faults)


def test_self_rag_without_passages_answers_directly():
    tape = recorded({"retrieve": ["yes"]}, found={ASKED: []})
    assert ended(SelfRAG("baselines_tiny", 2), tape) == ("Ulm", "answered", ())
    assert purposes(tape) == ["retrieve", "search", "answer_direct"]


# --- SlimPLM -------------------------------------------------------------------------------------


def test_a_trusted_draft_is_neither_searched_nor_shown():
    tape = recorded({}, texts={"drafter": ["Rom, surely"], "gate": ["A"]})
    leaf = played(SlimPLM("baselines_tiny", 2), tape).records[-1]
    assert purposes(tape) == ["drafter", "gate", "answer_direct"]
    assert (leaf.answer, leaf.state.strategy) == ("Ulm", "direct")
    assert "Draft: Rom, surely" in tape.prompts[1] and "Rom" not in tape.prompts[2]


@pytest.mark.parametrize(
    ("letter", "fault"), [("B", ""), ("C", "Invalid Gate"), ("", "Invalid Gate")]
)
def test_the_claims_of_a_draft_that_is_not_trusted_are_searched_together(letter, fault):
    found = {"Ann": [passage(1), passage(2), passage(3)], "Rom": [passage(2), passage(4)]}
    texts = {"drafter": [" Ann is from Rom.\n"], "gate": [letter]}
    tape = recorded({}, found, texts | {"rewriter": ["1. Ann\n- Rom\ntoo many"]})
    forest = played(SlimPLM("baselines_tiny", 3, queries=2), tape)
    searched = [("search", "Ann", 3), ("search", "Rom", 3)]
    assert tape.log == [("drafter",), ("gate",), ("rewriter",), *searched, ("answer",)]
    assert forest.records[1].fault == fault
    assert (forest.records[-1].answer, forest.records[-1].state.strategy) == ("Ulm", "retrieve")
    assert tape.prompts[2].startswith("claims 2\n")
    assert all(prompt.endswith("Draft: Ann is from Rom.") for prompt in tape.prompts[1:3])
    shown = "1 title 1: text 1\n2 title 2: text 2\n3 title 4: text 4\nQuestion"
    assert shown in tape.prompts[3] and "Rom" not in tape.prompts[3]


def test_without_draft_and_query_the_question_is_judged_and_searched():
    tape = recorded({}, texts={"drafter": [" "], "gate": ["B"], "rewriter": ["\n"]})
    result = evaluate(SlimPLM("baselines_tiny", 2), [ANN], tape.environment())
    assert result.malformed == {"Empty Draft": 1, "No Query": 1}
    assert result.answers == ("Ulm",) and searches(tape) == [ASKED]
    assert tape.prompts[1].endswith("\nDraft: ")


# --- InstructRAG ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reply", "answer", "faults"),
    [
        ("1 tells it.\nSo the answer is: Ulm.", "Ulm", ()),
        ("The answer is not Rom.\nHence the Answer is Ulm\nindeed", "Ulm", ()),
        ("Ulm it must be.", "Ulm it must be.", ("No Answer",)),
        ("So the answer is: .", "So the answer is: .", ("No Answer",)),
    ],
)
def test_an_explanation_ends_with_the_answer(reply, answer, faults):
    tape = recorded({"instruct": [reply]})
    assert ended(InstructRAG("baselines_tiny", 2), tape) == (answer, "answered", faults)
    assert tape.log == [("search", ASKED, 2), ("instruct",)]
    assert tape.prompts == [f"instruct\n1 title 1: text 1\n2 title 2: text 2\nQuestion: {ASKED}"]


# --- Adaptive-RAG and C-3PO's fixed strategies ---------------------------------------------------


@pytest.mark.parametrize(
    ("letter", "strategy", "asked"),
    [
        ("A", "none", ["answer_direct"]),
        ("B", "single", ["search", "answer"]),
        ("C", "multi", ["search", "thought", "search", "thought"]),
        ("D", "single", ["search", "answer"]),
    ],
)
def test_the_class_chooses_the_strategy(letter, strategy, asked):
    tape = recorded(
        {"thought": ["Ducks swim.", "So the answer is: Ulm."]}, texts={"classifier": [letter]}
    )
    forest = played(AdaptiveRAG("baselines_tiny", 2), tape)
    assert purposes(tape) == ["classifier", *asked]
    leaf = forest.records[-1]
    assert (leaf.answer, leaf.state.strategy) == ("Ulm", strategy)
    assert forest.records[0].fault == ("Invalid Class" if letter == "D" else "")


def test_a_malformed_class_is_counted_once():
    tape = recorded({}, texts={"classifier": ["D"]})
    result = evaluate(AdaptiveRAG("baselines_tiny", 2), [ANN], tape.environment())
    assert result.malformed == {"Invalid Class": 1} and result.ended == {"answered": 1}


def test_the_loop_of_adaptive_rag_searches_as_adaptive_rag_does():
    tape = recorded({"thought": ["So the answer is: Ulm."]}, texts={"classifier": ["C"]})
    played(AdaptiveRAG("baselines_tiny", 4, IRCoT(top_k=9)), tape)
    assert ("search", ASKED, 4) in tape.log


@pytest.mark.parametrize(
    ("strategy", "asked"),
    [
        (NO_RETRIEVAL, ["answer_direct"]),
        (RETRIEVAL, ["search", "filter", "answer"]),
        (PLANNING, ["roadmap", "decision", "search", "filter", "decision", "answer"]),
    ],
)
def test_a_fixed_strategy_never_asks_the_router(strategy, asked):
    chosen = ["Thought: t\nAction: [1]"]
    decided = ["Thought: t\nAction: [Retrieval] Ann", "Thought: t\nAction: [LLM]"]
    tape = recorded({}, texts={"filter": chosen, "decision": decided})
    fixed = FixedStrategy(system(), strategy)
    result = evaluate(fixed, [ANN], tape.environment())
    assert purposes(tape) == asked and "router" not in fixed.roles
    assert result.strategies == {strategy: 1} and result.answers == ("Ulm",)
    assert searches(tape) == {RETRIEVAL: [ASKED], PLANNING: ["Ann"]}.get(strategy, [])


def test_no_retrieval_is_direct_answering_and_single_is_standard_rag_with_a_filter():
    def told(request: LLMRequest) -> str:
        return str(hash(request.messages[-1].content))

    tapes = [Tape({"filter": ["Thought: t\nAction: [1, 2]"]}, told={"answer": told,
             "answer_direct": told}) for _ in range(4)]  # fmt: skip
    pairs = [
        (FixedStrategy(system(), NO_RETRIEVAL), direct("c3po_tiny")),
        (FixedStrategy(system(), RETRIEVAL), StandardRAG("c3po_tiny", 2)),
    ]
    for i, (fixed, plain) in enumerate(pairs):
        assert ended(fixed, tapes[2 * i])[0] == ended(plain, tapes[2 * i + 1])[0]


# --- Every prompt --------------------------------------------------------------------------------

ALL = (Reranker, Selection, QueryRewrite, IterRetGen, IRCoT, ReAct, SearchO1, SelfRAG, AdaptiveRAG,
       SlimPLM, InstructRAG)  # fmt: skip


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("baseline", ALL)
def test_the_language_model_sees_the_question_in_its_first_prompt(style, baseline):
    searched = f"{BEGIN}Ann{END}\nSearch[Ann]"
    replies = {name: [searched, searched, "", "Finish[x]\nAnswer: x"]
               for name in ("react", "search_o1")}  # fmt: skip
    texts = {"classifier": ["C"], "drafter": ["Rom"], "gate": ["B"], "rewriter": ["Ann"]}
    tape = recorded(replies | {"retrieve": ["yes"]}, texts=texts)
    assert ended(baseline(style, 2), tape)[1] == "answered"
    assert ASKED in tape.prompts[0]
    assert not any("$" in prompt for prompt in tape.prompts)
