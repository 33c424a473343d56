"""Baselines of frozen roles on recorded replies: their effects in order, and their ends."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from jax_ragrl.rollout.collect import collect
from jax_ragrl.rollout.expand import single_chain
from jax_ragrl.rollout.tree import Forest
from jax_ragrl.run.evaluate import evaluate
from jax_ragrl.systems.baselines.adaptive import AdaptiveRAG
from jax_ragrl.systems.baselines.agents import BEGIN, END, ReAct, SearchO1
from jax_ragrl.systems.baselines.instruct_rag import InstructRAG
from jax_ragrl.systems.baselines.iterative import IRCoT, IterRetGen
from jax_ragrl.systems.baselines.replug import Replug, passage_weights, weighted_vote
from jax_ragrl.systems.baselines.self_rag import SelfRAG
from jax_ragrl.systems.baselines.slim_plm import SlimPLM
from jax_ragrl.systems.baselines.standard import QueryRewrite, Reranker, Selection
from jax_ragrl.text.prompts import parse_passages
from jax_ragrl.types import LLMRequest
from tests.rollout.tape import ANN, BOB, Tape, passage

QUERY = ANN.text


def in_order(replies: Sequence[str]) -> Callable[[LLMRequest], str]:
    """Replies in order; the last one repeats."""
    rest = list(replies)
    return lambda request: rest.pop(0) if len(rest) > 1 else rest[0]


def tape_of(reply_lists, hit_map=None, texts=None) -> Tape:
    return Tape(
        texts or {},
        hit_map or {},
        {name: in_order(replies) for name, replies in reply_lists.items()},
    )


def forest_of(baseline: object, tape: Tape) -> Forest:
    return collect(baseline, single_chain, [ANN], tape.environment())


def end_of(baseline: object, tape: Tape) -> tuple[str | None, str, tuple[str, ...]]:
    leaf = forest_of(baseline, tape).records[-1]
    return leaf.answer, leaf.finish_reason, getattr(leaf.state, "faults", ())


def searches(tape: Tape) -> list[str]:
    return [entry[1] for entry in tape.log if entry[0] == "search"]


def purposes(tape: Tape) -> list[str]:
    return [entry[0] for entry in tape.log]


def test_the_reranker_answers_from_the_best_grades():
    tape = tape_of({"grade": ["1", "Grade: 9.", "none", "9", "10/10", "11"]})
    reranker = Reranker("baselines_tiny", 2, pool=3)
    assert end_of(reranker, tape) == ("Ulm", "answered", ("Invalid Grade", "Invalid Grade"))
    assert tape.log == [("search", QUERY, 6), *[("grade",)] * 6, ("answer",)]
    assert "1 title 2: text 2" in tape.prompts[1] and QUERY in tape.prompts[1]
    # Passage 5 has 10; of the two with 9 the first one comes first; 11 is not a grade.
    assert "1 title 5: text 5\n2 title 2: text 2\n" in tape.prompts[-1]
    assert "title 4" not in tape.prompts[-1]


def test_replug_answers_per_passage_and_votes_by_the_softmax_of_scores():
    tape = tape_of({"answer": ["Rom", "Ulm", "the Ulm."]})
    assert end_of(Replug("baselines_tiny", 3), tape) == ("Ulm", "answered", ())
    assert tape.log == [("search", QUERY, 3), *[("answer",)] * 3]
    for number, prompt in enumerate(tape.prompts, start=1):
        assert f"1 title {number}: text {number}\n" in prompt and prompt.count("title") == 1
    np.testing.assert_allclose(passage_weights([2.0, 1.0, 1.0]), [0.576117, 0.211942, 0.211942],
                               atol=1e-6)  # fmt: skip
    np.testing.assert_allclose(passage_weights([1e4, 1e4]), [0.5, 0.5])
    assert passage_weights([1.0, 0.0], temperature=0.1)[0] > 0.9999


@pytest.mark.parametrize("count", [0, 1])
@pytest.mark.parametrize("system", [Replug, Reranker, SelfRAG])
def test_few_passages_suffice(system, count):
    replies = {"retrieve": ["yes"], "grade": ["3"]}
    tape = tape_of(replies, hit_map={QUERY: [passage(1)][:count]})
    assert end_of(system("baselines_tiny", 2), tape)[:2] == ("Ulm", "answered")
    assert ("answer_direct", "answer")[count] in purposes(tape)


@pytest.mark.parametrize(
    ("weights", "answer"),
    [([0.5, 0.3, 0.2], "Rom"), ([0.4, 0.3, 0.3], "Ulm"), ([0.5, 0.25, 0.25], "Rom")],
)
def test_equal_answers_add_their_weights(weights, answer):
    assert weighted_vote(["Rom", "Ulm", "the ULM"], weights) == answer


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
def test_selected_passages_keep_the_selected_order(reply, titles, faults):
    tape = tape_of({"select": [reply]})
    assert end_of(Selection("baselines_tiny", 2), tape) == ("Ulm", "answered", faults)
    requests = "answer" if titles else "answer_direct"
    assert tape.log == [("search", QUERY, 4), ("select",), (requests,)]
    assert [title for title, _ in parse_passages("baselines_tiny", tape.prompts[-1])] == titles


def test_queries_run_together_and_hits_interleave():
    hit_map = {"Ann": [passage(1), passage(2), passage(3)], "birth": [passage(2), passage(4)]}
    tape = tape_of({"rewrite": ['1. Ann\n- "birth"\n\nAnn\n3) too many\n']}, hit_map)
    assert end_of(QueryRewrite("baselines_tiny", 3, queries=2), tape) == ("Ulm", "answered", ())
    assert tape.log == [("rewrite",), ("search", "Ann", 3), ("search", "birth", 3), ("answer",)]
    documents = "1 title 1: text 1\n2 title 2: text 2\n3 title 4: text 4\nQuestion"
    assert documents in tape.prompts[-1]


def test_without_a_readable_query_the_question_is_searched_and_the_fault_is_counted():
    tape = tape_of({"rewrite": [" \n "]})
    result = evaluate(QueryRewrite("baselines_tiny", 2), [ANN, BOB], tape.environment())
    assert result.invalid_actions == {"No Query": 2} and result.strategies == {}
    assert result.answers == ("Ulm", "Ulm") and searches(tape) == [ANN.text, BOB.text]


def test_each_round_searches_with_the_previous_answer():
    tape = tape_of({"answer": ["Linz", "Graz", "Ulm"]})
    assert end_of(IterRetGen("baselines_tiny", 2, rounds=3), tape) == ("Ulm", "answered", ())
    assert searches(tape) == [QUERY, f"Linz {QUERY}", f"Graz {QUERY}"]
    assert purposes(tape) == ["search", "answer"] * 3


def test_thoughts_and_searches_alternate_until_the_answer():
    thoughts = [
        "Ann is a duck. Ducks swim.",
        "\n She was born there\nor not",
        "So the ANSWER is U.S.",
    ]
    hit_map = {"Ann is a duck.": [passage(1), passage(7)], "She was born there": [passage(8)]}
    tape = tape_of({"thought": thoughts}, hit_map)
    assert end_of(IRCoT("baselines_tiny", 2, max_documents=3), tape) == ("U.S", "answered", ())
    assert searches(tape) == [QUERY, "Ann is a duck.", "She was born there"]
    assert purposes(tape) == ["search", "thought"] * 3
    # Passages accumulate without duplicates up to the limit; the chain does too.
    assert "2 title 2: text 2\n3 title 7: text 7\nQuestion" in tape.prompts[1]
    assert "title 7" in tape.prompts[2] and "title 8" not in tape.prompts[2]
    assert tape.prompts[2].endswith("Thoughts: Ann is a duck. She was born there")


@pytest.mark.parametrize(
    ("reply", "faults"),
    [(" \n", ("Empty Thought",)), ("The answer is: .", ("Empty Answer",)), ("Ducks dive.", ())],
)
def test_an_unfinished_chain_is_answered_from_passages(reply, faults):
    """It ends with a malformed thought, or with the last that is allowed."""
    tape = tape_of({"thought": ["Ducks swim.", reply]})
    assert end_of(IRCoT("baselines_tiny", 2, thoughts=2), tape) == ("Ulm", "answered", faults)
    assert purposes(tape) == ["search", "thought"] * 2 + ["search"] * (not faults) + ["answer"]


def test_react_sees_search_results_or_reminders_until_it_finishes():
    turns = ["Who is Ann?\nSearch[Ann  Lee]\nObservation: made up", "Finish[Ulm]"]
    requests: list[LLMRequest] = []
    tape = Tape({}, replies={"react": lambda r: requests.append(r) or turns.pop(0)})
    assert end_of(ReAct("baselines_tiny", 2), tape) == ("Ulm", "answered", ())
    assert tape.log == [("react",), ("search", "Ann Lee", 2), ("react",)]
    assert requests[-1].messages[1].content == "Who is Ann?\nSearch[Ann  Lee]", "cut"
    assert [m.role for m in requests[-1].messages] == ["user", "assistant", "user"]
    assert tape.prompts[-1] == "found\n1 title 1: text 1\n2 title 2: text 2"
    tape = tape_of({"react": ["hm", "Search[]", "Search[Ann]", "hm"]})
    faults = ("No Action", "Empty Action", "No Action", "No Action")
    assert end_of(ReAct("baselines_tiny", 2, turns=5), tape) == ("Ulm", "answered", faults)
    assert purposes(tape) == ["react"] * 3 + ["search"] + ["react"] * 2 + ["answer"]
    assert tape.prompts[1] == tape.prompts[2] == "Search[] or Finish[]"


def test_searches_are_limited_and_not_repeated():
    turns = [f"{BEGIN}{query}{END}" for query in ("a", "a", "b", "c")] + ["Answer: Ulm"]
    tape = tape_of({"search_o1": turns, "distil": ["gist"]})
    assert end_of(SearchO1("baselines_tiny", 2, searches=2), tape) == ("Ulm", "answered", ())
    assert searches(tape) == ["a", "b"] and purposes(tape).count("distil") == 2
    assert [p for p in tape.prompts if p.startswith(("again", "answer now"))] == [
        "again a",
        "answer now",
    ]


def test_search_o1_reads_with_its_reasoning():
    turns = [f"First Ann.{BEGIN}Ann{END} and then", f"{BEGIN}Lee{END}", "So.\nAnswer: Ulm"]
    tape = tape_of({"search_o1": turns, "distil": [" Ann: Ulm \n"]})
    assert end_of(SearchO1("baselines_tiny", 2), tape) == ("Ulm", "answered", ())
    assert purposes(tape) == ["search_o1", "search", "distil"] * 2 + ["search_o1"]
    distil, after, second = tape.prompts[1:4]
    assert f"First Ann.{BEGIN}Ann{END}" in distil and "and then" not in distil
    assert "1 title 1: text 1" in distil and "Query: Ann" in distil and QUERY in distil
    assert after == "found\nAnn: Ulm"
    assert f"First Ann.{BEGIN}Ann{END}\nfound\nAnn: Ulm\n{BEGIN}Lee{END}" in second


def test_the_answer_with_the_best_verdicts_wins():
    reply_lists = {
        "retrieve": ["Yes."],
        "answer": ["Rom", "Ulm", "Wien"],
        "relevant": ["no", "yes", "yes"],
        "supported": ["yes", "yes", "no"],
        "useful": ["yes", "no", "yes"],
    }
    tape = tape_of(reply_lists)
    # 1 + .5, 1 + 1 and 1 + .5 by the paper's weights.
    assert end_of(SelfRAG("baselines_tiny", 3), tape) == ("Ulm", "answered", ())
    critiques = [("relevant",), ("supported",), ("useful",)] * 3
    search = ("search", QUERY, 3)
    assert tape.log == [("retrieve",), search, *[("answer",)] * 3, *critiques]
    assert "title 2" in tape.prompts[2] and "title 1" not in tape.prompts[2]
    tape = tape_of(reply_lists)
    assert end_of(SelfRAG("baselines_tiny", 3, weights=(0.0, 0.0, 1.0)), tape)[0] == "Rom"


def test_a_negative_verdict_skips_the_search_and_malformed_ones_do_not():
    tape = tape_of({"retrieve": ["NO, surely"]})
    assert end_of(SelfRAG("baselines_tiny", 3), tape) == ("Ulm", "answered", ())
    assert purposes(tape) == ["retrieve", "answer_direct"]
    reply_lists = {"retrieve": ["perhaps"], "answer": ["Rom", "Ulm"], "relevant": ["", "yes"]}
    tape = tape_of(reply_lists | {"supported": ["no"], "useful": ["no"]})
    faults = ("Invalid Verdict", "Invalid Verdict")
    assert end_of(SelfRAG("baselines_tiny", 2), tape) == ("Ulm", "answered", faults)


def test_a_trusted_draft_is_neither_searched_nor_shown():
    tape = tape_of({}, texts={"drafter": ["Rom, surely"], "gate": ["A"]})
    leaf = forest_of(SlimPLM("baselines_tiny", 2), tape).records[-1]
    assert purposes(tape) == ["drafter", "gate", "answer_direct"]
    assert (leaf.answer, leaf.state.strategy) == ("Ulm", "direct")
    assert "Draft: Rom, surely" in tape.prompts[1] and "Rom" not in tape.prompts[2]


@pytest.mark.parametrize(
    ("letter", "fault"), [("B", ""), ("C", "Invalid Gate"), ("", "Invalid Gate")]
)
def test_claims_of_an_untrusted_draft_are_searched(letter, fault):
    hit_map = {"Ann": [passage(1), passage(2), passage(3)], "Rom": [passage(2), passage(4)]}
    texts = {"drafter": [" Ann is from Rom.\n"], "gate": [letter]}
    tape = tape_of({}, hit_map, texts | {"rewriter": ["1. Ann\n- Rom\ntoo many"]})
    forest = forest_of(SlimPLM("baselines_tiny", 3, queries=2), tape)
    queries = [("search", "Ann", 3), ("search", "Rom", 3)]
    assert tape.log == [("drafter",), ("gate",), ("rewriter",), *queries, ("answer",)]
    assert forest.records[1].parse_error == fault
    assert (forest.records[-1].answer, forest.records[-1].state.strategy) == ("Ulm", "retrieve")
    assert tape.prompts[2].startswith("claims 2\n")
    assert all(prompt.endswith("Draft: Ann is from Rom.") for prompt in tape.prompts[1:3])
    documents = "1 title 1: text 1\n2 title 2: text 2\n3 title 4: text 4\nQuestion"
    assert documents in tape.prompts[3] and "Rom" not in tape.prompts[3]


def test_without_draft_and_query_the_question_is_searched():
    tape = tape_of({}, texts={"drafter": [" "], "gate": ["B"], "rewriter": ["\n"]})
    result = evaluate(SlimPLM("baselines_tiny", 2), [ANN], tape.environment())
    assert result.invalid_actions == {"Empty Draft": 1, "No Query": 1}
    assert result.answers == ("Ulm",) and searches(tape) == [QUERY]
    assert tape.prompts[1].endswith("\nDraft: ")


@pytest.mark.parametrize(
    ("reply", "answer", "faults"),
    [
        ("1 tells it.\nSo the answer is: Ulm.", "Ulm", ()),
        ("Ulm it must be.", "Ulm it must be.", ("No Answer",)),
    ],
)
def test_an_explanation_ends_with_the_answer(reply, answer, faults):
    tape = tape_of({"instruct": [reply]})
    assert end_of(InstructRAG("baselines_tiny", 2), tape) == (answer, "answered", faults)
    assert tape.log == [("search", QUERY, 2), ("instruct",)]
    assert tape.prompts == [f"instruct\n1 title 1: text 1\n2 title 2: text 2\nQuestion: {QUERY}"]


@pytest.mark.parametrize(
    ("letter", "strategy", "requests"),
    [
        ("A", "none", ["answer_direct"]),
        ("B", "single", ["search", "answer"]),
        ("C", "multi", ["search", "thought", "search", "thought"]),
        ("D", "single", ["search", "answer"]),
    ],
)
def test_the_class_selects_the_strategy(letter, strategy, requests):
    tape = tape_of(
        {"thought": ["Ducks swim.", "So the answer is: Ulm."]}, texts={"classifier": [letter]}
    )
    forest = forest_of(AdaptiveRAG("baselines_tiny", 2, IRCoT(top_k=9)), tape)
    assert purposes(tape) == ["classifier", *requests]
    assert all(entry[2] == 2 for entry in tape.log if entry[0] == "search")
    leaf = forest.records[-1]
    assert (leaf.answer, leaf.state.strategy) == ("Ulm", strategy)
    assert forest.records[0].parse_error == ("Invalid Class" if letter == "D" else "")
