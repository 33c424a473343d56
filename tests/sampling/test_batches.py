"""A batch pays for what its rows need, and writes what one long program writes."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

from jax_ragrl.bench.sample import FREE
from jax_ragrl.models.decoder import Decoder, init_sharded
from jax_ragrl.runtime.sharding import make_mesh, replicate, shard_batch
from jax_ragrl.sampling import batches, sampler
from jax_ragrl.sampling.batches import Batch, segments
from jax_ragrl.sampling.decode import Grammar, Sampled, begin, go_on
from jax_ragrl.sampling.sampler import Job, Shapes, pad_prompts, sample_jobs, start_jobs
from jax_ragrl.sampling.weights import for_sampling
from tests.tiny import policy, tokenizer

SHAPES = Shapes(lengths=(16,), batches=(1, 4), steps=32, slots=16)
WHOLE = dataclasses.replace(SHAPES, slots=32)


def jobs_of(limits: list[int], top_p: float = 1.0, tokens: str = "", stops=()) -> list[Job]:
    draw = np.random.default_rng(0)
    return [
        Job(tuple(draw.integers(3, 250, 3 + i).tolist()), i, 1.0, top_p, limit, tokens, stops)
        for i, limit in enumerate(limits)
    ]


def test_a_cache_doubles_until_it_holds_what_some_row_may_need():
    assert segments(2048, 128) == (128, 256, 512, 1024, 2048)
    assert segments(300, 100) == (112, 224, 300)  # a GPU looks at its rows every 16 tokens
    assert segments(128, 128) == (128,) and segments(64, 128) == (64,)
    assert segments(40, 0) == (16, 32, 40)
    shapes = Shapes(steps=2048)
    found = {limit: shapes.caches(limit)[-1] for limit in (1, 128, 129, 1000, 2048)}
    assert found == {1: 128, 128: 128, 129: 256, 1000: 1024, 2048: 2048}


@pytest.mark.parametrize(
    "width, mesh, kind",
    [
        (1, None, {"tokens": "[a-z ]+", "stops": ("ab", "never written")}),
        (8, None, {"top_p": 0.9}),
        pytest.param(2, (1, 4, 1), {"top_p": 0.9}, marks=pytest.mark.slow),
    ],
)
def test_a_batch_in_parts_writes_what_one_program_writes(width, mesh, kind, monkeypatch):
    """Three prompts of four, and thirteen over four devices: some rows of a batch are padding."""
    went: list[int] = []
    monkeypatch.setattr(batches, "go_on", lambda *a, **k: went.append(1) or go_on(*a, **k))
    jobs, net = jobs_of([30, 3, 18], **kind), policy()
    if mesh:
        over = make_mesh(mesh, jax.devices()[:4])
        decoder = init_sharded(nnx.merge(*net).config, over, nnx.Rngs(0))
        net = for_sampling({"policy": decoder})["policy"]
        jobs = jobs_of([3, 30, 17, 5, 2, 9, 20, 1, 4, 3, 2, 3, 8], **kind)
    expected, found = (sample_jobs(*net, tokenizer(), jobs, width, s) for s in (WHOLE, SHAPES))
    for rows, others in zip(found, expected, strict=True):
        assert [ids for ids, _ in rows] == [ids for ids, _ in others]
        for (_, logps), (_, other) in zip(rows, others, strict=True):
            np.testing.assert_allclose(logps, other, atol=1e-5)
    assert went and max(len(ids) for rows in found for ids, _ in rows) > 16


def test_a_batch_goes_on_with_the_prompts_and_the_slots_that_are_needed(monkeypatch):
    went = []

    def spy(*given, **fixed):
        loop = given[5]
        went.append((*loop.ids_BT.shape, int(loop.t)))
        return go_on(*given, **fixed)

    monkeypatch.setattr(batches, "go_on", spy)
    shapes = dataclasses.replace(SHAPES, batches=(1, 2, 4))
    jobs = jobs_of([3, 30, 5, 20])
    for seed in (0, 9):
        compiled = [f._cache_size() for f in (begin, go_on, batches._taken, batches._grown)]
        drawn = sample_jobs(
            *policy(), FREE, [j._replace(seed=j.seed + seed) for j in jobs], 3, shapes
        )
        assert [[len(ids) for ids, _ in rows] for rows in drawn] == [[j.limit] * 3 for j in jobs]
    # Rows, slots and tokens written: four prompts end in one, each of three siblings.
    assert went == 2 * [(6, 16, 5), (6, 32, 16), (3, 32, 20)]
    assert compiled == [f._cache_size() for f in (begin, go_on, batches._taken, batches._grown)]


def over(devices: int, count: int) -> Batch:
    """Eight prompts, `count` of them real, of which nothing is written."""
    mesh = make_mesh((1, devices, 1), jax.devices()[:devices])
    prompts = pad_prompts(jobs_of([30] * count), 16, 8)
    return Batch((None, None), prompts, None, 1, (16, 32), (1, 2, 4), False, 1, mesh)


def test_each_device_has_its_share_of_the_padding(monkeypatch):
    begun = []
    monkeypatch.setattr(batches, "begin", lambda *a, **k: begun.append(a[2]) or (None, None))
    over(4, count=5).begin()
    real_B = jax.device_get(begun[0].length_B) > 0
    assert real_B.reshape(4, 2).tolist() == [[True, True], *[[True, False]] * 3]


def test_a_batch_shrinks_to_what_holds_those_that_go_on_of_every_device():
    live_WN = np.array([[1, 1, 0, 0], [0, 0, 0, 1]], bool)
    batch = over(2, count=8)
    assert batch._size(live_WN) == 2 and batch._size(live_WN | [1, 1, 1, 0]) == 4
    # A program goes on until so few do; one that cannot shrink, until none does.
    few = [jax.device_get(batch._few(count)).tolist() for count in (4, 3, 1)]
    assert few == [[2, 2], [1, 1], [0, 0]]


def test_what_is_taken_are_the_rows_of_prompts_and_the_rest_is_given_up():
    x_R, keep_WN = jax.device_put((np.arange(8), np.array([[2, 0]], np.int32)))
    assert jax.device_get(batches.taken([x_R], keep_WN, 4)[0]).tolist() == [4, 5, 0, 1]
    assert x_R.is_deleted()


@pytest.mark.parametrize("slots, at_once", [(16, 1), (32, 3)])
def test_a_batch_that_keeps_its_cache_begins_when_the_one_before_has_ended(
    slots, at_once, monkeypatch
):
    begun, ended = [], []

    def begin_one(batch: Batch):
        number = len(begun)
        begun.append(len(ended))
        rows = Sampled(np.full((4, 1), number), np.zeros((4, 1)), np.ones(4, int))
        return lambda: ended.append(number) or [(np.arange(4), rows)]

    monkeypatch.setattr(sampler.Batch, "begin", begin_one)
    shapes = dataclasses.replace(SHAPES, slots=slots)
    finish = start_jobs(*policy(), FREE, jobs_of([30] * 11), 1, shapes)
    assert len(begun) == at_once
    assert [ids for rows in finish() for ids, _ in rows] == [(i // 4,) for i in range(11)]
    assert begun == ([0, 1, 2] if at_once == 1 else [0, 0, 0]) and ended == [0, 1, 2]


@pytest.mark.parametrize("stride", [1, 16])
def test_a_batch_ends_with_its_last_slot_though_a_row_would_go_on(stride, monkeypatch):
    """On a GPU that lies between two looks at rows: 37 slots are full before the third, of 16."""
    monkeypatch.setattr(sampler, "Batch", lambda *a, **k: Batch(*a, **k | {"stride": stride}))
    shapes = dataclasses.replace(SHAPES, steps=37)
    drawn = sample_jobs(*policy(), FREE, jobs_of([46, 3, 36]), 1, shapes)
    assert [(len(ids), len(logps)) for [(ids, logps)] in drawn] == [(37, 37), (3, 3), (36, 36)]


@pytest.mark.slow
def test_going_on_gathers_nothing_and_writes_where_it_reads():
    """On a mesh a cache keeps its layout and its memory, and stays on its device."""
    mesh = make_mesh((1, 4, 1), jax.devices()[:4])
    config = dataclasses.replace(nnx.merge(*policy()).config, num_kv_heads=2)
    decoder: Decoder = init_sharded(config, mesh, nnx.Rngs(0))
    net = for_sampling({"policy": decoder})["policy"]
    with jax.set_mesh(mesh):
        prompts = shard_batch(pad_prompts(jobs_of([9] * 8), 16, 8), mesh)
        given = (*net, prompts, Grammar(replicate(np.array([1], np.int32), mesh)))
        few_W, keep_WN = replicate((np.zeros(4, np.int32), np.zeros((4, 1), np.int32)), mesh)
        loop, prefix = begin(*given, few_W, width=2, slots=4)
        lowered = go_on.lower(*given, few_W, loop, prefix)
        compiled = lowered.compile({"xla_backend_optimization_level": 0})
        moved = batches._taken.lower(loop.cache.k[0], keep_WN, 2, loop.cache.k[0].sharding)
        texts = [compiled.as_text(), moved.compile().as_text()]
        after = go_on(*given, few_W, loop, prefix)
    assert "while(" in texts[0] and not any("all-gather" in text for text in texts)
    assert "all-reduce" not in texts[1] and "collective" not in texts[1]
    same = jax.tree.map(lambda x, y: x.sharding == y.sharding, loop, after)
    assert all(jax.tree.leaves(same)) and all(x.is_deleted() for x in jax.tree.leaves(loop.cache))
    cache = sum(x.nbytes for x in jax.tree.leaves(after.cache)) // 4
    assert compiled.memory_analysis().alias_size_in_bytes >= cache
