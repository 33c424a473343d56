"""Evaluation counts every question and call once; every wrong answer is one kind of mistake."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from jax_ragrl.cli.main import CONFIGS, load_config
from jax_ragrl.errors import EffectError, UserError
from jax_ragrl.experiments import experiment as quickstart
from jax_ragrl.experiments.experiment import (
    evaluate_baselines,
    evaluate_trained,
    evaluations,
    paired_gain,
    result_row,
    summarize,
)
from jax_ragrl.rollout.tree import Action
from jax_ragrl.run.evaluate import NoSampler, Result, evaluate, intervals, table
from jax_ragrl.run.load import load_job
from jax_ragrl.run.mistakes import KINDS, count_mistakes, mistake_of
from jax_ragrl.run.models import load_policy
from jax_ragrl.run.parts import Components
from jax_ragrl.runtime import multihost
from jax_ragrl.systems.baselines.standard import StandardRAG, direct
from tests.rollout.tape import ANN, BOB, Tape, system
from tests.tiny import tokenizer

HAND_OVER = "Thought: done\nAction: [LLM]"
DOWN = EffectError("down")


def test_calls_tokens_and_rounds_are_counted_per_question():
    texts = {
        "router": ["[Planning]"],
        "decision": ["Thought: next Ann\nAction: [Retrieval] Ann", HAND_OVER],
        "filter": ["Thought: t\nAction: [1]"],
    }
    tape = Tape(texts, replies={"roadmap": "1. one step", "answer": "in Ulm"})
    result = evaluate(system(), [ANN], tape.environment())
    costs = {name: x.item() for name, x in result.costs.items()}
    assert costs["retrieval_calls"] == 1 and costs["passages"] == 2
    assert costs["llm_calls"] == 2 and costs["llm_completion_tokens"] == 5
    written = [len(t) for t in ("[Planning]", texts and HAND_OVER)]
    assert costs["policy_calls"] == 4 and costs["policy_tokens"] > sum(written)
    # Route, roadmap, decide, search, filter, decide, answer: seven calls in sequence.
    assert costs["rounds"] == 7 and result.finish_reasons == {"answered": 1}
    assert result.mean("cover_em") == 1.0 and result.mean("em") == 0.0


def test_intervals_tables_and_standard_errors_leave_out_failed_questions():
    scores = {"em": np.array([1.0, float("nan"), 1.0, float("nan")]), "f1": np.full(4, np.nan)}
    result = Result(scores, {}, {}, {}, {}, {}, ())
    assert intervals(result) == {"em": [15.81, 100.0]}  # exact, of two
    rows = table(result, [ANN, BOB, BOB, ANN], lambda question: question.id)
    assert [rows[q.id]["em"] for q in (ANN, BOB)] == [[100.0, 2.5, 100.0]] * 2
    assert "f1" not in rows[ANN.id] and rows[ANN.id]["questions"] == 2
    scores = {"em": np.array([1.0, np.nan, 1.0, 0.0, 0.0]), "f1": np.array([0.5, np.nan])}
    result = Result(scores, {}, {}, {}, {}, {}, ())
    # p (1 - p) / (n - 1) under the root, for answers that are right or wrong.
    assert result.standard_error("em") == pytest.approx(np.sqrt(0.25 / 3))
    assert np.isnan(result.standard_error("f1"))


def accepting() -> Tape:
    """A judge that accepts every answer, and logs its requests."""
    return Tape({}, replies={"judge": "True"})


def test_a_failed_question_has_no_score_and_is_never_judged():
    down = {"answer": lambda r: DOWN if "Bob" in r.messages[-1].content else "Ulm"}
    judge, tape = accepting(), Tape({}, replies=down)
    environment = tape.environment()
    result = evaluate(StandardRAG("c3po_tiny", 2), [ANN, BOB], environment, judge=judge)
    np.testing.assert_array_equal(result.scores["judge"], [1.0, np.nan])
    np.testing.assert_array_equal(result.scores["em"], [1.0, np.nan])
    assert result.mean("judge") == result.mean("em") == 1.0 and judge.log == [("judge",)]
    assert result.finish_reasons == {"answered": 1, "failed": 1}


class LosesBob(Tape):
    """A policy on a server that fails when Bob's search results are to be selected."""

    def _actions(self, request):
        if request.role.name == "filter" and "Bob" in request.messages[-1].content:
            return [Action((1, 2), (), "", None, "HTTP 500")]
        return super()._actions(request)


def test_costs_of_a_question_that_a_server_lost_are_nan():
    texts = {"router": "[Retrieval] $question", "filter": "Thought: t\nAction: [1]"}
    tape = LosesBob(lambda role, prompt, rng: texts[role])
    result = evaluate(system(), [ANN, BOB], tape.environment())
    alone = evaluate(system(), [ANN], tape.environment())
    assert result.finish_reasons == {"answered": 1, "failed": 1}
    assert result.failures == ("HTTP 500",) and result.traces[1].faults == ("HTTP 500",)
    assert result.roles == alone.roles and result.roles["policy"]["router"]["calls"] == 1
    for name, cost in result.costs.items():
        np.testing.assert_array_equal(cost, [alone.costs[name][0], np.nan], name)


def test_process_zero_alone_asks_the_judge(monkeypatch):
    grades, judge = np.array([0.0, 1.0]), accepting()
    monkeypatch.setattr(multihost, "is_process_zero", lambda: False)
    monkeypatch.setattr(multihost, "all_gather_object", lambda work: [grades, work()])
    environment = Tape({}).environment()._replace(sampler=NoSampler())
    result = evaluate(direct("c3po_tiny"), [ANN, BOB], environment, judge=judge)
    assert judge.log == []
    np.testing.assert_array_equal(result.scores["judge"], grades)


def test_the_verdict_of_the_judge_is_the_reported_metric(tmp_path, monkeypatch):
    job = load_job(load_config(CONFIGS / "tiny" / "c3po.py", []))
    judge, tape = accepting(), Tape({}, replies={"answer": "Rom", "answer_direct": "Wien"})
    parts = Components({}, tape, tape, {}, tokenizer(), judge)
    warm = evaluate(StandardRAG("c3po_tiny", 2), [ANN], tape.environment(), judge=accepting())
    monkeypatch.setattr(quickstart, "evaluate_models", lambda *_: warm)
    job = dataclasses.replace(job, run=dataclasses.replace(job.run, fixed_strategies=False))
    before = evaluate_baselines(job, parts, (ANN,), tmp_path / "baselines.json")
    assert len(judge.log) == 2  # one answer of each baseline; only the judge accepts them
    after = {"trained": result_row(warm)}
    summary = summarize(job, parts, before, after, tmp_path)
    assert summary["metric"] == "judge, percent" and set(summary["accuracy"].values()) == {100.0}
    assert summary["gain"]["mean"] == 0.0
    alone = summarize(job, parts._replace(judge=None), before, after, tmp_path)
    assert alone["metric"] == "cover-EM, percent" and set(alone["accuracy"].values()) == {0.0}


def scored(*cover_em: float) -> Result:
    scores = {name: np.array(cover_em) for name in ("cover_em", "f1")}
    return Result(scores, {}, {}, {"Planning": 1}, {}, {}, ())


def test_a_policy_is_evaluated_with_each_strategy_alone(monkeypatch):
    """The strategies are those of the router; the key `run.fixed_strategies` leaves them out."""
    monkeypatch.setattr(quickstart, "evaluate_models", lambda *inputs: inputs[4])
    job = load_job(load_config(CONFIGS / "tiny" / "c3po.py", []))
    parts = Components({}, None, None, {}, tokenizer(), None)
    rows = {row: run() for row, run in evaluations(job, parts, {}, (ANN,), "trained").items()}
    assert rows.pop("trained") is None  # the system of the recipe
    assert {name: system.strategy for name, system in rows.items()} == {
        f"trained: always {name}": name for name in ("No Retrieval", "Retrieval", "Planning")
    }
    short = dataclasses.replace(job, run=dataclasses.replace(job.run, fixed_strategies=False))
    assert list(evaluations(short, parts, {}, (ANN,), "trained")) == ["trained"]


def test_a_resumed_run_reads_the_rows_of_its_trained_policy(tmp_path, monkeypatch):
    """It asks again if the questions or the number of steps are others."""
    calls, tape = [], Tape({}, replies={"answer": "Ulm"})
    result = evaluate(StandardRAG("c3po_tiny", 2), [ANN, BOB], tape.environment())
    monkeypatch.setattr(
        quickstart, "evaluate_models", lambda *inputs: calls.append(inputs) or result
    )
    monkeypatch.setattr(quickstart, "changed_policies", lambda *_: {"policy"})
    job = load_job(load_config(CONFIGS / "tiny" / "c3po.py", []))
    parts = Components({}, tape, tape, {}, tokenizer(), None)
    first, again = (evaluate_trained(job, parts, {}, (ANN, BOB), {}, tmp_path) for _ in range(2))
    assert len(calls) == 4  # the policy as it is, and with each strategy
    assert set(again) == set(first)
    assert [again[name]["scores"] for name in first] == [row["scores"] for row in first.values()]
    evaluate_trained(job, parts, {}, (BOB, ANN), {}, tmp_path)
    (tmp_path / "checkpoints" / "10").mkdir(parents=True)
    evaluate_trained(job, parts, {}, (BOB, ANN), {}, tmp_path)
    assert len(calls) == 12


def test_a_strategy_whose_policies_did_not_change_keeps_its_row(tmp_path, monkeypatch):
    """Changed is one weight of the router, then of the other roles, which have another policy."""
    asked = []
    answer = evaluate(StandardRAG("c3po_tiny", 2), [ANN], Tape({}).environment())
    monkeypatch.setattr(quickstart, "evaluate_models", lambda *x: asked.append(x[4]) or answer)
    job = load_job(load_config(CONFIGS / "tiny" / "c3po_router.py", []))
    decoder = load_policy("tiny")[0]
    parts = Components({}, None, None, {"policy": decoder, "router": decoder}, tokenizer(), None)
    old = {name: {"cover_em": name} for name in ("No Retrieval", "Retrieval", "Planning")}
    before = {f"warm_start: always {name}": row for name, row in old.items()}
    for changed, systems in (("router", 1), ("policy", 4)):
        models = parts.models()
        params = jax.tree.map(lambda x: x.at[(0,) * x.ndim].add(1), models[changed].params)
        models[changed] = dataclasses.replace(models[changed], params=params)
        asked.clear()
        rows = evaluate_trained(job, parts, models, (ANN,), before, tmp_path / changed)
        assert len(asked) == systems and asked[0] is None  # the system of the recipe
        kept = {name: row for name, row in rows.items() if row in old.values()}
        names = old if systems == 1 else ()
        assert kept == {f"trained: always {name}": old[name] for name in names}


def test_the_headline_gain_is_over_the_best_row_that_needs_no_training(tmp_path):
    """The untrained policy that always plans is right on 2 of 4, the trained one on 3 of 4."""
    job = load_job(load_config(CONFIGS / "tiny" / "c3po.py", []))
    parts = Components({}, None, Tape({}), {}, tokenizer(), None)
    always, fixed = "warm_start: always Planning", "trained: always Planning"
    before = {"warm_start": scored(1, 0, 0, 0), always: scored(1, 1, 0, 0)}
    after = {"trained": scored(1, 1, 1, 0), fixed: scored(1, 1, 1, 0)}
    rows, after_rows = (
        {name: result_row(result) for name, result in results.items()}
        for results in (before, after)
    )
    summary = summarize(job, parts, rows, after_rows, tmp_path)
    assert (summary["gain"]["over"], summary["gain"]["mean"]) == (always, 25.0)
    assert summary["gain_over_warm_start"]["mean"] == 50.0
    assert (summary["gain_over_fixed"]["over"], summary["gain_over_fixed"]["mean"]) == (fixed, 0.0)
    assert list(summary["accuracy"]) == ["warm_start", always, fixed, "trained"]


def test_a_gain_leaves_out_questions_that_failed_either_time():
    """Before 1 0 nan 0, after 1 nan 1 1: the pairs are the first and the last question."""
    nan = float("nan")
    after = Result({"em": np.array([1.0, nan, 1.0, 1.0])}, {}, {}, {}, {}, {}, ())
    actual = paired_gain([1.0, 0.0, nan, 0.0], after.scores["em"])
    assert (actual["trained"], actual["mean"], actual["pairs"]) == (100.0, 50.0, 2)
    assert actual["ci95"] == [0.0, 100.0]
    none = {"trained": None, "mean": None, "ci95": [None, None], "pairs": 0}
    assert paired_gain([nan] * 4, after.scores["em"]) == none


def test_a_result_of_failures_alone_is_refused_and_its_summary_is_json(tmp_path, monkeypatch):
    def unavailable(request):
        return EffectError("down")

    def half(request):
        return "Ulm" if "Ann" in request.messages[-1].content else unavailable(request)

    rag, questions = StandardRAG("c3po_tiny", 2), [ANN, BOB]
    evaluate(rag, questions, Tape({}, replies={"answer": half}).environment()).check_answered()
    failed_result = evaluate(
        rag, questions, Tape({}, replies={"answer": unavailable}).environment()
    )
    with pytest.raises(UserError, match="all of 2 held-out questions failed, 2 times with: down"):
        failed_result.check_answered()
    down = Tape({}, replies={"answer": unavailable, "answer_direct": unavailable})
    monkeypatch.setattr(quickstart, "evaluate_models", lambda *_: failed_result)
    job = load_job(load_config(CONFIGS / "tiny" / "c3po.py", []))
    with pytest.raises(UserError, match="all of 1 held-out questions"):
        parts = Components({}, down, down, {}, tokenizer())
        evaluate_baselines(job, parts, (ANN,), tmp_path / "baselines.json")
    assert not (tmp_path / "baselines.json").exists()
    tape = Tape({}, replies={"answer": EffectError("down")})
    summary = evaluate(StandardRAG("c3po_tiny", 2), [ANN], tape.environment()).summary()
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary
    assert summary["em"] is None and summary["costs"]["rounds"] is None
    assert summary["ended"] == {"failed": 1} and summary["failed_with"] == "down"


def test_invalid_actions_are_counted_by_error():
    tape = Tape({"router": ["no bracket"]})
    result = evaluate(system(), [ANN], tape.environment())
    assert result.invalid_actions == {"Invalid Format": 1} == result.finish_reasons
    assert result.answers == (None,) and result.mean("f1") == 0.0


def test_answers_without_a_verdict_are_counted_and_left_out():
    verdict = lambda r: "Hm." if BOB.text in r.messages[0].content else "True"  # noqa: E731
    judge = Tape({}, replies={"judge": verdict})
    tape = Tape({}, replies={"answer_direct": "Ulm"})
    summary = evaluate(direct("c3po_tiny"), [ANN, BOB], tape.environment(), judge=judge).summary()
    assert summary["judge"] == 100.0 and summary["unjudged"] == 1
    failing = Tape({}, replies={"answer_direct": EffectError("down")}).environment()
    failed = evaluate(direct("c3po_tiny"), [ANN, BOB], failing, judge=judge).summary()
    assert failed["judge"] is None and "unjudged" not in failed


def test_a_run_that_ended_early_has_the_steps_that_it_took(tmp_path):
    job = load_job(load_config(CONFIGS / "tiny" / "c3po.py", ["--config.run.steps=100"]))
    parts = Components({}, None, Tape({}), {}, tokenizer(), None)
    for name in ("10", "20", "damaged-30"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    before, after = {"warm_start": result_row(scored(1, 0))}, {"trained": result_row(scored(1, 1))}
    summary = summarize(job, parts, before, after, tmp_path)
    assert summary["steps"] == 20
    assert summary["checkpoint"] == str(tmp_path / "checkpoints" / "20")
    none = dataclasses.replace(job, run=dataclasses.replace(job.run, steps=0))
    summary = summarize(none, parts, before, after, tmp_path / "none")
    assert summary["steps"] == 0 and summary["checkpoint"] == job.policy


GOLD = [{"id": "p1", "title": "A", "text": "a"}, {"id": "p2#char=0,4", "title": "B", "text": "b"}]


def prediction(**changes):
    row = {"scores": {"cover_em": 0.0}, "answer": "Bergen", "faults": []}
    row |= {"costs": {"retrieval_calls": 2}}
    return row | {"passages": GOLD, "gold_passages": ["p1", "p2"]} | changes


CASES = [
    ("", {"scores": {"cover_em": 1.0}}),
    ("", {"scores": {"cover_em": None}, "answer": None}),  # the environment failed
    ("malformed", {"answer": None, "faults": ["No Answer"]}),
    ("search_failed", {"answer": None, "passages": GOLD[:1]}),
    ("search_failed", {"answer": None, "passages": []}),
    ("gave_up", {"answer": None}),
    ("wrong", {"answer": None, "gold_passages": []}),
    ("never_searched", {"passages": [], "costs": {"retrieval_calls": 0}}),
    ("premature", {"passages": []}),  # nothing was found
    ("premature", {"passages": GOLD[:1]}),
    ("premature", {"faults": ["Bad Query"], "passages": GOLD[1:]}),
    ("misread", {}),
    ("misread", {"gold_passages": ["A", "B"]}),  # gold by title
    ("wrong", {"gold_passages": []}),
]


@pytest.mark.parametrize(("kind", "changes"), CASES)
def test_a_wrong_answer_has_one_kind_of_mistake(kind, changes):
    assert mistake_of(prediction(**changes)) == kind


def test_mistakes_are_counted_in_the_order_of_kinds():
    counts = count_mistakes(prediction(**changes) for _, changes in CASES)
    assert list(counts) == list(KINDS)
    assert sum(counts.values()) == len(CASES) - 2 and counts["premature"] == 3
