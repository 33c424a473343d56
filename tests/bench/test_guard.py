"""The replay of the guard over finished runs counts the collapses that it sees."""

from __future__ import annotations

import json
import pathlib

import pytest

from jax_ragrl.bench.guard import bench_guard, parse_thresholds, replay, with_thresholds
from jax_ragrl.cli.main import main
from jax_ragrl.errors import UserError
from jax_ragrl.run.guards import Guard
from jax_ragrl.runtime.jsonl import write_rows


@pytest.fixture
def runs(tmp_path: pathlib.Path) -> dict[str, pathlib.Path]:
    """A run whose divergence climbs, one whose gradient explodes, and one without an incident."""
    climbing = [0.1 * step for step in range(20)]
    norms = [1.0] * 15 + [50.0] * 5
    logs = {
        "climbing": [{"kl/mean": x, "grad_norm": 1.0} for x in climbing],
        "exploding": [{"kl/mean": 0.1, "grad_norm": x} for x in norms],
        "healthy": [{"kl/mean": 0.1, "grad_norm": 2.0}] * 20,
    }
    for name, rows in logs.items():
        (tmp_path / name).mkdir()
        numbered = ({"step": step, **row} for step, row in enumerate(rows, start=1))
        write_rows(tmp_path / name / "metrics.jsonl", numbered)
    return {name: tmp_path / name for name in logs}


def test_seen_and_missed_collapses_and_false_alarms_are_counted(runs, capsys):
    arguments = ["--collapsed", str(runs["climbing"]), str(runs["exploding"])]
    arguments += ["--healthy", str(runs["healthy"]), "--thresholds", "grad_norm=60"]
    assert main(["bench", "guard", *arguments, "--json"]) == 0
    table = json.loads(capsys.readouterr().out)
    counts = table["runs_with_incident"]
    assert counts["any"] == counts["kl"] == {"collapsed": 1, "healthy": 0}
    assert counts["grad_norm"] == {"collapsed": 0, "healthy": 0}
    assert [run["first_incident"] for run in table["runs"]] == [{"kl": 14}, {}, {}]
    assert table["thresholds"]["grad_norm"] == 60 and table["thresholds"]["kl"] == 1


def test_extremes_tell_how_close_a_run_came(runs):
    table = bench_guard([runs["climbing"], runs["exploding"]], [runs["healthy"]], {})
    extremes = [run["extremes"] for run in table["runs"]]
    assert [x["kl"] for x in extremes] == [1.9, 0.1, 0.1]
    assert [x["grad_norm"] for x in extremes] == [1.0, 50.0, 1.0]


def test_actions_are_replayed_as_warnings():
    guard = with_thresholds(Guard(kl=Guard().kl.__class__(1.0, "stop")), {"kl": 2.0})
    rows = [{"step": step, "kl/mean": 3.0 * (step > 5)} for step in range(1, 30)]
    assert guard.kl.threshold == 2.0 and replay(guard, rows)["first_incident"] == {"kl": 8}


@pytest.mark.parametrize("text", ["kl", "kl=", "kl=-1", "kl=nan", "kl=much"])
def test_a_threshold_needs_a_number_above_zero(text: str):
    with pytest.raises(UserError, match="--thresholds kl.*such as kl=0.5"):
        parse_thresholds([text])


def test_an_unknown_indicator_and_a_folder_without_metrics_are_named(tmp_path: pathlib.Path):
    with pytest.raises(UserError, match=r"indicator kll is unknown: use some of logp_rewarded"):
        bench_guard([], [], {"kll": 1.0})
    with pytest.raises(UserError, match=r"metrics\.jsonl has no metrics"):
        bench_guard([tmp_path], [], {})
