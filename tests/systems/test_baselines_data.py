"""Training data of baselines: supervised examples, classes, and neighbors."""

import collections
import dataclasses
import random

import numpy as np
import pytest

from jax_ragrl.errors import EffectError
from jax_ragrl.retrieval.hashed_words import HashedEncoder
from jax_ragrl.rollout.collect import collect
from jax_ragrl.rollout.effects import Search
from jax_ragrl.rollout.expand import ForcedAction, Tree, single_chain
from jax_ragrl.rollout.system import Execution
from jax_ragrl.systems.baselines import examples
from jax_ragrl.systems.baselines.adaptive import cheapest_classes, classifier_examples
from jax_ragrl.systems.baselines.skr import SKR, Neighbors, fit_neighbors
from jax_ragrl.systems.baselines.slim_plm import DraftOnly, SlimPLM, gate_examples
from jax_ragrl.text.prompts import parse_passages
from jax_ragrl.types import Hits, LLMRequest, Message, Passage, Question
from tests.rollout.tape import ANN, BOB, PAPER, Tape, passage, system

STYLE = "baselines_tiny"


def question_about(i: int, gold: tuple[str, ...] = ()) -> Question:
    return Question(f"q{i}", f"Which number is {i}?", (f"answer {i}", "other"), gold)


def hits(*numbers: int) -> Hits:
    return Hits(tuple(passage(i) for i in numbers), (1.0,) * len(numbers))


def documents(row) -> list[str]:
    return [title for title, _ in parse_passages(STYLE, row.messages[-1].content)]


def test_vanilla_examples_contain_the_first_hits():
    bare = dataclasses.replace(question_about(2), answers=())
    questions = [question_about(1), bare, question_about(3)]
    rows = examples.vanilla_examples(STYLE, questions, [hits(1, 2, 3), hits(4), hits()], 2)
    assert [(row.target, row.role) for row in rows] == [
        ("answer 1", "answer"),
        ("answer 3", "answer"),
    ]
    assert documents(rows[0]) == ["title 1", "title 2"] and documents(rows[1]) == []
    assert "Which number is 1?" in rows[0].messages[-1].content


def test_relevance_is_by_gold_or_else_answer():
    relevant = Passage("p1", "title 1", "It holds Answer 7, they say.")
    for gold in ("p1", "title 1"):
        assert examples.is_relevant(question_about(7, (gold,)), relevant)
    assert not examples.is_relevant(question_about(7, ("p2",)), relevant)
    assert examples.is_relevant(question_about(7), relevant)
    assert not examples.is_relevant(question_about(8), relevant)
    # Whole words: "no" is not in "north".
    assert not examples.is_relevant(
        dataclasses.replace(question_about(1), answers=("no",)), Passage("", "", "north")
    )


def robust(count: int, seed: int = 0):
    """Examples of many questions: gold 1 and 2; the search returns 2 on rank 3."""
    questions = [question_about(i, ("p1", "title 2")) for i in range(count)]
    corpus = [passage(i) for i in range(40)]
    results = [hits(3, 4, 2, 5, 6, 7, 8)] * count
    return examples.robust_examples(STYLE, questions, results, corpus, 3, random.Random(seed))


def test_contexts_are_evenly_relevant_low_or_random_shuffled_and_seeded():
    kinds = collections.Counter()
    for row in robust(600):
        titles = set(documents(row))
        gold = titles & {"title 1", "title 2"}
        assert len(titles) == 3
        if gold:
            assert titles == {"title 1", "title 2", "title 3"}
        low = titles == {"title 6", "title 7", "title 8"}
        kinds["relevant" if gold else "low" if low else "random"] += 1
    # A third each, within four standard deviations.
    assert all(abs(count - 200) < 4 * (600 * 2 / 9) ** 0.5 for count in kinds.values())
    assert len(kinds) == 3
    places = {documents(row).index("title 1") for row in robust(100) if "title 1" in documents(row)}
    assert places == {0, 1, 2}
    assert robust(50) == robust(50) != robust(50, seed=1)


def test_without_gold_a_passage_with_an_answer_is_relevant():
    relevant = Passage("x", "x", "answer 5")
    results = Hits((passage(1), relevant, passage(2)), (1.0,) * 3)
    rows = examples.robust_examples(
        STYLE, [question_about(5)] * 60, [results] * 60, [passage(9)], 1, random.Random(0)
    )
    contexts = {tuple(documents(row)) for row in rows}
    assert contexts == {("x",), ("title 2",), ("title 9",)}


def test_a_rationale_must_contain_the_answer_and_is_trained_in_its_inference_prompt():
    replies = {
        "1": " Title 1 tells answer 1.\n",
        "3": "Nothing helps.",
        "4": "It is answer 44.",  # whole words
        "5": "It is other.",  # gold too, but not the answer in the prompt
        "6": EffectError("down"),
    }
    prompts: list[LLMRequest] = []

    def reply(request: LLMRequest):
        prompts.append(request)
        return replies[request.messages[-1].content.split()[-1]]

    questions = [question_about(int(i)) for i in replies]
    questions.insert(1, dataclasses.replace(question_about(2), answers=()))
    writer = Tape({}, replies={"explain": reply})
    rows = examples.rationale_examples(STYLE, questions, [hits(1, 2, 3)] * 6, 2, writer)
    documents = "1 title 1: text 1\n2 title 2: text 2\nQuestion: Which number is 1?"
    assert rows == [
        examples.ChatExample(
            (Message("user", f"instruct\n{documents}"),),
            "Title 1 tells answer 1.\nSo the answer is: answer 1",
            "answer",
        )
    ]
    messages = (Message("user", f"explain\n{documents}\nAnswer: answer 1"),)
    assert prompts[0] == LLMRequest("explain", messages, examples.RATIONALE) and len(prompts) == 5


def forced_forest(right: dict[str, set[str]]):
    """C-3PO's three strategies on Ann, Bob and Cid; `right` lists the right ones."""
    cid = Question("q-cid", "Where was Cid born?", ("Bonn",), hops=2)

    def answer(kind: str):
        def reply(request):
            name = request.messages[-1].content.split()[-2]
            return "right" if kind in right.get(name, ()) else "wrong"

        return reply

    def write(role, prompt, rng):
        return "Thought: t\nAction: [LLM]" if role == "decision" else "Thought: t\nAction: [1]"

    replies = {"answer_direct": answer("none"), "answer": answer("some"), "roadmap": "1. one"}
    tape = Tape(write, replies=replies)
    forest = collect(system(), PAPER, [ANN, BOB, cid], tape.environment())
    reward_N = np.array([float(r.answer == "right") for r in forest.records], np.float32)
    return forest, reward_N


def test_the_class_is_the_cheapest_right_strategy():
    # Planning has no search here, so its answer is that of direct answering.
    forest, reward_N = forced_forest({"Ann": {"none", "some"}, "Bob": {"some"}})
    assert cheapest_classes(forest, reward_N) == {0: "A", 1: "B", 2: "C"}
    # Only the planned branches are right: C, independent of the hops.
    planned_N = np.array(
        [getattr(r.state, "strategy", "") == "Planning" and r.role == "leaf"
         for r in forest.records], np.float32)  # fmt: skip
    assert set(cheapest_classes(forest, planned_N).values()) == {"C"}
    # Without a right answer: by the number of hops.
    assert cheapest_classes(forest, 0 * reward_N) == {0: "B", 1: "B", 2: "C"}
    # Questions whose environment failed have no class.
    tape = Tape({"filter": ["Thought: t\nAction: [1]"]},
                hits={BOB.text: EffectError("down")})  # fmt: skip
    one = Tree(
        forced_actions={"router": (ForcedAction("[Retrieval] $question"),)}, branching_depth=0
    )
    forest = collect(system(), one, [BOB], tape.environment())
    assert cheapest_classes(forest, forest.reward_N) == {}


def test_classifier_examples_match_prompt_and_output():
    forest, reward_N = forced_forest({"Ann": {"none"}})
    names, rows = zip(*classifier_examples(STYLE, forest, reward_N), strict=True)
    assert names == ("q-ann", "q-bob", "q-cid")
    assert [(row.target, row.role) for row in rows] == [(c, "classifier") for c in "ABC"]
    assert ANN.text in rows[0].messages[-1].content


def test_gate_examples_label_right_drafts():
    def write(role, prompt, rng):
        if role == "drafter":
            return " " if "Bob" in prompt else "In Ulm, I think.\n"
        return "A" if role == "gate" else "query"

    tape = Tape(write)
    cid = Question("q-cid", "Where was Cid born?", ("Bonn", "Lm"))
    bare = Question("q-bare", "Where was Dan born?", ())
    forest = collect(SlimPLM(STYLE, 2), single_chain, [ANN, BOB, cid, bare], tape.environment())
    names, rows = zip(*gate_examples(STYLE, forest), strict=True)
    assert names == ("q-ann", "q-bob", "q-cid")
    assert [(row.target, row.role) for row in rows] == [("A", "gate"), ("B", "gate"), ("B", "gate")]
    read = [prompt for prompt in tape.prompts if prompt.startswith("gate")]
    assert [row.messages[-1].content for row in rows] == read[:3]
    assert read[0] == f"gate A B\nQuestion: {ANN.text}\nDraft: In Ulm, I think."
    assert read[1] == f"gate A B\nQuestion: {BOB.text}\nDraft: "
    alone = Tape(write)
    again = collect(DraftOnly(STYLE), single_chain, [ANN, BOB, cid, bare], alone.environment())
    assert gate_examples(STYLE, again) == gate_examples(STYLE, forest)
    assert set(alone.log) == {("drafter",)}  # without search, judgement and answer


TEXTS = ("film alpha", "film beta", "song gamma", "song delta", "film song")


def neighbors_of(alone: list[float], retrieved_scores: list[float], k: int = 2) -> Neighbors:
    encoder = HashedEncoder.fit([Passage("", "", text) for text in TEXTS])
    questions = [Question(text, text, ("x",)) for text in TEXTS]
    return fit_neighbors(encoder, questions, np.array(alone), np.array(retrieved_scores), k)


def test_half_of_the_nearest_questions_decide_to_search_and_without_any_skr_searches():
    neighbors = neighbors_of([0, 0, 1, 1, 0], [1, 1, 0, 0, 0])
    assert len(neighbors.helps_X) == 4  # the last one has equal scores and is left out
    assert neighbors.helps("which film") and not neighbors.helps("which song")
    assert neighbors_of([0, 1, 1, 1, 0], [1, 0, 0, 0, 0]).helps("film")
    assert not neighbors_of([0, 1, 1, 1, 0], [1, 0, 0, 0, 0], k=3).helps("film")
    nan = float("nan")
    assert neighbors_of([nan, 1, 0, 1, 0], [1, 1, 0, 1, nan]).helps("song")
    assert Execution(SKR(STYLE, 2), ANN).effects == (Search(ANN.text, 2),)


@pytest.mark.parametrize(
    ("text", "purposes"), [("which film", ["search", "answer"]), ("which song", ["answer_direct"])]
)
def test_skr_searches_where_retrieval_helped(text, purposes):
    tape = Tape({})
    skr = SKR(STYLE, 2, neighbors_of([0, 0, 1, 1, 0], [1, 1, 0, 0, 0]))
    collect(skr, single_chain, [dataclasses.replace(ANN, text=text)], tape.environment())
    assert [entry[0] for entry in tape.log] == purposes
