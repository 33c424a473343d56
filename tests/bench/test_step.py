"""The times of the step benchmark; no test asserts a duration."""

import dataclasses
from typing import NamedTuple

import jax
import pytest

from jax_ragrl.bench.step import _mean_busy_seconds, bench_step, initial_policies, union_length
from jax_ragrl.cli.main import CONFIGS
from jax_ragrl.errors import UserError
from jax_ragrl.models.lora import LoRAConfig
from jax_ragrl.models.published import published_config
from jax_ragrl.run.config import Job
from jax_ragrl.run.load import load_job
from jax_ragrl.run.models import load_policies
from jax_ragrl.run.overrides import load_config
from jax_ragrl.run.parts import Components


class Event(NamedTuple):
    start_ns: float
    duration_ns: float


class Line(NamedTuple):
    name: str
    events: tuple


class Plane(NamedTuple):
    lines: tuple


def test_overlapping_intervals_count_once_and_busy_seconds_are_a_mean_over_devices():
    assert union_length([(5, 7), (0, 2), (1, 3), (6, 6.5)]) == 5
    assert union_length([]) == 0
    streams = (Line("Stream #1", (Event(0, 3e9),)), Line("Stream #2", (Event(1e9, 3e9),)))
    steps = Line("Steps", (Event(0, 100e9),))
    tpu = Plane((Line("XLA Ops", (Event(0, 2e9),)), steps))
    assert _mean_busy_seconds([Plane((*streams, steps)), tpu, Plane((steps,))]) == pytest.approx(
        3.0
    )


def job_with(**changes) -> Job:
    return dataclasses.replace(load_job(load_config(CONFIGS / "tiny" / "c3po.py", [])), **changes)


def components_of(job: Job, **fields) -> Components:
    """The policies and the tokenizer of a run, without retriever and language model."""
    policies, tokenizer = load_policies(job, None)
    return Components({}, None, None, policies, tokenizer, **fields)


def test_random_policies_are_those_of_the_config():
    """Adapters alone are trained, on a base in the compute dtype, with the kernel of the config."""
    job = job_with(lora=LoRAConfig(rank=2), compute_dtype="bfloat16", attention="xla")
    (policy,) = initial_policies(job, components_of(job), published_config("tiny")).values()
    trained = jax.tree_util.tree_leaves_with_path(policy.state.policy.params)
    assert trained and all("_lora_" in jax.tree_util.keystr(path) for path, _ in trained)
    model = policy.spec.policy.with_params(policy.state.policy.params).merge()
    assert model.embed[...].dtype == "bfloat16" and model.config.attention_impl == "xla"


def test_stale_rollouts_are_not_measured_as_fresh_ones(tmp_path):
    run = dataclasses.replace(job_with().run, staleness=1)
    objective = dataclasses.replace(job_with().objective, importance_weight_cap=2.0)
    with pytest.raises(UserError, match="staleness is 1.*set it to 0.*overlap.py"):
        bench_step(job_with(run=run, objective=objective), tmp_path, 1, None)
