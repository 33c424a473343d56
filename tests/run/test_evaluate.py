"""Evaluation: every question counts once, and so does every call."""

import dataclasses
import json

import numpy as np
import pytest

from jax_ragrl.cli.main import CONFIGS, load_config
from jax_ragrl.errors import EffectError, UserError
from jax_ragrl.experiments import experiment as quickstart
from jax_ragrl.experiments.experiment import baselines, gain, summarise
from jax_ragrl.rollout.collect import Environment
from jax_ragrl.run.components import Parts
from jax_ragrl.run.config import load_job
from jax_ragrl.run.evaluate import NoSampler, Result, evaluate, intervals, judged, table
from jax_ragrl.systems.baselines.standard import StandardRAG, direct
from tests.rollout.tape import ANN, BOB, Tape, system
from tests.tiny import tokenizer

HAND_OVER = "Thought: done\nAction: [LLM]"


def test_calls_tokens_and_rounds_are_counted_a_question():
    texts = {
        "router": ["[Planning]"],
        "decision": ["Thought: next Ann\nAction: [Retrieval] Ann", HAND_OVER],
        "filter": ["Thought: t\nAction: [1]"],
    }
    tape = Tape(texts, told={"roadmap": "1. one step", "answer": "in Ulm"})
    result = evaluate(system(), [ANN], tape.environment())
    costs = {name: x.item() for name, x in result.costs.items()}
    assert costs["retrieval_calls"] == 1 and costs["passages"] == 2
    assert costs["llm_calls"] == 2 and costs["llm_completion_tokens"] == 5
    written = [len(t) for t in ("[Planning]", texts and HAND_OVER)]
    assert costs["policy_calls"] == 4 and costs["policy_tokens"] > sum(written)
    # Route, roadmap, decide, search, filter, decide, answer: seven calls in sequence.
    assert costs["rounds"] == 7 and result.ended == {"answered": 1}
    assert result.mean("cover_em") == 1.0 and result.mean("em") == 0.0


def test_intervals_and_tables_are_of_the_questions_that_did_not_fail():
    scores = {"em": np.array([1.0, float("nan"), 1.0, float("nan")]), "f1": np.full(4, np.nan)}
    result = Result(scores, {}, {}, {}, {}, {}, ())
    assert intervals(result) == {"em": [100.0, 100.0]}
    rows = table(result, [ANN, BOB, BOB, ANN], lambda question: question.id)
    assert [rows[q.id]["em"] for q in (ANN, BOB)] == [[100.0] * 3] * 2
    assert "f1" not in rows[ANN.id] and rows[ANN.id]["questions"] == 2


def test_a_failed_environment_is_neither_right_nor_wrong():
    tape = Tape({}, told={"answer": lambda r: EffectError("down") if "Bob" in r.messages[-1].content
                          else "Ulm"})  # fmt: skip
    result = evaluate(StandardRAG("c3po_tiny", 2), [ANN, BOB], tape.environment())
    assert result.scores["em"][0] == 1.0 and np.isnan(result.scores["em"][1])
    assert result.mean("em") == 1.0 and result.ended == {"answered": 1, "failed": 1}
    assert np.isnan(result.costs["llm_calls"][1])


class Yes:
    """A judge that is pleased with every answer, and counts them."""

    name = "yes"

    def __init__(self) -> None:
        self.asked = 0

    def complete(self, requests):
        self.asked += len(requests)
        return ["True"] * len(requests)


def test_no_judge_says_of_a_failed_environment_that_it_was_wrong():
    down = {"answer": lambda r: EffectError("down") if "Bob" in r.messages[-1].content else "Ulm"}
    judge, tape = Yes(), Tape({}, told=down)
    environment = tape.environment()
    result = evaluate(StandardRAG("c3po_tiny", 2), [ANN, BOB], environment, judge=judge)
    np.testing.assert_array_equal(result.scores["judge"], [1.0, np.nan])
    assert result.mean("judge") == 1.0 and judge.asked == 1


def test_what_a_judge_says_is_what_a_whole_job_reports_and_it_is_asked_once(tmp_path, monkeypatch):
    job = load_job(load_config(CONFIGS / "tiny" / "c3po.py", []))
    judge, tape = Yes(), Tape({}, told={"answer": "Rom", "answer_direct": "Wien"})
    parts = Parts({}, tape, tape, {}, tokenizer(), judge)
    warm = evaluate(StandardRAG("c3po_tiny", 2), [ANN], tape.environment(), judge=Yes())
    monkeypatch.setattr(quickstart, "evaluate_models", lambda *_: warm)
    before = baselines(job, parts, (ANN,), tmp_path / "baselines.json")
    assert judge.asked == 2  # one answer of each, and both are wrong but for the judge
    told = summarise(job, parts, before, warm, tmp_path)
    assert told["metric"] == "judge, percent" and set(told["accuracy"].values()) == {100.0}
    assert told["gain"]["mean"] == 0.0
    alone = summarise(job, parts._replace(judge=None), before, warm, tmp_path)
    assert alone["metric"] == "cover-EM, percent" and set(alone["accuracy"].values()) == {0.0}


def test_a_gain_is_over_the_questions_that_failed_neither_time():
    """By hand: before 1 0 nan 0, after 1 nan 1 1; the pairs are the first and the last."""
    nan = float("nan")
    after = Result({"em": np.array([1.0, nan, 1.0, 1.0])}, {}, {}, {}, {}, {}, ())
    found = gain([1.0, 0.0, nan, 0.0], after.scores["em"])
    assert (found["trained"], found["mean"], found["pairs"]) == (100.0, 50.0, 2)
    assert found["ci95"] == [0.0, 100.0]
    assert gain([nan] * 4, after.scores["em"]) == {
        "trained": None,
        "mean": None,
        "ci95": [None, None],
        "pairs": 0,
    }


def test_what_could_be_asked_nothing_is_no_result(tmp_path, monkeypatch):
    def away(request):
        return EffectError("down")

    def half(request):
        return "Ulm" if "Ann" in request.messages[-1].content else away(request)

    rag, asked = StandardRAG("c3po_tiny", 2), [ANN, BOB]
    evaluate(rag, asked, Tape({}, told={"answer": half}).environment()).check_answered()
    lost = evaluate(rag, asked, Tape({}, told={"answer": away}).environment())
    with pytest.raises(UserError, match="not one of 2 .*, 2 times with: down. Start it again"):
        lost.check_answered()
    down = Tape({}, told={"answer": away, "answer_direct": away})
    monkeypatch.setattr(quickstart, "evaluate_models", lambda *_: lost)
    job = load_job(load_config(CONFIGS / "tiny" / "c3po.py", []))
    with pytest.raises(UserError, match="not one of 1 held-out questions"):
        parts = Parts({}, down, down, {}, tokenizer())
        baselines(job, parts, (ANN,), tmp_path / "baselines.json")
    assert not (tmp_path / "baselines.json").exists()


def test_a_summary_of_failures_alone_is_json():
    tape = Tape({}, told={"answer": EffectError("down")})
    summary = evaluate(StandardRAG("c3po_tiny", 2), [ANN], tape.environment()).summary()
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary
    assert summary["em"] is None and summary["costs"]["rounds"] is None
    assert summary["ended"] == {"failed": 1}


def test_results_do_not_depend_on_the_batch():
    def run(batch: int):
        tape = Tape({}, told={"answer_direct": lambda r: r.messages[-1].content})
        environment = Environment(NoSampler(), tape, tape)
        return evaluate(direct("c3po_tiny"), [ANN, BOB, ANN], environment, batch=batch)

    assert run(1).answers == run(2).answers


def test_malformed_actions_are_counted_by_kind():
    tape = Tape({"router": ["no bracket"]})
    result = evaluate(system(), [ANN], tape.environment())
    assert result.malformed == {"Invalid Format": 1} == result.ended
    assert result.answers == (None,) and result.mean("f1") == 0.0


def test_a_judge_is_asked_about_answers_only():
    verdicts = {"Ulm": "TRUE.", "Rom": EffectError("down"), "Wien": "False"}

    class Judge:
        name = "judge"

        def complete(self, requests):
            said = [r.messages[-1].content.split("Answer: ")[1].split("\n")[0] for r in requests]
            return [verdicts[answer] for answer in said]

    scores = judged(Judge(), [ANN, ANN, BOB, BOB], ["Ulm", None, "Rom", "Wien"])
    np.testing.assert_array_equal(scores, [1.0, 0.0, np.nan, 0.0])


def test_tables_split_the_questions_and_lose_none():
    tape = Tape({}, told={"answer_direct": "Ulm"})
    two = dataclasses.replace(BOB, hops=2)
    result = evaluate(direct("c3po_tiny"), [ANN, two], tape.environment())
    rows = table(result, [ANN, two], lambda q: q.hops)
    assert {k: (r["questions"], r["em"][0]) for k, r in rows.items()} == {
        "1": (1, 100.0),
        "2": (1, 0.0),
    }


def test_a_summary_says_what_most_failures_said():
    tape = Tape({}, told={"answer": EffectError("down")})
    summary = evaluate(StandardRAG("c3po_tiny", 2), [ANN, BOB], tape.environment()).summary()
    assert summary["failed_with"] == "down"
    tape = Tape({}, told={"answer": "Ulm"})
    assert (
        "failed_with"
        not in evaluate(StandardRAG("c3po_tiny", 2), [ANN], tape.environment()).summary()
    )
