"""A run over a mesh equals the run on one device."""

import pathlib

import pytest

from jax_ragrl.cli.main import load_config
from jax_ragrl.run.build import build_components
from jax_ragrl.run.load import load_job
from jax_ragrl.runtime.sharding import mesh_of
from jax_ragrl.training.loop import train
from tests.chaos.runs import CONFIG, SMALL
from tests.learner.metric_rows import assert_equal_metrics, metric_rows
from tests.tiny import saved_policy


def run(workdir: pathlib.Path, folder: pathlib.Path, mesh: str) -> pathlib.Path:
    settings = {**SMALL, "run.steps": 2, "policy": folder, "mesh": mesh}
    overrides = [f"--config.{key}={value}" for key, value in settings.items()]
    values = load_config(CONFIG, overrides)
    job = load_job(values | {"llm": {"kind": "local", "model": str(folder)}})
    parts = build_components(job, workdir)
    assert (mesh_of(parts.policies["policy"].params()) is None) == (mesh == "()")
    train(job, parts, workdir)
    return workdir


@pytest.mark.slow
def test_a_run_over_a_mesh_equals_a_run_on_one_device(tmp_path):
    """Policy, critic, reference and the frozen language model are split over eight devices."""
    folder = saved_policy(tmp_path)
    alone = run(tmp_path / "alone", folder, "()")
    spread = run(tmp_path / "spread", folder, "(2, 2, 2)")
    assert [row["step"] for row in metric_rows(alone)] == [0, 1, 2]
    assert_equal_metrics(alone, spread)
