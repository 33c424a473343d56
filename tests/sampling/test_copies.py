"""The numbers of rows per prompt that a config allows."""

import pytest

from jax_ragrl.cli.main import CONFIGS
from jax_ragrl.config.schema import build
from jax_ragrl.errors import UserError
from jax_ragrl.run.overrides import load_config
from jax_ragrl.sampling.grouping import batch_jobs
from jax_ragrl.sampling.jobs import SamplingJob, Shapes


def copies_of(draws: int, shapes: Shapes) -> set[int]:
    """The rows per prompt of the batches in which one prompt is sampled with some seeds."""
    jobs = [SamplingJob((1, 2, 3), seed, 1.0, 1.0, 8) for seed in range(draws)]
    return {chunk.copies for chunk in batch_jobs(jobs, 1, shapes)}


def test_listed_numbers_replace_powers_of_two():
    assert list(Shapes().copies_up_to(5)) == [1, 2, 4, 8]
    assert list(Shapes(copies=(1, 6)).copies_up_to(5)) == [1, 6]
    assert list(Shapes(copies=(1, 6)).copies_up_to(1)) == [1]
    assert list(Shapes(copies=(1, 6)).copies_up_to(9)) == [1, 6]  # in two rows of the batch


@pytest.mark.parametrize("draws", [1, 3, 8, 20])
def test_batches_have_the_listed_numbers_only(draws):
    listed = Shapes((8,), batch_sizes=(1, 4, 16, 64), copies=(1, 8))
    assert copies_of(draws, listed) <= {1, 8}
    jobs = [SamplingJob((1, 2, 3), seed, 1.0, 1.0, 8) for seed in range(draws)]
    rows = [i for chunk in batch_jobs(jobs, 1, listed) for p in chunk.prompts for d in p for i in d]
    assert sorted(rows) == list(range(draws))


@pytest.mark.parametrize("copies", [(8,), (1, 8, 4), (1, 1)])
def test_a_list_without_one_or_without_order_is_refused(copies):
    with pytest.raises(UserError, match=r"shapes.copies is .*ascending numbers from 1"):
        Shapes(copies=copies)


@pytest.mark.parametrize("file", sorted((CONFIGS / "smollm2").glob("*.py")), ids=lambda x: x.stem)
def test_real_configs_compute_the_prompt_of_a_group_once(file):
    """Eight rollouts of eight questions begin with eight prompts, not with 64."""
    shapes = build(Shapes, load_config(file, []).get("shapes", {}))
    for length in shapes.prompt_lengths if shapes.copies else ():
        jobs = [
            SamplingJob((question,) * length, 8 * question + rollout, 1.0, 1.0, 8)
            for question in range(8)
            for rollout in range(8)
        ]
        assert sum(chunk.size for chunk in batch_jobs(jobs, 1, shapes)) == 8
