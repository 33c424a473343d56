"""Claims of the papers: complete, loadable, and decided by pairs of arms and by tests."""

import dataclasses
import json
import pathlib
import sys
from typing import Any

import numpy as np
import pytest

from jax_ragrl.cli.common import parse_ranges
from jax_ragrl.cli.main import main
from jax_ragrl.corpus.questions import fingerprint
from jax_ragrl.corpus.world import generate
from jax_ragrl.errors import UserError
from jax_ragrl.experiments import claims as module
from jax_ragrl.experiments.arms import Arm, Cell, cell_values, cells_of, with_training_arms
from jax_ragrl.experiments.claims import (
    OPEN,
    Claim,
    arm_key,
    count_unfinished,
    decide,
    experiment_of,
    load_claims,
    load_results,
    reproduce,
    weaker,
)
from jax_ragrl.experiments.pairs import DIFFERS, FAILS, HOLDS, NOT_LOWER, UNDECIDED, Pair
from jax_ragrl.experiments.stages import fixed_strategy
from jax_ragrl.run.load import load_job
from jax_ragrl.run.overrides import load_config
from jax_ragrl.systems.mao_arag import USUAL_PLANS, render_plan

ROOT = pathlib.Path(__file__).parents[2]
CLAIMS = load_claims()
FIRST, SECOND = Arm("a.py"), Arm("a.py", ("run.steps=0",))


def claim(**changes: Any) -> Claim:
    fields = {"arms": {"new": FIRST, "old": SECOND}, "pairs": (Pair("new", "old"),)}
    return Claim(1, "New is better.", "section 1", **(fields | changes))


def rows_of(first: float, second: float) -> dict[Cell, dict[str, Any]]:
    """Scores of 100 questions and three seeds around two means."""
    rng = np.random.default_rng(0)
    return {
        Cell(arm_key(arm), seed, 0, 0): {
            "questions": "same",
            "scores": {"f1": (mean + 0.01 * rng.standard_normal(100)).tolist()},
            "totals": {},
        }
        for seed in range(3)
        for arm, mean in ((FIRST, first), (SECOND, second))
    }


@pytest.mark.parametrize("number", [c.number for c in CLAIMS if c.arms])
def test_the_arms_of_a_claim_are_valid_configs(number, tmp_path):
    experiment = with_training_arms(experiment_of(CLAIMS[number - 1], (0,), 100))
    for cell in cells_of(experiment):
        arm = experiment.arms[cell.arm]
        job = load_job(cell_values(experiment, cell, tmp_path) | {"policy": "tiny"})
        assert not arm.strategy or fixed_strategy(job, arm.strategy)
        for file in filter(None, (arm.sft, arm.warm_up)):
            assert load_config(ROOT / file, [])


def world_of(experiment, arm, folder) -> dict:
    """The settings of the world of an arm, but for the knowledge of the reader."""
    world = cell_values(experiment, Cell(arm_key(arm), 0, 100, 0), folder)["data"]["world"]
    return {key: value for key, value in world.items() if key != "famous_fraction"}


def test_arms_of_a_pair_answer_the_same_questions(tmp_path):
    """Their worlds differ at most in the knowledge of the reader, which changes no question."""
    for one in (c for c in CLAIMS if c.arms):
        experiment = experiment_of(one, (0,), 100)
        for pair in one.pairs:
            first, second = (
                world_of(experiment, one.arms[name], tmp_path) for name in (pair.first, pair.second)
            )
            assert first == second, one.number
    for changed in ((), ("mayor", "seat")):
        worlds = (generate(100, 60, famous=x, outdated_relations=changed) for x in (0.1, 0.9))
        one, other = (fingerprint(world.questions["test"]) for world in worlds)
        assert one == other


def test_the_arms_of_a_single_agent_and_of_a_planner_are_those_of_the_papers(
    tmp_path,
):
    arms = CLAIMS[12].arms
    experiment = experiment_of(CLAIMS[12], (0,), 100)
    jobs = {
        name: load_job(
            cell_values(experiment, Cell(arm_key(arm), 0, 100, 0), tmp_path) | {"policy": "tiny"}
        )
        for name, arm in arms.items()
    }
    single, hierarchy = jobs["single agent"], jobs["hierarchy"]
    assert single.objective == hierarchy.objective
    # Neither has a critic.
    assert dataclasses.replace(single.optimizer, value_lr=0.0) == hierarchy.optimizer
    assert single.recipe.rollouts == hierarchy.recipe.rollouts
    assert single.run.questions_per_step == hierarchy.run.questions_per_step
    strategies = {arm.strategy for arm in CLAIMS[18].arms.values()} - {""}
    assert strategies == {render_plan(plan) for plan in USUAL_PLANS}


@pytest.mark.parametrize("name", sorted({test for c in CLAIMS for test in c.tests}))
def test_the_tests_of_a_claim_exist(name):
    file, _, function = name.partition("::")
    assert f"def {function}(" in (ROOT / file).read_text(encoding="utf-8")


def test_one_reversed_pair_is_enough_to_contradict_a_claim():
    both = claim(pairs=(Pair("new", "old"), Pair("old", "new")))
    assert decide(both, rows_of(0.6, 0.4))["verdict"] == FAILS


@pytest.mark.parametrize(
    ("pair", "first", "expected"),
    [
        (Pair("new", "old", kind=NOT_LOWER, margin=2.0), 0.495, HOLDS),
        (Pair("new", "old", kind=NOT_LOWER, margin=2.0), 0.45, FAILS),
        (Pair("new", "old", kind=NOT_LOWER, margin=2.0), 0.48, UNDECIDED),
        (Pair("new", "old", kind=DIFFERS, margin=2.0), 0.52, HOLDS),
        (Pair("new", "old", kind=DIFFERS, margin=2.0), 0.48, HOLDS),
        (Pair("new", "old", kind=DIFFERS, margin=2.0), 0.5, FAILS),
        (Pair("new", "old", kind=DIFFERS), 0.5, UNDECIDED),
        (Pair("new", "old", margin=2.0), 0.52, HOLDS),
        (Pair("new", "old", margin=2.0), 0.5, FAILS),
        (Pair("new", "old", margin=0.1), 0.5, UNDECIDED),
        (Pair("new", "old"), 0.5, UNDECIDED),
        (Pair("new", "old"), 0.6, HOLDS),
        (Pair("new", "old"), 0.4, FAILS),
    ],
)
def test_margins_decide_what_is_not_lower_and_what_is_equal(pair, first, expected):
    (result,) = decide(claim(pairs=(pair,)), rows_of(first, 0.5))["pairs"]
    assert result["verdict"] == expected and result["ci95"][0] < result["ci95"][1]


def test_equal_arms_of_several_claims_are_trained_once(tmp_path):
    again = claim(
        arms={"other name": FIRST, "third": Arm("b.py")}, pairs=(Pair("other name", "third"),)
    )
    assert count_unfinished([claim(), again], tmp_path, (0, 1), 100) == (3 * 2, 0)
    cell = tmp_path / "cells" / Cell(arm_key(FIRST), 0, 100, 0).folder / "cell.json"
    cell.parent.mkdir(parents=True)
    cell.write_text("{}")
    other = claim(arms={"new": FIRST, "old": Arm("a.py", strategy="Planning")})
    assert count_unfinished([other], tmp_path, (0, 1), 100) == (1, 2)
    assert count_unfinished([claim(), again], tmp_path, (0, 1), 100) == (3 * 2 - 1, 0)


@pytest.mark.parametrize(
    ("verdict", "proof", "both"),
    [
        (OPEN, HOLDS, HOLDS),
        (OPEN, FAILS, FAILS),
        (HOLDS, FAILS, FAILS),
        (UNDECIDED, HOLDS, UNDECIDED),
        (HOLDS, OPEN, HOLDS),
    ],
)
def test_experiment_and_tests_decide_together(verdict, proof, both):
    assert weaker(verdict, proof) == both


def test_results_are_written_after_each_claim_and_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "run_cells", lambda *_: rows_of(0.6, 0.4))
    monkeypatch.setattr(module, "prove", lambda tests: FAILS)
    proven = Claim(2, "It follows.", "equation 1", tests=("tests/a.py::test_b",))
    unknown = Claim(3, "It is so.", "section 2", missing="no command")
    results = reproduce([claim(), proven, unknown], tmp_path / "new", (0, 1, 2), 0)
    assert [row["verdict"] for row in results] == [HOLDS, FAILS, OPEN]
    assert json.loads((tmp_path / "new" / "claims.json").read_text()) == results
    page = (tmp_path / "new" / "claims.md").read_text()
    assert "new over old" in page and "no command" in page and "`tests/a.py::test_b`" in page

    def prove(tests):
        reproduce([unknown], tmp_path, (0,), 0)  # another call, which ends during this one
        return HOLDS

    monkeypatch.setattr(module, "prove", prove)
    second, first = (
        Claim(number, "It follows.", "equation 1", tests=("tests/a.py::test_b",))
        for number in (2, 1)
    )
    for one in (second, first, second):
        assert [row["number"] for row in reproduce([one], tmp_path, (0,), 0)] == [one.number]
    assert [row["number"] for row in load_results(tmp_path / "claims.json")] == [1, 2, 3]


@pytest.mark.slow
def test_a_failing_test_contradicts_a_claim_and_one_that_cannot_run_does_not(tmp_path, monkeypatch):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_a.py").write_text(
        "def test_b(): pass\ndef test_c(): assert False\n"
    )
    monkeypatch.setattr(module, "CONFIGS", tmp_path / "configs")
    assert module.prove(["tests/test_a.py::test_b"]) == HOLDS
    assert module.prove(["tests/test_a.py::test_b", "tests/test_a.py::test_c"]) == FAILS
    monkeypatch.setattr(module, "CONFIGS", tmp_path / "elsewhere" / "configs")
    assert module.prove(["tests/test_a.py::test_b"]) == OPEN
    (tmp_path / "tests" / "test_a.py").write_text("import absent_package\n")
    monkeypatch.setattr(module, "CONFIGS", tmp_path / "configs")
    with pytest.raises(UserError, match="could not run tests/b.py .exit code 4: ERROR: .*b.py"):
        module.prove(["tests/b.py"])
    with pytest.raises(UserError, match=r"exit code 2: ERROR .*test_a.py.*: run '.*-m pytest"):
        module.prove(["tests/test_a.py"])
    monkeypatch.setattr(module, "run_cells", None)  # the error comes before the experiments
    with (
        monkeypatch.context() as patch,
        pytest.raises(UserError, match=r"pytest is not installed, .*\[test\]"),
    ):
        patch.setitem(sys.modules, "pytest", None)
        reproduce([claim(tests=("tests/a.py::test_b",))], tmp_path / "out", (0,), 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pairs": (Pair("new", "none"),)}, "no arm 'none'"),
        ({"pairs": ()}, "give pairs of arms, tests, or what is missing"),
    ],
)
def test_a_claim_without_a_way_to_decide_it_is_refused(changes, message):
    with pytest.raises(UserError, match=message):
        claim(**changes)


def test_numbers_and_ranges():
    assert parse_ranges("1,6-9") == {1, 6, 7, 8, 9}
    for wrong in ("", "a", "1-", "-2", "1,,2"):
        with pytest.raises(UserError, match="is not a list of numbers"):
            parse_ranges(wrong)


def test_a_dry_run_counts_the_trainings(tmp_path, capsys):
    out = ["--out", str(tmp_path / "out"), "--dry-run"]
    assert main(["experiment", "reproduce", "--claims=1,6", "--training-seeds=0,1", *out]) == 0
    assert capsys.readouterr().out == "2 claims, 4 trainings and 0 further evaluations to do\n"
    assert main(["experiment", "reproduce", "--claims=40", *out]) == 2
    assert "there is no claim 40: use 1 to 31" in capsys.readouterr().err
