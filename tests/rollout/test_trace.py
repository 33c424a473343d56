import json

import numpy as np
import pytest

from jax_ragrl.rollout.collect import collect
from jax_ragrl.rollout.expand import single_chain
from jax_ragrl.rollout.trace import transcript, trees
from jax_ragrl.rollout.tree import Action, Record, build_forest
from jax_ragrl.systems.baselines.executor import SearchAgent
from tests.rollout.tape import ANN, PAPER, Tape, credit_of, improvise, play
from tests.rollout.test_collect import QUESTIONS
from tests.tiny import tokenizer

CHOOSERS = ("filter",)
TEXTS = {"router": ["[Retrieval] Ann"], "filter": ["Thought: t\nAction: [2]"]}


def test_traces_are_json_with_every_node_of_questions_that_did_not_fail():
    forest = play(Tape(improvise), *QUESTIONS, expander=PAPER)
    drawn = trees(forest, credit_of(forest), 4, choosers=CHOOSERS)
    assert json.loads(json.dumps(drawn, allow_nan=False)) == drawn
    assert [tree["question"] for tree in drawn] == [q.text for q in QUESTIONS[:4]]
    ids = [[node["id"] for node in tree["nodes"]] for tree in drawn]
    assert ids == [forest.nodes_of(i).tolist() for i in range(4)]
    forest = forest._replace(failed_questions=(0, 2))
    drawn = trees(forest, credit_of(forest), 2, choosers=CHOOSERS)
    assert [tree["question"] for tree in drawn] == [QUESTIONS[1].text, QUESTIONS[3].text]


def test_a_tree_and_a_transcript_hold_every_step_in_order():
    forest = play(Tape({role: list(texts) for role, texts in TEXTS.items()}))
    (tree,) = trees(forest, credit_of(forest), 5, choosers=CHOOSERS)
    assert tree | {"nodes": 0} == {"question": ANN.text, "answers": ["Ulm"], "hops": 1, "nodes": 0}
    router, kept, leaf = tree["nodes"]
    assert [n["parent"] for n in tree["nodes"]] == [None, 0, 1]
    assert [n["credit"] for n in tree["nodes"]] == [1.0, 1.0, 1.0]
    assert [n["reward"] for n in tree["nodes"]] == [None, None, 1.0]
    assert router["text"] == "[Retrieval] Ann" and router["passages"] == []
    assert [p["kept"] for p in kept["passages"]] == [False, True]
    assert kept["passages"][0] == {"title": "title 1", "text": "text 1", "kept": False}
    assert (leaf["answer"], leaf["why"], leaf["role"]) == ("Ulm", "answered", "leaf")
    assert leaf["calls"] == [["search", "Ann -> title 1, title 2"], ["answer", "Ulm"]]
    head, *steps = transcript(forest, 0).split("\n")
    assert head == ANN.text
    assert [line.split()[0] for line in steps] == [
        *["router", "search", "filter", "Action:", "answer", "=>"]
    ]
    assert "Ann -> title 1, title 2" in steps[1] and steps[-1].endswith("Ulm (answered)")
    # Credit without a leaf is null.
    forest = play(Tape({"router": ["[No Retrieval]"]}))
    (tree,) = trees(forest, np.array([np.nan, 1.0], np.float32), 1)
    assert [n["credit"] for n in tree["nodes"]] == [None, 1.0]


def test_a_decision_after_a_filter_shows_no_passages_and_a_search_without_readers_its_own():
    texts = {
        "router": ["[Planning]"],
        "decision": ["Thought: n\nAction: [Retrieval] a", "Thought: d\nAction: [LLM]"],
        "filter": ["Thought: t\nAction: [1]"],
    }
    forest = play(Tape(texts))
    (tree,) = trees(forest, credit_of(forest), 1, choosers=CHOOSERS)
    lines = {n["id"]: len(n["passages"]) for n in tree["nodes"]}
    assert lines == {0: 0, 1: 0, 2: 2, 3: 0, 4: 0}
    agent = SearchAgent("search_r1", "coda_tiny", 2, as_chat_turns=True)
    texts = {"agent": ["<search>Ann</search>", "<answer>Ulm</answer>"]}
    forest = collect(agent, single_chain, [ANN], Tape(texts).environment())
    (tree,) = trees(forest, np.zeros(3), 1)
    result = [{"title": f"title {i}", "text": f"text {i}"} for i in (1, 2)]
    assert [node["passages"] for node in tree["nodes"]] == [result, [], []]


def test_tokens_have_their_sampling_log_probabilities():
    ids = tuple(tokenizer().encode("[Planning]"))
    prompt = tuple(tokenizer().encode("route"))
    logps = tuple(-0.25 * i for i in range(len(ids)))
    rows = [
        Record(-1, 0, "router", 1, (0,), Action(prompt, ids, "[Planning]", logps)),
        Record(-1, 0, "router", 1, (1,), Action(prompt, ids, "[Planning]"), is_forced=True),
    ]
    (tree,) = trees(build_forest((ANN,), rows), np.zeros(2), 1, tokenizer=tokenizer())
    sampled, forced = tree["nodes"]
    assert "".join(text for text, _ in sampled["tokens"]) == "[Planning]"
    assert [logp for _, logp in sampled["tokens"]] == pytest.approx(logps)
    assert {logp for _, logp in forced["tokens"]} == {None} and forced["prompt"] == "route"
