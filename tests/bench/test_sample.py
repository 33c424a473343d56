"""What the bench of sampling counts; how long it takes is nobody's test."""

import json

from jax_ragrl.bench.sample import Rollout
from jax_ragrl.cli.main import main

UNEQUAL = Rollout("tiny", prompts=3, siblings=2, prompt=16, new=20, mean=5, batch=2)


def test_rows_have_the_most_tokens_or_a_mean_that_few_of_them_reach():
    limits = Rollout(prompts=1000, new=1000, mean=100).limits()
    assert 85 < sum(limits) / 1000 < 115 and sorted(limits)[500] < 80 and max(limits) <= 1000
    assert Rollout(prompts=3, new=7).limits() == [7, 7, 7]
    assert Rollout(batch=48).shapes().batches == (1, 3, 12, 48)


def test_the_command_counts_the_tokens_that_are_written(capsys):
    sizes = "--prompts 3 --siblings 2 --prompt 16 --new 20 --mean 5 --batch 2 --repeats 1".split()
    given = ["bench", "sample", "--json", "--shape", "tiny", "--dtype", "float32", *sizes]
    assert main(given) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["tokens"] == 2 * sum(UNEQUAL.limits()) and result["tokens_per_s"] > 0
