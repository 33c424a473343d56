"""A run over a mesh is the run of one device."""

from __future__ import annotations

import json
import pathlib

import numpy as np
import pytest
from flax import nnx

from jax_ragrl.cli import CONFIGS, load_config
from jax_ragrl.models.hf import save_decoder
from jax_ragrl.sharding import mesh_of
from jax_ragrl.train.assemble import assemble
from jax_ragrl.train.job import load_job
from jax_ragrl.train.loop import train
from tests.tiny import policy, tokenizer

SMALL = {
    "data.world.size": 40,
    "run.steps": 2,
    "run.questions": 2,
    "run.save_every": 1,
    "run.eval_every": 2,
    "run.dev_questions": 2,
    "layout.tokens": 1024,
}


def metrics_of(workdir: pathlib.Path, folder: pathlib.Path, mesh: str) -> list[dict[str, float]]:
    given = {**SMALL, "policy": folder, "mesh": mesh}
    overrides = [f"--config.{key}={value}" for key, value in given.items()]
    values = load_config(CONFIGS / "tiny" / "c3po.py", overrides)
    job = load_job(values | {"llm": {"kind": "local", "model": str(folder)}})
    parts = assemble(job, workdir)
    assert (mesh_of(parts.policies["policy"].params()) is None) == (mesh == "()")
    train(job, parts, workdir)
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_run_over_a_mesh_asks_writes_and_learns_what_a_run_on_one_device_does(
    tmp_path: pathlib.Path,
):
    """The policy, its critic and reference, and the frozen language model over eight devices."""
    tokenizer().save(tmp_path / "tokenizer")
    folder = save_decoder(nnx.merge(*policy()), tmp_path / "policy", tmp_path / "tokenizer")
    alone = metrics_of(tmp_path / "alone", folder, "()")
    spread = metrics_of(tmp_path / "spread", folder, "(2, 2, 2)")
    assert len(alone) == 2
    for one, other in zip(alone, spread, strict=True):
        assert one.keys() == other.keys()
        for name in one.keys() - {"tokens_per_sec", "time/rollout_s", "time/train_s"}:
            np.testing.assert_allclose(other[name], one[name], rtol=1e-3, atol=1e-4, err_msg=name)
