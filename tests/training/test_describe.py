"""Rollout metrics, the log of a run, and experiment trackers."""

import dataclasses
import json
import math
import sys
from types import MappingProxyType, SimpleNamespace
from unittest.mock import Mock, call

import numpy as np
import pytest

from jax_ragrl.errors import EffectError, UserError
from jax_ragrl.rollout.expand import Branching, ForcedAction
from jax_ragrl.run.config import TRACKERS, Run
from jax_ragrl.run.guards import Guard
from jax_ragrl.run.indicators import Limit
from jax_ragrl.runtime.jsonl import write_json
from jax_ragrl.systems.opera import Opera
from jax_ragrl.systems.opera.grammar import ANALYSIS, PLAN, REWRITE
from jax_ragrl.systems.opera.mapgrpo import Groups, Injection
from jax_ragrl.text.metrics import exact_match
from jax_ragrl.training.log import Clock, Log, ProgramCounter, format_number, matching_keys
from jax_ragrl.training.loop import check_records
from jax_ragrl.training.rollout_metrics import (
    FEW_PAIRS,
    describe_rollout,
    error_counts,
    expert_fractions,
    retrieval_recall,
    reward_order,
    rewarded_logps,
    role_rewards,
)
from jax_ragrl.training.trackers import Trackers
from jax_ragrl.types import Question
from tests.rollout.tape import ANN, BOB, Tape, passage, play, talk


def always(**texts: str):
    return lambda role, prompt, rng: texts[role]


def described(forest, credit: float = 0.0, *more):
    return describe_rollout(forest, np.full(len(forest.records), credit), *more)


def wide(effect, question) -> Branching:
    """A forced route and eight samples; one action elsewhere."""
    if effect.role != "router":
        return Branching(1)
    return Branching(8, (ForcedAction("[No Retrieval]"),))


def test_samples_count_with_multiplicity_and_own_choices_leave_forced_ones_out():
    """Six valid routes, and an invalid one twice; the forced route does not count."""
    texts = {"router": ["[No Retrieval]"] * 6 + ["nonsense"] * 2}
    forest = play(Tape(texts), expander=wide)
    metrics = described(forest)
    assert forest.multiplicity_N[~forest.leaf_N].sum() == 9
    tokens = [len(r.action.ids) * r.multiplicity for r in forest.records if r.action]
    assert metrics["policy_tokens"] == sum(tokens) > 0
    assert (
        metrics["invalid_action/Invalid Format"] == 2 and metrics["unanswered/Invalid Format"] == 1
    )
    assert metrics["valid_frac/router"] == 6 / 8
    # Six of eight samples chose the rewarded route; without a choice there is no metric.
    leaves = np.flatnonzero(forest.leaf_N)
    forest.reward_N[leaves] = [float(forest.records[i].answer is not None) for i in leaves]
    metrics = described(forest)
    assert metrics["reward/own"] == 6 / 8 and metrics["reward/mean"] == 1 / 2
    alone = play(Tape(always(router="[No Retrieval]")))
    assert "reward/own" not in described(alone)

    def forced(effect, question) -> Branching:
        return Branching(0, (ForcedAction("[No Retrieval]"),))

    forest = play(Tape(texts), expander=forced)
    assert "reward/own" not in described(forest)


def test_a_step_has_sizes_and_unless_all_failed_strategy_rewards_and_costs():
    down = EffectError("down")
    tape = Tape(always(router="[No Retrieval]"), replies={"answer_direct": down})
    metrics = described(play(tape, ANN, BOB))
    sizes = {"nodes": 0.0, "leaves": 0.0, "failed": 2.0, "policy_tokens": 0.0}
    assert metrics == sizes
    # One question is answered, the other one failed.
    replies = {
        "answer_direct": lambda r: "Ulm" if "Ann" in str(r.messages) else EffectError("down")
    }
    tape = Tape(lambda role, prompt, rng: "[No Retrieval]", replies=replies)
    forest = play(tape, ANN, BOB)
    metrics = described(forest._replace(reward_N=forest.leaf_N.astype(np.float32)))
    names = ("nodes", "leaves", "failed", "actions_per_rollout/router")
    assert [metrics[name] for name in names] == [1, 1, 1, 1]
    names = ("strategy_reward/No Retrieval", "reward/mean", "llm_calls")
    assert [metrics[name] for name in names] == [1, 1, 1]


@pytest.mark.parametrize(
    ("rewards", "order"),
    [
        ({"Ulm": 1.0, "Bonn": 0.0}, 1.0),
        ({"Ulm": 1.0, "Bonn": 1.0}, 0.0),  # only the form is paid for
        ({"Ulm": 0.2, "Bonn": 0.8}, 0.0),
    ],
)
def test_the_order_of_rewards_is_compared_with_that_of_answers(rewards, order):
    """One of two rollouts of each question answers right, the other one wrong."""
    routes, selection = ["[No Retrieval]", "[Retrieval] x"], ["Thought: t\nAction: [1]"]
    replies = {"answer_direct": lambda _: "Ulm", "answer": lambda _: "Bonn"}

    def pair(effect, question):
        return Branching(2 if effect.role == "router" else 1)

    def order_of(count: int) -> dict[str, float]:
        questions = [dataclasses.replace(ANN, id=str(i)) for i in range(count)]
        texts = {"router": routes * count, "filter": selection * count}
        forest = play(Tape(texts, {"x": [passage(1)]}, replies), *questions, expander=pair)
        paid = [rewards.get(record.answer, 0.0) for record in forest.records]
        return reward_order(forest._replace(reward_N=np.array(paid, np.float32)), exact_match)

    assert order_of(FEW_PAIRS) == {"reward_order": order}
    assert order_of(FEW_PAIRS - 1) == {}


def test_recall_is_of_gold_titles_or_ids_without_failed_questions():
    golden = [dataclasses.replace(q, gold=("p1",)) for q in (ANN, BOB)]
    replies = {"answer": lambda r: "Ulm" if "Ann" in str(r.messages) else EffectError("down")}
    texts = always(router="[Retrieval] x", filter="Thought: t\nAction: [1]")
    forest = play(Tape(texts, {"x": [passage(1)]}, replies), *golden)
    assert forest.failed_questions == (1,) and retrieval_recall(forest) == {"retrieval/recall": 1.0}
    gold = Question("q", "Where was Ann born?", ("Ulm",), gold=("title 1", "p2"))
    texts = always(router="[Retrieval] Ann", filter="Thought: t\nAction: [1]")
    forest = play(Tape(texts, {"Ann": [passage(1), passage(2)]}), gold)
    assert retrieval_recall(forest) == {"retrieval/recall": 1.0}
    forest = play(Tape(texts, {"Ann": [passage(2), passage(3)]}), gold)
    assert retrieval_recall(forest) == {"retrieval/recall": 0.5}
    plain = dataclasses.replace(gold, gold=())
    assert retrieval_recall(play(Tape(texts, {"Ann": [passage(2)]}), plain)) == {}


def test_credit_is_a_mean_over_trained_actions_and_reward_terms_over_leaves():
    forest = play(Tape(always(router="[No Retrieval]")), ANN, BOB)
    credit_N = np.where(forest.question_N == 0, 0.5, np.nan)
    assert describe_rollout(forest, credit_N)["credit/router"] == 0.5
    assert "credit/router" not in describe_rollout(forest, credit_N * np.nan)
    leaves = np.flatnonzero(forest.leaf_N)
    format_N = np.full(len(forest.records), 9.0)
    format_N[leaves] = [1.0, 0.5]
    metrics = described(forest, np.nan, lambda _: {"format": format_N})
    assert metrics["reward_term/format"] == 0.75
    assert "reward_term/format" not in described(forest, np.nan)


def test_errors_corrected_by_a_state_are_counted():
    texts = always(router="[Retrieval] Ann", filter="Thought: t\nAction: [1, 7]")
    assert error_counts(play(Tape(texts), strict=False)) == {
        "invalid_action/Hallucinate Document Idx": 1.0
    }
    strict = play(Tape(texts))
    assert error_counts(strict) == {"unanswered/Hallucinate Document Idx": 1.0}
    # The action ends the rollout, and is invalid.
    metrics = described(strict)
    assert (metrics["valid_frac/router"], metrics["valid_frac/filter"]) == (1, 0)


def test_role_rewards_are_means_over_samples():
    """Two questions with two plans each: rewards 0.4 twice, and 0.2 and 1."""
    twice = Groups(frozenset((PLAN,)), 2, Injection("off"), None, frozenset((PLAN,)))
    texts = {PLAN: ["1 a", "1 a", "1 c", "1 d"], ANALYSIS: ["a\nyes: Ulm"] * 4}
    forest, _ = talk(Opera("opera_tiny", top_k=1), texts, ANN, BOB, expander=twice)
    plans = [i for i, r in enumerate(forest.records) if r.role == PLAN]
    assert len(plans) == 3 and role_rewards(forest) == {}
    forest.reward_N[plans] = [0.4, 0.2, 1.0]
    metrics = described(forest)
    assert metrics["role_reward/plan"] == pytest.approx((2 * 0.4 + 0.2 + 1.0) / 4)
    assert metrics["frac_reward_zero_std/plan"] == 0.5
    assert metrics["actions_per_rollout/plan"] == 1.0 and metrics["role_reward/analysis"] == 0.0


def test_expert_fractions_are_of_roles_in_training():
    """The expert knows one question of two and no sub-goal.

    Actions that another expander forces are not an expert's.
    """
    system = Opera("opera_tiny", top_k=1)
    texts = always(plan="1 a of B", analysis="a\nyes: Ulm", rewrite="c")

    def shares(role, expert):
        groups = Groups(frozenset((role,)), 3, Injection(), expert, frozenset((PLAN,)))
        forest, _ = talk(system, texts, ANN, BOB, expander=groups)
        return expert_fractions(forest, groups, (role, REWRITE))

    def knows_ann(effect, question):
        return "1 b of A" if question == ANN.text and effect.role == PLAN else None

    assert shares(PLAN, knows_ann) == {"expert_frac/plan": 0.5}
    assert shares(ANALYSIS, knows_ann) == {"expert_frac/analysis": 0.0}
    assert shares(PLAN, None) == {}
    forced = play(Tape(always(router="[No Retrieval]")), expander=wide)
    assert expert_fractions(forced, wide, ("router",)) == {}


def test_failed_questions_are_displayed_only_if_any_failed(tmp_path, capsys, monkeypatch):
    """Only the first process writes."""
    plain = {"reward/mean": 0.5, "time/rollout_s": 1.0, "time/train_s": 2.0}
    for is_first in (False, True):
        monkeypatch.setattr(
            "jax_ragrl.training.log.is_process_zero", lambda is_first=is_first: is_first
        )
        log = Log(tmp_path, 0, 2)
        rows = [log.write(i, plain | {"failed": x}, None) for i, x in ((1, 0.0), (2, 3.0))]
        log.close()
        assert [row["failed"] for row in rows] == [0.0, 3.0]
        assert bool(list(tmp_path.iterdir())) == is_first
    first, second = (line for line in capsys.readouterr().out.splitlines() if "reward" in line)
    assert first == "step 1 reward/mean 0.500 time/rollout_s 1.000 time/train_s 2.000"
    assert second.removeprefix("step 2") == f"{first.removeprefix('step 1')} failed 3.000"


def test_metrics_that_are_not_finite_are_valid_json(tmp_path):
    """Other languages than Python read the log, and their JSON has no nan."""
    log = Log(tmp_path, 0, 1)
    log.write(1, {"grad_norm": float("inf"), "loss": float("nan"), "skipped": 1.0}, None)
    log.close()
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    row = json.loads(line, parse_constant=pytest.fail)
    assert row == {"step": 1, "grad_norm": None, "loss": None, "skipped": 1.0}
    scores = {"scores": {"f1": [0.5, float("nan")]}}
    write_json(tmp_path / "trained.json", scores)
    assert json.loads((tmp_path / "trained.json").read_text())["scores"]["f1"] == [0.5, None]


def test_a_resumed_log_holds_each_step_once(tmp_path):
    """The run was killed in the third step, and its newest checkpoint is of the first."""
    files = [tmp_path / name for name in ("metrics.jsonl", "trees.jsonl")]
    for start, last, reward in ((0, 3, 0.25), (1, 2, 0.5)):
        log = Log(tmp_path, start, 3)
        for step in range(start + 1, last + 1):
            log.write(step, {"reward/mean": reward}, [])
        log.close()
        for file in files:
            with file.open("a") as torn:
                torn.write('{"step": 4, "re')
    for file in files:
        rows = [json.loads(line) for line in file.read_text().splitlines()[:-1]]
        assert [row["step"] for row in rows] == [1, 2]
    assert json.loads(files[0].read_text().splitlines()[1])["reward/mean"] == 0.5


def logging_job(guard=MappingProxyType({}), **run):
    settings = {"steps": 4, "save_trees_every": 1, "projects": {}, "patience": 0, "token_budget": 0}
    return SimpleNamespace(run=SimpleNamespace(**settings | run), guard=Guard(**guard))


def test_a_resumed_run_warns_of_missing_records(tmp_path):
    """Every second step has trees; a torn line is a lost record, step 0 is not expected."""
    job = logging_job({"update_kl": Limit(0.03, "warn")}, save_trees_every=2)
    check_records(job, tmp_path, 0)  # a run that begins
    (tmp_path / "trees.jsonl").write_text('{"step": 0}\n{"step": 1}\n{"step": 3}\n')
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    with pytest.warns(UserWarning) as caught:
        check_records(job, tmp_path, 4)
    (warning,) = caught
    assert "metrics.jsonl is damaged: it lacks the records of 1 of 4" in str(warning.message)


@pytest.mark.parametrize(
    ("run", "guard", "reader"),
    [
        ({"patience": 2}, {}, "run.patience"),
        ({"token_budget": 9}, {}, "run.token_budget"),
        ({}, {}, "the guard"),
    ],
)
def test_a_resumed_run_refuses_to_decide_without_its_records(tmp_path, run, guard, reader):
    job = logging_job(guard, **run)
    damaged = '{"step": 1}\n{"st\n{"step": 3}\n'
    (tmp_path / "trees.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n')
    (tmp_path / "metrics.jsonl").write_text(damaged)
    with pytest.raises(UserError, match=f"records of 1 of 3 steps, and .*{reader}.* --from"):
        check_records(job, tmp_path, 3)
    assert (tmp_path / "metrics.jsonl").read_text() == damaged  # to be repaired
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n')
    (tmp_path / "trees.jsonl").unlink()
    with pytest.warns(UserWarning, match=r"trees\.jsonl is damaged"):
        check_records(job, tmp_path, 3)  # no decision reads trees


def test_compilation_takes_time_and_is_unexpected_after_the_first_steps_and_evaluation(monkeypatch):
    spent = iter([10.0, 11.04, 12.5])
    monkeypatch.setattr("jax_ragrl.training.log.compile_seconds", lambda: next(spent))
    clock = Clock()
    clock.lap("time/rollout_s")
    assert clock.laps["time/compile_s"] == 1.0
    clock.lap("time/train_s")
    assert clock.laps["time/compile_s"] == 2.5 and clock.laps["time/train_s"] >= 0
    # Compiled so far: at the start, after each of five steps, and after five more.
    counts = iter([100, 130, 130, 130, 130, 131, 133, 140, 141, 141, 145])
    monkeypatch.setattr("jax_ragrl.training.log.compiled_programs", lambda: next(counts))
    programs = ProgramCounter()
    # The first evaluation ends step 7, the second one step 10.
    rows = [programs.metrics(has_evaluation=step in (7, 10)) for step in range(1, 11)]
    assert [row["compile/programs"] for row in rows] == [30, 0, 0, 0, 1, 2, 7, 1, 0, 4]
    assert [row["compile/unexpected"] for row in rows] == [0, 0, 0, 0, 0, 2, 0, 1, 0, 4]


def test_displayed_metrics_include_every_policy():
    shares = {"valid_frac/b": 1.0, "a/valid_frac/a": 0.5, "invalid_frac/a": 0.25, "valid_frac": 0.0}
    assert matching_keys(shares, ("valid_frac/",)) == ["a/valid_frac/a", "valid_frac/b"]
    several = {"plan/kl/mean": 0.1, "analysis/kl/mean": 0.2, "plan/entropy/old/plan": 1.0}
    assert matching_keys(several, ("kl/mean", "entropy")) == ["analysis/kl/mean", "plan/kl/mean"]
    line = " ".join(format_number(x) for x in (0.0625, 99.9, 937.23, -1234.5))
    assert line == "0.062 99.900 937 -1234"


def test_rewarded_logps_cover_paths_to_rewarded_leaves():
    forest = play(Tape(always(router="[No Retrieval]")), ANN, BOB)
    nodes = np.flatnonzero(~forest.leaf_N).tolist()
    for node, logps in zip(nodes, [(-1.0, -2.0, -3.0), (-7.0,)], strict=True):
        forest.records[node].action = forest.records[node].action._replace(logps=logps)
    for right, expected in (([1, 0], -2.0), ([0, 1], -7.0), ([1, 1], -13 / 4)):
        forest.reward_N[forest.leaf_N] = right
        assert rewarded_logps(forest) == {"logp_rewarded/router": pytest.approx(expected)}
    forest.reward_N[forest.leaf_N] = 0
    assert rewarded_logps(forest) == {}


METRICS = {"reward/mean": 0.5, "time/rollout_s": 1.0, "time/train_s": 2.0}


def stand_in(monkeypatch, name: str) -> Mock:
    """A package that notes the calls of its functions."""
    monkeypatch.setitem(sys.modules, name, package := Mock())
    return package


def test_weights_and_biases_continues_one_run(tmp_path, monkeypatch):
    wandb = stand_in(monkeypatch, "wandb")
    wandb.init.return_value = wandb
    (tmp_path / "config.json").write_text('{"seed": 3}')
    for start in (0, 1):
        log = Log(tmp_path, start, 2, {"wandb_project": "mine"})
        log.write(start + 1, METRICS, None)
        log.close()
    init = wandb.mock_calls[0]
    steps = [[init, call.log(METRICS, step=step), call.finish()] for step in (1, 2)]
    assert wandb.mock_calls == sum(steps, [])
    expected = {"project": "mine", "resume": "allow", "config": {"seed": 3}}
    assert init.kwargs == init.kwargs | expected
    Log(tmp_path, 2, 2).close()
    assert wandb.init.call_count == 2


@pytest.mark.parametrize("key", TRACKERS)
def test_a_missing_package_is_refused_early(key, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert TRACKERS.keys() == Run(1).projects.keys() and not any(Run(1).projects.values())
    with pytest.raises(UserError, match=f"run.{key} is 'mine'.*pip install {TRACKERS[key]}"):
        Run(1, **{key: "mine"})


def test_mlflow_continues_one_run_and_gets_no_nan(tmp_path, monkeypatch):
    mlflow = stand_in(monkeypatch, "mlflow")
    mlflow.start_run.return_value.info.run_id = "abc"
    (tmp_path / "config.json").write_text('{"seed": 3}')
    for step in (1, 2):
        trackers = Trackers({"mlflow_experiment": "mine"}, tmp_path)
        trackers.log({"a": 1.0, "b": math.nan}, step)
        trackers.finish()
    first = [call.start_run(run_name=tmp_path.name), call.log_dict({"seed": 3}, "config.json")]
    expected = []
    for step, start in ((1, first), (2, [call.start_run(run_id="abc")])):
        expected += [call.set_experiment("mine"), *start]
        expected += [call.log_metrics({"a": 1.0}, step=step), call.end_run()]
    assert mlflow.mock_calls == expected


def test_trackio_continues_the_run_of_its_name(tmp_path, monkeypatch):
    trackio = stand_in(monkeypatch, "trackio")
    trackers = Trackers({"trackio_project": "mine", "wandb_project": ""}, tmp_path)
    trackers.log(METRICS, 4)
    trackers.finish()
    expected = {"project": "mine", "name": tmp_path.name, "config": None, "resume": "allow"}
    assert trackio.mock_calls == [call.init(**expected), call.log(METRICS, step=4), call.finish()]


@pytest.mark.parametrize("broken", ["init", "log", "finish"])
def test_a_tracker_that_fails_ends_no_run_and_warns_once(broken, tmp_path, monkeypatch):
    error = ConnectionError("no route to https://user:secret@tracker")
    getattr(stand_in(monkeypatch, "trackio"), broken).side_effect = error
    with pytest.warns(UserWarning, match="run.trackio_project: trackio failed") as warnings:
        log = Log(tmp_path, 0, 2, {"trackio_project": "mine"})
        log.write(1, METRICS, None)
        log.write(2, METRICS, None)
        log.close()
    assert len(warnings) == 1 and "secret" not in str(warnings[0].message)
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
