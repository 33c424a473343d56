"""Equal prompts are prefilled once, batches have little padding, and no token changes."""

import dataclasses
from collections.abc import Iterator

import jax
import numpy as np
import pytest
from flax import nnx

from jax_ragrl.cli.main import CONFIGS
from jax_ragrl.config.schema import build
from jax_ragrl.models.decoder import init_sharded
from jax_ragrl.run.overrides import load_config
from jax_ragrl.runtime.sharding import make_mesh
from jax_ragrl.sampling import grouping, sampler
from jax_ragrl.sampling import jobs as jobs_module
from jax_ragrl.sampling.grouping import batch_jobs, divide, pad_prompts
from jax_ragrl.sampling.sampler import JobSamples, SamplingJob, Shapes, sample_jobs
from jax_ragrl.sampling.weights import for_sampling
from tests.tiny import split_policy, tokenizer

SHAPES = Shapes(prompt_lengths=(16,), batch_sizes=(1, 4, 16), max_new_tokens=12)


def jobs_of(counts: list[int], **settings) -> list[SamplingJob]:
    """`counts[i]` jobs with prompt `i`, their seeds all different, in turn over the prompts."""
    rng = np.random.default_rng(0)
    ids = [tuple(rng.integers(3, 250, 5 + i).tolist()) for i in range(len(counts))]
    turns = [(k, i) for i, count in enumerate(counts) for k in range(count)]
    jobs = [SamplingJob(ids[i], 10 * i + k, 1.0, 1.0, 12) for k, i in sorted(turns)]
    return [job._replace(**settings) for job in jobs]


def apart(jobs: list[SamplingJob], width: int, model=None, shapes: Shapes = SHAPES) -> JobSamples:
    return [sample_jobs(model or split_policy(), tokenizer(), [j], width, shapes)[0] for j in jobs]


def assert_equal_samples(actual: JobSamples, expected: JobSamples) -> None:
    for rows, others in zip(actual, expected, strict=True):
        assert [ids for ids, *_ in rows] == [ids for ids, *_ in others]
        for (_, logps, _), (_, other, _) in zip(rows, others, strict=True):
            np.testing.assert_allclose(logps, other, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "width, counts, new", [(1, [4, 4, 4, 4], 24), (2, [3, 1, 4], 12), (3, [4, 1, 4], 24)]
)
def test_merged_prompts_sample_the_tokens_of_separate_ones(width, counts, new, monkeypatch):
    """With unequal counts some rows are padding; a cache of 16 slots grows to 32."""
    monkeypatch.setattr(sampler, "uses_one_core", lambda *_: False)  # rows of padding cost nothing
    monkeypatch.setattr(jobs_module, "FIRST_CACHE", 16)
    shapes = dataclasses.replace(SHAPES, max_new_tokens=new)
    jobs = jobs_of(counts, limit=shapes.max_new_tokens, top_p=0.9)
    expected = apart(jobs, width, shapes=shapes)
    prompts = []
    pad = grouping.pad_prompts
    monkeypatch.setattr(
        sampler, "pad_prompts", lambda p, *a, **k: prompts.append(len(p)) or pad(p, *a, **k)
    )
    samples = sample_jobs(split_policy(), tokenizer(), jobs, width, shapes)
    assert_equal_samples(samples, expected)
    assert sum(prompts) < len(jobs)
    assert len({ids for rows in samples for ids, *_ in rows}) == width * len(jobs)  # seeds differ


@pytest.mark.slow
def test_merged_prompts_over_four_devices_sample_the_tokens_of_separate_ones(monkeypatch):
    monkeypatch.setattr(jobs_module, "FIRST_CACHE", 16)
    mesh = make_mesh((1, 4, 1), jax.devices()[:4])
    decoder = init_sharded(split_policy().merge().config, mesh, nnx.Rngs(0))
    model = for_sampling({"policy": decoder})["policy"]
    shapes = dataclasses.replace(SHAPES, max_new_tokens=24)
    jobs = jobs_of([4, 3, 4, 1, 4, 2], limit=24)
    chunk, *others = batch_jobs(jobs, 2, shapes, 4)
    assert chunk.copies > 1 and not others
    samples = sample_jobs(model, tokenizer(), jobs, 2, shapes)
    assert_equal_samples(samples, apart(jobs, 2, model, shapes))


def test_other_settings_are_other_prompts_and_equal_greedy_jobs_one_row():
    """Jobs that differ in anything but the seed share no prompt."""
    job = jobs_of([1])[0]
    changes = [{"temperature": 0.5}, {"top_p": 0.9}, {"limit": 7}, {"stop_strings": ("a",)}]
    jobs = [job, *(job._replace(seed=1, **change) for change in changes)]
    chunks = batch_jobs([*jobs, job._replace(seed=2)], 1, SHAPES)
    draws = [prompt for chunk in chunks for prompt in chunk.prompts]
    assert sorted(draws) == [[(0,), (5,)], [(1,)], [(2,)], [(3,)], [(4,)]]
    # A greedy token does not depend on the seed; equal jobs have equal tokens anyway.
    jobs = jobs_of([3, 1], temperature=0.0)
    (chunk,) = batch_jobs(jobs, 1, SHAPES)
    assert chunk.prompts == [[(0, 2, 3)], [(1,)]] and chunk.copies == 1
    samples = sample_jobs(split_policy(), tokenizer(), jobs, 1, SHAPES)
    assert_equal_samples(samples, apart(jobs, 1))
    twice = [jobs_of([1])[0]] * 2
    assert batch_jobs(twice, 1, SHAPES)[0].prompts == [[(0, 1)]]


def test_rows_of_padding_have_no_sibling_number():
    jobs = jobs_of([2, 1])
    prompts = pad_prompts([[jobs[0], jobs[2]], [jobs[1]]], 4, width=2, copies=2)
    assert prompts.seed_BW.tolist() == [[0, 0, 1, 1], [10, 10, 0, 0], [0] * 4, [0] * 4]
    assert prompts.sibling_BW.tolist() == [[0, 1, 0, 1], [0, 1, -1, -1], [-1] * 4, [-1] * 4]


def chunks_of(counts: list[int], limit: int, shapes: Shapes) -> list[tuple]:
    """Prompts, size and copies of each chunk of jobs with prompts of 400 tokens."""
    jobs = [
        SamplingJob((i,) * 400, 100 * i + k, 1.0, 1.0, limit)
        for i, count in enumerate(counts)
        for k in range(count)
    ]
    return [(len(c.prompts), c.size, c.copies) for c in batch_jobs(jobs, 1, shapes)]


@pytest.mark.parametrize(
    "counts, expected",
    [
        ([4] * 16, [(16, 16, 4)]),  # 16 groups of four: one prefill per question
        ([1] * 16, [(16, 16, 1)]),  # nothing to merge: the program without copies
        ([1] * 20, [(16, 16, 1), (4, 4, 1)]),  # not 44 prompts of padding
        ([5], [(1, 1, 8)]),
        ([8] * 16, [(4, 4, 8)] * 4),  # at most 64 rows per batch
        ([2] * 8 + [1] * 8, [(16, 16, 2)]),
    ],
)
def test_a_cpu_prefills_each_prompt_once_and_little_padding(counts, expected):
    assert chunks_of(counts, 32, Shapes()) == expected


@pytest.mark.parametrize(("is_small", "sizes"), [(False, [16]), (True, [8, 4])])
def test_a_small_model_decodes_few_rows_of_padding(is_small: bool, sizes: list[int]):
    """Its steps read few weights, so that two small batches take less time than a padded one."""
    jobs = [SamplingJob((i,) * 100, 0, 1.0, 1.0, 64) for i in range(9)]
    shapes = Shapes((100,), batch_sizes=(4, 8, 16))
    assert [c.size for c in batch_jobs(jobs, 1, shapes, is_small=is_small)] == sizes


def test_an_accelerator_prefers_one_padded_batch(monkeypatch):
    """Decoding a second batch takes as long as the first one, so long actions share a batch."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    shapes = Shapes(max_new_tokens=512, max_prompt_tokens=65536)
    assert chunks_of([1] * 20, 512, shapes) == [(20, 64, 1)]
    assert chunks_of([1] * 20, 16, shapes) == [(16, 16, 1), (4, 4, 1)]
    assert chunks_of([4] * 16, 512, shapes) == [(16, 16, 4)]


def test_a_batch_with_copies_has_no_more_rows_than_the_largest_batch():
    shapes = Shapes((512, 1024), batch_sizes=(4, 16, 64), max_prompt_tokens=16384)
    sizes = {c: shapes.batch_sizes_for(512, copies=c) for c in (1, 2, 4, 16, 32)}
    assert sizes == {1: [4, 16], 2: [4, 16], 4: [4, 16], 16: [4], 32: []}
    assert shapes.batch_sizes_for(1024, 8, 4) == [8, 16, 32, 64, 128]
    jobs = [SamplingJob((1,) * 600, i, 1.0, 1.0, 4) for i in range(1000)]
    chunks = batch_jobs(jobs, 1, shapes)
    assert {c.copies for c in chunks} == {16} and sum(len(c.prompts) for c in chunks) == 63


@pytest.mark.slow
def test_short_prompts_take_the_empty_places_of_longer_ones():
    """Two prompts of 8 tokens and three of 16 are one batch and one prompt, not three batches."""
    costs = {length: {size: 4 + size * length for size in (1, 4)} for length in (8, 16)}
    cost, batches = divide([8, 8, 16, 16, 16], costs)
    assert batches == [(0, 1, 1), (1, 5, 4)] and cost == 12 + 68
    lengths = [5, 6, 7, 12, 13, 14]
    jobs = [SamplingJob((n,) * n, n, 1.0, 1.0, 8) for n in lengths]
    shapes = Shapes((8, 16), batch_sizes=(2, 4), max_new_tokens=8)
    chunks = batch_jobs(jobs, 1, shapes)
    assert [(c.length, c.size, c.prompts) for c in chunks] == [
        (8, 2, [[(0,)], [(1,)]]),
        (16, 4, [[(2,)], [(3,)], [(4,)], [(5,)]]),
    ]
    samples = sample_jobs(split_policy(), tokenizer(), jobs, 1, shapes)
    assert_equal_samples(samples, apart(jobs, 1, shapes=shapes))


def all_divisions(lengths: list[int]) -> Iterator[list[list[int]]]:
    """Yields all ways to divide prompts into batches, in any order."""
    if not lengths:
        yield []
        return
    first, *others = lengths
    for batches in all_divisions(others):
        yield [[first], *batches]
        for i, batch in enumerate(batches):
            yield [*batches[:i], [first, *batch], *batches[i + 1 :]]


@pytest.mark.parametrize("seed", range(4))
def test_no_division_costs_less(seed):
    rng = np.random.default_rng(seed)
    lengths, overhead = sorted(rng.choice([2, 3, 5], 6).tolist()), int(rng.integers(6))
    costs = {n: {size: overhead + size * n for size in (1, 2, 4)} for n in (2, 3, 5)}

    def cost(batch: list[int]) -> int:
        return min((c for n, c in costs[max(batch)].items() if n >= len(batch)), default=10**9)

    least = min(sum(map(cost, batches)) for batches in all_divisions(lengths))
    total, batches = divide(lengths, costs)
    assert total == least == sum(cost(lengths[start:end]) for start, end, _ in batches)


def test_a_cache_holds_what_is_asked_and_not_more():
    shapes = Shapes(max_new_tokens=512)
    sizes = {limit: shapes.cache_sizes_for(limit) for limit in (1, 16, 17, 100, 129, 512)}
    assert sizes == {
        1: (16,),
        16: (16,),
        17: (32,),
        100: (128,),
        129: (128, 256),
        512: (128, 256, 512),
    }
    assert Shapes(max_new_tokens=300).cache_sizes_for(300) == (128, 256, 304)
    assert Shapes(max_new_tokens=40).cache_sizes_for(33) == (48,)
    assert Shapes(max_new_tokens=12).cache_sizes_for(3) == (16,)


@pytest.mark.parametrize("file", sorted((CONFIGS / "smollm2").glob("*.py")), ids=lambda x: x.stem)
def test_real_configs_compute_the_prompt_of_a_group_once(file):
    """Eight rollouts of eight questions begin with eight prompts, not with 64."""
    shapes = build(Shapes, load_config(file, []).get("shapes", {}))
    for length in shapes.prompt_lengths:
        jobs = [
            SamplingJob((question,) * length, 8 * question + rollout, 1.0, 1.0, 8)
            for question in range(8)
            for rollout in range(8)
        ]
        assert sum(chunk.size for chunk in batch_jobs(jobs, 1, shapes)) == 8
