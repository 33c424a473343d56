"""The programs of slots are listed before they are called: afterwards none of them is compiled."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import jax
import numpy as np
import pytest
from flax import nnx

from jax_ragrl.models.decoder import init_sharded
from jax_ragrl.models.split import SplitModel
from jax_ragrl.plan.slots import count_slot_programs
from jax_ragrl.runtime.compile_ahead import compile_programs
from jax_ragrl.runtime.compile_cache import compiled_programs
from jax_ragrl.runtime.sharding import make_mesh
from jax_ragrl.sampling import context_cache, engine, grouping, slots
from jax_ragrl.sampling.context_cache import first_capacity, first_chunk_capacity
from jax_ragrl.sampling.contexts import Reservation
from jax_ragrl.sampling.engine import SlotEngine
from jax_ragrl.sampling.jobs import SamplingJob, Shapes
from jax_ragrl.sampling.slot_programs import ChunkShape, chunk_shapes, decode_shapes, slot_programs
from jax_ragrl.sampling.weights import for_sampling
from tests.sampling.test_batches import jobs_of
from tests.tiny import split_policy, tokenizer

# Another number of contexts than in other tests, which share compiled programs.
SHAPES = Shapes(
    prompt_lengths=(30,),
    batch_sizes=(2,),
    max_new_tokens=56,
    max_prompt_tokens=64,
    initial_cache_size=16,
    decode_rows=4,
    kept_contexts=7,
)


def model_on(devices: str) -> SplitModel:
    model = split_policy()
    if devices == "mesh":
        mesh = make_mesh((2, 2, 1), jax.devices()[:4])
        decoder = init_sharded(model.merge().config, mesh, nnx.Rngs(0))
        return for_sampling({"policy": decoder})["policy"]
    # A copy of weights in another dtype is committed to its device.
    return jax.device_put(model, jax.devices()[0]) if devices == "committed" else model


def names_of_calls(monkeypatch) -> set[str]:
    """The names of the programs that an engine will have called."""
    names: set[str] = set()
    for module in (engine, context_cache):
        monkeypatch.setattr(
            module, "report_compiling", lambda name: contextlib.nullcontext(names.add(name))
        )
    return names


@pytest.mark.parametrize(
    ("devices", "options", "strict"),
    [
        ("committed", {}, ""),
        pytest.param(
            "default",
            {"top_p": 0.9, "regex": "[a-z ]+", "stops": ("ab",)},
            "",
            marks=pytest.mark.slow,
        ),
        pytest.param("default", {}, "[0-9]+, [0-9]+", marks=pytest.mark.slow),
        pytest.param("mesh", {}, "", marks=pytest.mark.slow),
    ],
)
def test_slots_compile_none_of_the_listed_programs(devices, options, strict, monkeypatch, caplog):
    """Slots that are refilled and given up, contexts that grow, chunks of one context and four."""
    model = model_on(devices)
    limits = [56, 3, 18, 7, 5, 25, 4, 4, 56, 30, 9, 8, 2, 6, 30, 4, 3, 9, 5, 7, 4, 56]
    jobs = [
        job._replace(ids=(job.ids * 9)[: 18 + i % 10], action_regex=strict)
        for i, job in enumerate(jobs_of(limits, **options))
    ]
    others = [job._replace(ids=job.ids[::-1]) for job in jobs]
    programs = slot_programs(model, tokenizer(), jobs[:2], SHAPES)
    before = compiled_programs()
    compile_programs(programs, threads=2)
    assert compiled_programs() > before, "compiled by an earlier test: this one shows nothing"
    calls, own = names_of_calls(monkeypatch), SlotEngine(model, tokenizer(), SHAPES)
    with jax.log_compiles():
        caplog.clear()
        for part, width in ((jobs[1:2], 1), (jobs, 1), (jobs, 2), (others, 1)):
            own.sample(part, width)
    assert calls == {program.name for program in programs}
    assert "Finished XLA compilation of jit(load_slots)" in caplog.text, "a small program"
    names = ("decode_slots", "start_contexts", "extend_contexts")
    assert not [n for n in names if f"Finished XLA compilation of jit({n})" in caplog.text]


def test_no_program_copies_the_pages():
    """A program writes a few pages in place, because all of them may take most of the memory."""
    shapes = dataclasses.replace(SHAPES, kept_contexts=3000)
    model, config = split_policy(), split_policy().merge().config
    pages = slots.empty_pages.eval_shape(config, 1, context_cache.kept_pages(shapes))
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(pages))
    cache = slots.init_cache(config, 4, 64)
    numbers, table = np.zeros((1, 4), np.int32), np.zeros((1, 4, 4), np.int32)
    programs = [slots.store_slots.lower(pages, cache, numbers, table)]
    jobs = [SamplingJob((), 0, 1.0, 1.0, 8)]
    for program in slot_programs(model, tokenizer(), jobs, shapes):
        if program.name.startswith("prefill"):
            programs.append(program.function.lower(*program.args))
    assert len(programs) > 4
    for program in programs:
        memory = program.compile().memory_analysis()
        assert memory.temp_size_in_bytes < size / 8 and memory.alias_size_in_bytes >= size


# One size of chunks; padding up to four contexts in place of three; prompts of less than a chunk.
CHUNKED = [
    SHAPES,
    Shapes((100, 200), max_new_tokens=150, max_prompt_tokens=1024, decode_rows=3),
    Shapes((10,), max_new_tokens=8, max_prompt_tokens=8, decode_rows=5),
    Shapes((100, 200), max_new_tokens=150, decode_rows=16, slot_tokens=1024),
]


def waves(shapes: Shapes, limit: int, capacity: int) -> Iterator[list[Reservation]]:
    """Contexts that are computed together: equal ones, and random ones."""
    rng = np.random.default_rng(0)
    fitting = [
        Reservation(np.zeros(prompt - 1, np.int32), start, (), 0)
        for prompt in range(1, shapes.prompt_lengths[-1] + 1)
        for start in (0, 1, 7)
        if start < prompt and first_capacity(prompt, limit, shapes) <= capacity
    ]
    for count in range(1, engine.slot_counts(shapes, capacity)[-1] + 1):
        choices = rng.integers(len(fitting), size=(100, count)).tolist()
        for part in [*([i] * count for i in range(len(fitting))), *choices]:
            yield [fitting[i] for i in part]


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("shapes", CHUNKED)
@pytest.mark.parametrize("limit", [2, 100])
def test_the_listed_chunks_are_those_that_prompts_are_divided_into(
    shapes, limit, platform, monkeypatch
):
    monkeypatch.setattr(grouping, "target_platform", lambda: platform)
    expected = {
        ChunkShape(first_chunk_capacity(length) if is_first else capacity, length, count, is_first)
        for capacity in {shape.capacity for shape in decode_shapes(shapes, limit)}
        for wave in waves(shapes, limit, capacity)
        for parts, count, length in context_cache._chunks([wave], shapes)
        for is_first in [parts[0][0][1] == 0]
    }
    assert {*chunk_shapes(shapes, limit)} == expected


def test_an_accelerator_compiles_no_sizes_that_are_hardly_faster(monkeypatch):
    """64 slots, chunks of 64 tokens in all, and contexts of 256 tokens are the smallest."""
    shapes = Shapes((512,), batch_sizes=(1, 64), max_new_tokens=1024, decode_rows=256)
    sizes = {}
    for platform in ("cpu", "gpu"):
        monkeypatch.setattr(grouping, "target_platform", lambda platform=platform: platform)
        decoding, chunks = decode_shapes(shapes, limit=9), chunk_shapes(shapes, limit=9)
        sizes[platform] = (
            min(slots for _, slots in decoding),
            min(chunk.length * chunk.contexts for chunk in chunks),
            min(chunk.capacity for chunk in chunks if not chunk.is_first),
        )
    assert sizes == {"cpu": (1, 16, 64), "gpu": (64, 64, 256)}


def test_contexts_start_no_smaller_than_replies_need():
    shapes = Shapes((100, 200), batch_sizes=(2,), max_new_tokens=150, decode_rows=5)
    capacities = {
        limit: [c for c, n in decode_shapes(shapes, limit) if n == 5] for limit in (9, 99)
    }
    assert capacities == {9: [384, 256, 128, 64], 99: [384, 256, 128]}
    assert {slots for _, slots in decode_shapes(shapes, 9)} == {5, 2}


@pytest.mark.parametrize("shapes", CHUNKED)
def test_the_plan_counts_the_programs_of_the_shortest_replies(shapes):
    jobs = [SamplingJob((), 0, 1.0, 1.0, limit) for limit in (1, 8)]
    counts = [len(slot_programs(split_policy(), tokenizer(), jobs[:n], shapes)) for n in (0, 1)]
    assert counts == [0, count_slot_programs(shapes)]
