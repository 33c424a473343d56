"""The counts of the benchmarks; no test asserts a duration."""

import dataclasses
import json
from collections import namedtuple

import jax
import pytest
from flax import nnx

from jax_ragrl.bench.sample import SampleWork, roll_out
from jax_ragrl.bench.step import _mean_busy_seconds, bench_step, initial_policies, union_length
from jax_ragrl.bench.train import TrainWork, bench_train, train_flops
from jax_ragrl.cli.main import main
from jax_ragrl.errors import UserError
from jax_ragrl.models.decoder import Decoder
from jax_ragrl.models.lora import LoRAConfig
from jax_ragrl.models.published import published_config
from jax_ragrl.run.config import Job
from jax_ragrl.run.models import load_policies
from jax_ragrl.run.parts import Components
from jax_ragrl.sampling.weights import for_sampling
from tests.jobs import config_job

SMALL = TrainWork(
    "tiny", prompts=2, siblings=3, prompt=20, new=4, layers=1, dtype="float32", repeats=1
)


@pytest.mark.slow
def test_tokens_are_counted_for_both_row_layouts():
    grouped = bench_train(SMALL)["grouped"]
    ungrouped = bench_train(SMALL, share_rows=False)["ungrouped"]
    assert (grouped["tokens"], ungrouped["tokens"]) == (2 * (20 + 3 * 4), 2 * 3 * 24)
    for x in (grouped, ungrouped):
        tokens = x["ungrouped_tokens_per_s"] / x["tokens_per_s"] * x["tokens"]
        assert tokens == pytest.approx(144, rel=1e-3)


def test_the_operations_of_a_step_match_a_manual_count():
    """One layer: weights, pairs of attending tokens, head; the backward pass counts twice."""
    (turns,) = [SMALL.turns()[:3]]
    weights = 4 * 128 * 128 + 3 * 128 * 256
    pairs = 20 * 21 // 2 + 3 * (4 * 20 + 4 * 5 // 2)
    forward = 2 * weights * 32 + 2 * 1024 * 128 * 12 + 4 * 128 * pairs
    assert train_flops(SMALL, [turns]) == pytest.approx(3 * forward)


@pytest.mark.slow
def test_the_command_accepts_all_sizes(capsys):
    sizes = "--prompts 1 --siblings 2 --prompt 20 --new 4 --layers 1 --repeats 1".split()
    args = ["bench", "train", "--json", "--shape", "tiny", "--dtype", "float32", *sizes]
    assert main([*args, "--ungrouped"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["ungrouped"]["tokens"] == 48 and "grouped" not in result


UNEQUAL = SampleWork("tiny", prompts=3, siblings=2, prompt=16, new=20, mean=5, batch=2)


def test_lengths_are_equal_or_exponentially_distributed_but_not_those_of_turns():
    limits = SampleWork(prompts=1000, new=1000, mean=100).limits()
    assert 85 < sum(limits) / 1000 < 115 and sorted(limits)[500] < 80 and max(limits) <= 1000
    assert SampleWork(prompts=3, new=7).limits() == [7, 7, 7]
    assert SampleWork(batch=48).shapes().batch_sizes == (1, 3, 12, 48)
    with pytest.raises(UserError, match="--mean 5 with --turns 2"):
        dataclasses.replace(UNEQUAL, turns=2)


@pytest.mark.slow
def test_the_command_counts_new_tokens(capsys):
    sizes = "--prompts 3 --siblings 2 --prompt 16 --new 20 --mean 5 --batch 2 --repeats 1".split()
    args = ["bench", "sample", "--json", "--shape", "tiny", "--dtype", "float32", *sizes]
    assert main(args) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["tokens"] == 2 * sum(UNEQUAL.limits()) and result["tokens_per_s"] > 0


TURNS = dataclasses.replace(UNEQUAL, mean=0, new=8, turns=3, observation=5, dtype="float32")


@pytest.mark.slow
def test_a_conversation_grows_by_a_reply_and_an_observation_per_turn():
    assert TURNS.lengths() == [16, 29, 42] and TURNS.tokens == 3 * 2 * 8 * 3
    decoder = Decoder(published_config("tiny"), rngs=nnx.Rngs(0))
    model = for_sampling({"policy": decoder})["policy"]
    vocabulary = decoder.config.vocab_size
    jobs = roll_out(TURNS, model, vocabulary)
    assert [len(job.ids) for job in jobs] == [42] * 3
    assert jobs[0].ids[:16] == TURNS.jobs(vocabulary)[0].ids
    assert [*jobs[1].ids[24:29]] == TURNS.observations(vocabulary)[0][1]


Event = namedtuple("Event", "start_ns duration_ns")
Line = namedtuple("Line", "name events")
Plane = namedtuple("Plane", "lines")


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
    return dataclasses.replace(config_job("tiny/c3po"), **changes)


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
