"""A batch pays for what its rows need, and its tokens equal the tokens of one long program."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

from jax_ragrl.bench.sample import PLAIN_TOKENIZER
from jax_ragrl.models.decoder import Decoder, init_sharded
from jax_ragrl.models.prefix_attention import KEY_BLOCKS
from jax_ragrl.runtime.sharding import make_mesh, replicate, shard_batch
from jax_ragrl.sampling import batches, sampler
from jax_ragrl.sampling import jobs as jobs_module
from jax_ragrl.sampling.batches import PromptBatch
from jax_ragrl.sampling.decode import Grammar, Samples, decode, start_decode
from jax_ragrl.sampling.grouping import pad_prompts
from jax_ragrl.sampling.sampler import JobSampler, SamplingJob, Shapes, sample_jobs
from jax_ragrl.sampling.weights import for_sampling
from tests.sampling.test_grouping import assert_equal_samples
from tests.tiny import split_policy, tokenizer

SHAPES = Shapes(prompt_lengths=(16,), batch_sizes=(1, 4), max_new_tokens=32)


@pytest.fixture(autouse=True)
def first_cache(monkeypatch):
    monkeypatch.setattr(jobs_module, "FIRST_CACHE", 16)


def jobs_of(limits: list[int], top_p: float = 1.0, regex: str = "", stops=()) -> list[SamplingJob]:
    rng = np.random.default_rng(0)
    return [
        SamplingJob(tuple(rng.integers(3, 250, 3 + i).tolist()), i, 1.0, top_p, limit, regex, stops)
        for i, limit in enumerate(limits)
    ]


@pytest.mark.parametrize(
    "width, mesh_shape, options",
    [
        (1, None, {"regex": "[a-z ]+", "stops": ("ab", "never written")}),
        (8, None, {"top_p": 0.9}),
        pytest.param(2, (1, 4, 1), {"top_p": 0.9}, marks=pytest.mark.slow),
    ],
)
def test_several_programs_sample_the_tokens_of_one(width, mesh_shape, options, monkeypatch):
    """Three prompts in a batch of four, and thirteen over four devices: some rows are padding."""
    jobs, model = jobs_of([30, 3, 18], **options), split_policy()
    if mesh_shape:
        mesh = make_mesh(mesh_shape, jax.devices()[:4])
        decoder = init_sharded(model.merge().config, mesh, nnx.Rngs(0))
        model = for_sampling({"policy": decoder})["policy"]
        jobs = jobs_of([3, 30, 17, 5, 2, 9, 20, 1, 4, 3, 2, 3, 8], **options)
    actual = sample_jobs(model, tokenizer(), jobs, width, SHAPES)
    monkeypatch.setattr(jobs_module, "FIRST_CACHE", 32)
    expected = sample_jobs(model, tokenizer(), jobs, width, SHAPES)
    assert_equal_samples(actual, expected)
    assert max(len(row.ids) for rows in actual for row in rows) > 16


@pytest.mark.slow
def test_a_batch_continues_with_live_prompts_and_needed_slots(monkeypatch):
    calls = []

    def spy(*args, **options):
        state = args[4]
        calls.append((*state.ids_BT.shape, int(state.t)))
        return decode(*args, **options)

    monkeypatch.setattr(batches, "decode", spy)
    programs = (start_decode, decode, batches.resize)
    shapes = dataclasses.replace(SHAPES, batch_sizes=(1, 2, 4))
    jobs = jobs_of([3, 30, 5, 20])
    for seed in (0, 9):
        counts = [f._cache_size() for f in programs]
        reseeded = [j._replace(seed=j.seed + seed) for j in jobs]
        samples = sample_jobs(split_policy(), PLAIN_TOKENIZER, reseeded, 3, shapes)
        assert [[len(row.ids) for row in rows] for rows in samples] == [[j.limit] * 3 for j in jobs]
    # Rows, slots and tokens so far: four prompts of three siblings shrink to two, then to one.
    assert calls == 2 * [(12, 16, 0), (6, 16, 5), (6, 32, 16), (3, 32, 20)]
    assert counts == [f._cache_size() for f in programs]


def test_taking_prompts_keeps_their_rows_and_frees_the_input():
    x_R, keep_WN = jax.device_put((np.arange(8), np.array([[2, 0]], np.int32)))
    (taken_R,) = batches.resize_all([x_R], keep_WN=keep_WN, count=4)
    assert jax.device_get(taken_R).tolist() == [4, 5, 0, 1]
    assert x_R.is_deleted()


@pytest.mark.parametrize("first, in_flight", [(16, 1), (32, 3)])
def test_one_batch_at_a_time_keeps_its_cache(first, in_flight, monkeypatch):
    starts, ends = [], []

    def start(batch: PromptBatch):
        number = len(starts)
        starts.append(len(ends))
        rows = Samples(np.full((4, 1), number), np.zeros((4, 1)), np.ones(4, int))
        return lambda: ends.append(number) or [(np.arange(4), rows)]

    monkeypatch.setattr(sampler.PromptBatch, "start", start)
    monkeypatch.setattr(jobs_module, "FIRST_CACHE", first)
    finish = JobSampler(split_policy(), PLAIN_TOKENIZER, SHAPES).start(jobs_of([30] * 11), 1)
    assert len(starts) == in_flight
    assert [row.ids for rows in finish() for row in rows] == [((i + 1) // 4,) for i in range(11)]
    assert starts == ([0, 1, 2] if in_flight == 1 else [0, 0, 0]) and ends == [0, 1, 2]


@pytest.mark.parametrize("new", [1, 24, 100, 130])
def test_the_kernel_of_a_gpu_can_divide_a_cache_of_any_size(new):
    """Blocks of keys have at least 16 keys."""
    shapes = Shapes(max_new_tokens=new)
    sizes = {size for limit in range(1, new + 1) for size in shapes.cache_sizes_for(limit)}
    assert not any(size % min(KEY_BLOCKS) for size in sizes)
    assert new <= max(sizes) < new + 16


@pytest.mark.slow
@pytest.mark.parametrize("stride", [1, 16])
def test_rows_end_at_their_limits_between_two_checks(stride, monkeypatch):
    """With a stride of 16, as on a GPU, the third check is after 48 tokens."""
    monkeypatch.setattr(sampler, "PromptBatch", lambda **k: PromptBatch(**k | {"stride": stride}))
    shapes = dataclasses.replace(SHAPES, max_new_tokens=37)
    samples = sample_jobs(split_policy(), PLAIN_TOKENIZER, jobs_of([37, 3, 36]), 1, shapes)
    assert [(len(ids), len(logps)) for [(ids, logps, _)] in samples] == [(37, 37), (3, 3), (36, 36)]


@pytest.mark.slow
def test_continuing_gathers_nothing_and_updates_the_cache_in_place():
    """On a mesh a cache keeps its sharding and its memory, and no row changes its device."""
    mesh = make_mesh((1, 4, 1), jax.devices()[:4])
    config = dataclasses.replace(split_policy().merge().config, num_kv_heads=2)
    decoder: Decoder = init_sharded(config, mesh, nnx.Rngs(0))
    model = for_sampling({"policy": decoder})["policy"]
    with jax.set_mesh(mesh):
        jobs = [[job] for job in jobs_of([9] * 8)]
        host = pad_prompts(jobs, 8, width=2), np.zeros((8, 16), np.int32)
        prompts, ids_BL = shard_batch(host, mesh)
        args = (model, prompts, Grammar(replicate(np.array([1], np.int32), mesh)))
        shrink_at_W, keep_WN = replicate((np.zeros(4, np.int32), np.zeros((4, 1), np.int32)), mesh)
        state, prefix = start_decode(model, prompts, ids_BL, slots=4)
        lowered = decode.lower(*args, shrink_at_W, state, prefix)
        program = lowered.compile({"xla_backend_optimization_level": 0})
        keys = state.cache.k[0]
        take = batches.resize.lower(keys, keys.sharding, keep_WN, count=2).compile()
        start = start_decode.lower(model, prompts, ids_BL, slots=4)
        first = start.compile({"xla_backend_optimization_level": 0})
        texts = [program.as_text(), take.as_text(), first.as_text()]
        after = decode(*args, shrink_at_W, state, prefix)
    assert "while(" in texts[0] and not any("all-gather" in text for text in texts)
    assert "all-reduce" not in texts[1] and "collective" not in texts[1]
    same = jax.tree.map(lambda x, y: x.sharding == y.sharding, state, after)
    assert all(jax.tree.leaves(same)) and all(x.is_deleted() for x in jax.tree.leaves(state.cache))
    cache = sum(x.nbytes for x in jax.tree.leaves(after.cache)) // 4
    assert program.memory_analysis().alias_size_in_bytes >= cache
