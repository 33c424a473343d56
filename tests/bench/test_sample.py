"""The counts of the sampling benchmark; no test asserts a duration."""

import dataclasses
import json

import pytest

from jax_ragrl.bench.peers import compare_rollouts, transformers_sample
from jax_ragrl.bench.sample import SampleWork
from jax_ragrl.cli.main import main

UNEQUAL = SampleWork("tiny", prompts=3, siblings=2, prompt=16, new=20, mean=5, batch=2)


def test_lengths_are_equal_or_exponentially_distributed():
    limits = SampleWork(prompts=1000, new=1000, mean=100).limits()
    assert 85 < sum(limits) / 1000 < 115 and sorted(limits)[500] < 80 and max(limits) <= 1000
    assert SampleWork(prompts=3, new=7).limits() == [7, 7, 7]
    assert SampleWork(batch=48).shapes().batch_sizes == (1, 3, 12, 48)


@pytest.mark.slow
def test_transformers_samples_the_same_work():
    pytest.importorskip("torch")
    speed = transformers_sample(dataclasses.replace(UNEQUAL, dtype="float32", repeats=1))
    assert speed["tokens"] == 2 * sum(UNEQUAL.limits()) and speed["rollout_cpu_s"] > 0
    ours = {"rollout_s": 1.0, "rollout_cpu_s": 4.0}
    theirs = {"rollout_s": 3.0, "rollout_cpu_s": 8.0}
    assert compare_rollouts(ours, theirs) == {"times_faster": 3.0, "times_faster_cpu": 2.0}


def test_the_command_counts_new_tokens(capsys):
    sizes = "--prompts 3 --siblings 2 --prompt 16 --new 20 --mean 5 --batch 2 --repeats 1".split()
    args = ["bench", "sample", "--json", "--shape", "tiny", "--dtype", "float32", *sizes]
    assert main(args) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["tokens"] == 2 * sum(UNEQUAL.limits()) and result["tokens_per_s"] > 0
