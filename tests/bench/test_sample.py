"""The counts of the sampling benchmark; no test asserts a duration."""

import dataclasses
import json

import pytest
from flax import nnx

from jax_ragrl.bench.sample import SampleWork, roll_out
from jax_ragrl.cli.main import main
from jax_ragrl.errors import UserError
from jax_ragrl.models.decoder import Decoder
from jax_ragrl.models.published import published_config
from jax_ragrl.sampling.weights import for_sampling

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
