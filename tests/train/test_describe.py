"""What a run logs of its rollouts."""

from __future__ import annotations

import dataclasses
import json
import sys
import types

import numpy as np
import pytest

from jax_ragrl.errors import EffectError, UserError
from jax_ragrl.rollout.expand import Branching, Forced
from jax_ragrl.run.config import Run
from jax_ragrl.runtime.jsonl import write_json
from jax_ragrl.systems.opera.grammar import ANALYSIS, PLAN, REWRITE
from jax_ragrl.systems.opera.mapgrpo import Groups, Injection
from jax_ragrl.systems.opera.system import Opera
from jax_ragrl.train.log import Clock, Log, number, open_log, told
from jax_ragrl.train.rollout_metrics import (
    counts,
    describe,
    expert_shares,
    found_gold,
    own_rewards,
    right_logps,
    zero_variance,
)
from jax_ragrl.types import Question
from tests.rollout.tape import ANN, BOB, Tape, passage, play
from tests.systems.talk import talk


def always(**texts: str):
    """A policy whose roles always write the same."""
    return lambda role, prompt, rng: texts[role]


def wide(effect, question) -> Branching:
    """A forced route beside eight samples; one action elsewhere."""
    if effect.role != "router":
        return Branching(1)
    return Branching(8, (Forced("[No Retrieval]"),))


def test_the_valid_share_is_of_samples_as_often_as_they_were_written():
    """Six good routes, and a bad one twice; the forced one is nobody's merit."""
    texts = {"router": ["[No Retrieval]"] * 6 + ["nonsense"] * 2}
    forest = play(Tape(texts), expander=wide)
    seen = describe(forest, np.zeros(len(forest.records)))
    assert forest.multiplicity_N[~forest.leaf_N].sum() == 9
    assert seen["malformed/Invalid Format"] == 2 and seen["dead/Invalid Format"] == 1
    assert seen["valid_frac/router"] == 6 / 8


def test_a_step_of_which_every_question_failed_says_no_more_than_that():
    down = EffectError("down")
    tape = Tape(always(router="[No Retrieval]"), told={"answer_direct": down})
    seen = describe(play(tape, ANN, BOB), np.zeros(0))
    assert seen == {"reward/mean": 0.0, "nodes": 0.0, "leaves": 0.0, "failed": 2.0}


def test_the_size_of_a_step_and_what_its_strategies_earned_and_asked():
    """A route that is answered, and one that is nonsense; the other question failed."""
    told = {"answer_direct": lambda r: "Ulm" if "Ann" in str(r.messages) else EffectError("down")}
    tape = Tape(lambda role, prompt, rng: "[No Retrieval]", told=told)
    forest = play(tape, ANN, BOB)
    seen = describe(forest._replace(reward_N=forest.leaf_N.astype(np.float32)), np.zeros(2))
    assert [seen[x] for x in ("nodes", "leaves", "failed", "actions/router")] == [1, 1, 1, 1]
    assert seen["reward/No Retrieval"] == seen["reward/mean"] == seen["llm_calls"] == 1


def test_gold_of_questions_that_failed_is_not_missed():
    golden = [dataclasses.replace(q, gold=("p1",)) for q in (ANN, BOB)]
    told = {"answer": lambda r: "Ulm" if "Ann" in str(r.messages) else EffectError("down")}
    texts = always(router="[Retrieval] x", filter="Thought: t\nAction: [1]")
    forest = play(Tape(texts, {"x": [passage(1)]}, told), *golden)
    assert forest.failed == (1,) and found_gold(forest) == {"retrieval/recall": 1.0}


def test_an_action_that_ends_a_rollout_is_not_valid_though_it_parses():
    forest = play(Tape(always(router="[Retrieval] Ann", filter="Thought: t\nAction: [1, 7]")))
    seen = describe(forest, np.zeros(len(forest.records)))
    assert (seen["valid_frac/router"], seen["valid_frac/filter"]) == (1, 0)


def test_credit_is_that_of_trained_actions():
    forest = play(Tape(always(router="[No Retrieval]")), ANN, BOB)
    known_N = np.where(forest.question_N == 0, 0.5, np.nan)
    assert describe(forest, known_N)["credit/router"] == 0.5
    assert "credit/router" not in describe(forest, known_N * np.nan)


def test_gold_passages_are_named_by_title_or_id():
    gold = Question("q", "Where was Ann born?", ("Ulm",), gold=("title 1", "p2"))
    texts = always(router="[Retrieval] Ann", filter="Thought: t\nAction: [1]")
    forest = play(Tape(texts, {"Ann": [passage(1), passage(2)]}), gold)
    assert found_gold(forest) == {"retrieval/recall": 1.0}
    forest = play(Tape(texts, {"Ann": [passage(2), passage(3)]}), gold)
    assert found_gold(forest) == {"retrieval/recall": 0.5}
    plain = dataclasses.replace(gold, gold=())
    assert found_gold(play(Tape(texts, {"Ann": [passage(2)]}), plain)) == {}


def test_what_a_state_put_right_is_counted():
    texts = always(router="[Retrieval] Ann", filter="Thought: t\nAction: [1, 7]")
    assert counts(play(Tape(texts), strict=False)) == {"malformed/Hallucinate Document Idx": 1.0}
    assert counts(play(Tape(texts))) == {"dead/Hallucinate Document Idx": 1.0}


def test_questions_whose_leaves_earned_the_same_are_counted():
    forest = play(Tape(always(router="[No Retrieval]")), ANN, BOB)
    leaf_N = forest.leaf_N
    assert zero_variance(forest) == {}, "one leaf is compared with nothing"
    twins = play(Tape({"router": ["[No Retrieval]", "nonsense"] * 2}), ANN, BOB,
                 expander=lambda effect, question: Branching(2))  # fmt: skip
    rewards = twins._replace(reward_N=np.arange(len(twins.records)) * twins.leaf_N)
    equal = twins._replace(reward_N=twins.leaf_N.astype(np.float32))
    assert zero_variance(equal) == {"zero_variance_frac": 1.0}
    assert zero_variance(rewards) == {"zero_variance_frac": 0.0} and leaf_N.any()


def test_a_role_shows_what_its_samples_earned_themselves_and_how_many_groups_are_of_equals():
    """Two questions with two plans each: of the first both are 0.4, of the second 0.2 and 1."""
    twice = Groups(frozenset((PLAN,)), 2, Injection("off"), None, frozenset((PLAN,)))
    texts = {PLAN: ["1 a", "1 a", "1 c", "1 d"], ANALYSIS: ["a\nyes: Ulm"] * 4}
    forest, _ = talk(Opera("opera_tiny", top_k=1), texts, ANN, BOB, expander=twice)
    plans = [i for i, r in enumerate(forest.records) if r.role == PLAN]
    assert len(plans) == 3 and own_rewards(forest) == {}
    forest.reward_N[plans] = [0.4, 0.2, 1.0]
    seen = describe(forest, np.zeros(len(forest.records)))
    assert seen["earned/plan"] == pytest.approx((2 * 0.4 + 0.2 + 1.0) / 4)
    assert seen["zero_variance_frac/plan"] == 0.5
    assert seen["actions/plan"] == 1.0 and seen["earned/analysis"] == 0.0


def test_the_share_of_decisions_with_an_expert_is_of_the_roles_in_training():
    """The expert knows one question of two, and no sub-goal of either. Of another expander's forced
    actions none is an expert's."""
    system = Opera("opera_tiny", top_k=1)
    texts = always(plan="1 a of B", analysis="a\nyes: Ulm", rewrite="c")

    def shares(role, expert):
        groups = Groups(frozenset((role,)), 3, Injection(), expert, frozenset((PLAN,)))
        forest, _ = talk(system, texts, ANN, BOB, expander=groups)
        return expert_shares(forest, groups, (role, REWRITE))

    def knows_ann(effect, question):
        return "1 b of A" if question == ANN.text and effect.role == PLAN else None

    assert shares(PLAN, knows_ann) == {"expert_frac/plan": 0.5}
    assert shares(ANALYSIS, knows_ann) == {"expert_frac/analysis": 0.0}
    assert shares(PLAN, None) == {}
    forced = play(Tape(always(router="[No Retrieval]")), expander=wide)
    assert expert_shares(forced, wide, ("router",)) == {}


def test_a_step_is_told_in_one_line_of_several_policies_too():
    assert told({"kl/mean": 0.1, "entropy": 1.0, "entropy/old/mean": 1.0}, ("entropy", "mfu")) == [
        "entropy"
    ]
    several = {"plan/kl/mean": 0.1, "analysis/kl/mean": 0.2, "plan/entropy/old/plan": 1.0}
    assert told(several, ("kl/mean", "entropy")) == ["analysis/kl/mean", "plan/kl/mean"]


def test_the_terms_of_a_reward_are_means_over_leaves():
    forest = play(Tape(always(router="[No Retrieval]")), ANN, BOB)
    leaves = np.flatnonzero(forest.leaf_N)
    format_N = np.full(len(forest.records), 9.0)
    format_N[leaves] = [1.0, 0.5]
    none_N = np.full(len(forest.records), np.nan)
    assert describe(forest, none_N, lambda _: {"format": format_N})["reward/format"] == 0.75
    assert "reward/format" not in describe(forest, none_N)


def test_questions_that_failed_are_shown_with_a_step_and_none_where_none_did(tmp_path, capsys):
    log = Log(tmp_path, 0, 2)
    plain = {"reward/mean": 0.5, "time/rollout_s": 1.0, "time/train_s": 2.0}
    log.write(1, plain | {"failed": 0.0}, None)
    log.write(2, plain | {"failed": 3.0}, None)
    log.close()
    first, second = (line for line in capsys.readouterr().out.splitlines() if "reward" in line)
    assert first == "step 1 reward/mean 0.500 time/rollout_s 1.000 time/train_s 2.000"
    assert second.removeprefix("step 2") == f"{first.removeprefix('step 1')} failed 3.000"


def test_skipped_optimizer_steps_are_shown_on_the_line_of_a_step(tmp_path, capsys):
    log = Log(tmp_path, 0, 2)
    log.write(1, {"reward/mean": 0.5, "skipped": 0.0}, None)
    log.write(2, {"reward/mean": 0.5, "skipped": 3.0}, None)
    log.close()
    first, second = (line for line in capsys.readouterr().out.splitlines() if "reward" in line)
    assert "skipped" not in first and second.endswith("skipped 3.000")


def test_a_row_of_metrics_is_json_where_one_is_no_number(tmp_path):
    """A gradient that was not finite is skipped and logged, and others than Python read it."""
    log = Log(tmp_path, 0, 1)
    log.write(1, {"grad_norm": float("inf"), "loss": float("nan"), "skipped": 1.0}, None)
    log.close()
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    found = json.loads(line, parse_constant=pytest.fail)
    assert found == {"step": 1, "grad_norm": None, "loss": None, "skipped": 1.0}
    scores = {"scores": {"f1": [0.5, float("nan")]}}
    write_json(tmp_path / "trained.json", scores)
    assert json.loads((tmp_path / "trained.json").read_text())["scores"]["f1"] == [0.5, None]


def test_a_log_that_goes_on_holds_each_step_once(tmp_path):
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


def test_one_process_writes_a_log(tmp_path, monkeypatch):
    monkeypatch.setattr("jax_ragrl.train.log.first", lambda: False)
    silent = open_log(tmp_path, 0, 1, "")
    silent.write(1, {"reward/mean": 0.5}, None)
    silent.close()
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    open_log(tmp_path, 0, 1, "").close()
    assert list(tmp_path.iterdir()) != []


def test_a_clock_tells_what_of_a_step_went_into_compiling(monkeypatch):
    spent = iter([10.0, 11.04, 12.5])
    monkeypatch.setattr("jax_ragrl.train.log.compile_seconds", lambda: next(spent))
    clock = Clock()
    clock.lap("time/rollout_s")
    assert clock.laps["time/compile_s"] == 1.0
    clock.lap("time/train_s")
    assert clock.laps["time/compile_s"] == 2.5 and clock.laps["time/train_s"] >= 0


def test_a_step_shows_each_roles_valid_share_of_each_policy_and_large_numbers_whole():
    shares = {"valid_frac/b": 1.0, "a/valid_frac/a": 0.5, "invalid_frac/a": 0.25, "valid_frac": 0.0}
    assert told(shares, ("valid_frac/",)) == ["a/valid_frac/a", "valid_frac/b"]
    shown = " ".join(number(x) for x in (0.0625, 99.9, 937.23, -1234.5))
    assert shown == "0.062 99.900 937 -1234"


def test_weights_and_biases_is_told_the_metrics_of_one_run_however_often_it_is_begun(
    tmp_path, monkeypatch
):
    opened, told_of = [], []
    run = types.SimpleNamespace(
        log=lambda metrics, step: told_of.append((step, metrics)),
        finish=lambda: told_of.append("end"),
    )
    stand_in = types.ModuleType("wandb")
    stand_in.init = lambda **given: opened.append(given) or run
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    (tmp_path / "config.json").write_text('{"seed": 3}')
    metrics = {"reward/mean": 0.5, "time/rollout_s": 1.0, "time/train_s": 2.0}
    for start in (0, 1):
        log = Log(tmp_path, start, 2, "mine")
        log.write(start + 1, metrics, None)
        log.close()
    assert told_of == [(1, metrics), "end", (2, metrics), "end"] and opened[0] == opened[1]
    assert opened[0]["resume"] == "allow" and opened[0]["project"] == "mine"
    assert opened[0]["config"] == {"seed": 3}
    Log(tmp_path, 2, 2).close()
    assert len(opened) == 2


def test_weights_and_biases_that_is_not_installed_is_missed_before_anything_is_read(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert Run(1).wandb == ""
    with pytest.raises(UserError, match="run.wandb is 'mine'.*pip install wandb"):
        Run(1, wandb="mine")


def test_the_log_probability_of_what_is_right_is_of_the_way_to_leaves_that_earned():
    forest = play(Tape(always(router="[No Retrieval]")), ANN, BOB)
    nodes = np.flatnonzero(~forest.leaf_N).tolist()
    for node, logps in zip(nodes, [(-1.0, -2.0, -3.0), (-7.0,)], strict=True):
        forest.records[node].action = forest.records[node].action._replace(logps=logps)
    for right, expected in (([1, 0], -2.0), ([0, 1], -7.0), ([1, 1], -13 / 4)):
        forest.reward_N[forest.leaf_N] = right
        assert right_logps(forest) == {"logp_right/router": pytest.approx(expected)}
    forest.reward_N[forest.leaf_N] = 0
    assert right_logps(forest) == {}
