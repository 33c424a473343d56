"""Slots that are refilled sample the tokens of batches, with less work."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

from jax_ragrl.bench.tape import POLICY, TapeWork, bench_tape, read_tape, replay, summary
from jax_ragrl.bench.tape import TOKENIZER as TAPE_TOKENIZER
from jax_ragrl.models.decoder import Decoder, init_sharded
from jax_ragrl.runtime.sharding import make_mesh
from jax_ragrl.sampling import engine as engine_module
from jax_ragrl.sampling import slots
from jax_ragrl.sampling.engine import SlotEngine
from jax_ragrl.sampling.sampler import JobSampler, Row, SamplingJob, Shapes, sample_jobs
from jax_ragrl.sampling.slot_programs import decode_shapes
from jax_ragrl.sampling.weights import for_sampling
from tests.sampling.test_batches import jobs_of
from tests.tiny import split_policy, tokenizer

# The first cache holds 64 tokens per context, which rows of 60 new tokens exceed.
SHAPES = Shapes(
    prompt_lengths=(16, 160),
    batch_sizes=(2,),
    max_new_tokens=64,
    initial_cache_size=16,
    decode_rows=4,
)
BATCHES = dataclasses.replace(SHAPES, batch_sizes=(4,), initial_cache_size=64, decode_rows=0)


def engine(model=None, **shapes: int) -> SlotEngine:
    shapes = dataclasses.replace(SHAPES, **shapes)
    return SlotEngine(model or split_policy(), tokenizer(), shapes)


def assert_equal_rows(actual: list[list[Row]], expected: list[list[Row]]) -> None:
    for rows, others in zip(actual, expected, strict=True):
        assert [row.ids for row in rows] == [row.ids for row in others]
        for row, other in zip(rows, others, strict=True):
            np.testing.assert_allclose(row.logps, other.logps, atol=1e-5)
            assert (row.removed is None) == (other.removed is None)
            np.testing.assert_allclose(row.removed or 0.0, other.removed or 0.0, atol=1e-5)


@pytest.mark.parametrize(
    "width, options, strict",
    [
        (1, {"regex": "[a-z ]+", "stops": ("ab", "never written")}, ""),
        (3, {"top_p": 0.9}, ""),
        (1, {}, "[0-9]+, [0-9]+"),
    ],
)
def test_slots_sample_the_tokens_of_batches(width, options, strict):
    """Eleven prompts in four slots: refilled, shrunk to two at the end, with larger caches."""
    jobs = jobs_of([60, 3, 18, 7, 5, 25, 4, 4, 12, 60, 9], **options)
    jobs = [job._replace(action_regex=strict) for job in jobs]
    expected = sample_jobs(split_policy(), tokenizer(), jobs, width, BATCHES)
    own = engine()
    assert_equal_rows(own.sample(jobs, width), expected)
    assert own.contexts.capacity == (128 if width == 3 else 64)  # one row of 72 tokens
    assert own.counters.tokens == sum(len(row.ids) for rows in expected for row in rows)
    # All of the work of rows that are done is at the end, or until two slots are refilled.
    assert own.counters.tokens <= own.counters.row_steps < 1.5 * own.counters.tokens


def test_contexts_grow_no_farther_than_the_longest_one():
    """Prompts of 96 tokens and 64 new ones fill 160 places, which powers of two hold in 256."""
    jobs = [job._replace(ids=(*job.ids, *[5] * (96 - len(job.ids)))) for job in jobs_of([64, 40])]
    shapes = {"prompt_lengths": (96,), "max_new_tokens": 64}
    expected = sample_jobs(
        split_policy(), tokenizer(), jobs, 1, dataclasses.replace(BATCHES, **shapes)
    )
    own = engine(**shapes)
    assert_equal_rows(own.sample(jobs, 1), expected)
    assert own.contexts.capacity == 192


@pytest.mark.parametrize(
    ("live", "refill_at", "is_due"),
    [
        ([6, 8, 8, 8], [7, 7, 7, 7], False),  # two slots are free on one device, and none elsewhere
        ([6, 8, 7, 7], [7, 7, 7, 7], True),
        ([0, 8, 8, 8], [7, -1, 7, 7], True),  # one device waits for the others
        ([0, 8, 8, 8], [-1, 7, 7, 7], False),  # its rows are all done
        ([1, 0, 0, 0], [-1, -1, -1, -1], False),  # nothing waits: slots are given up instead
        ([7], [7], True),
        ([8], [7], False),
    ],
)
def test_free_slots_of_all_devices_are_refilled_together(live, refill_at, is_due):
    arrays = jax.device_put((np.array(live, np.int32), np.array(refill_at, np.int32)))
    assert bool(jax.device_get(slots.is_refill_due(*arrays))) is is_due


def test_slots_of_several_devices_sample_the_tokens_of_one():
    jobs = jobs_of([9, 3, 18, 7, 1, 25, 4, 4, 12, 8, 2, 5, 6], top_p=0.9)
    mesh = make_mesh((1, 4, 1), jax.devices()[:4])
    decoder = init_sharded(split_policy().merge().config, mesh, nnx.Rngs(0))
    sharded = for_sampling({"policy": decoder})["policy"]
    alone = for_sampling({"policy": Decoder(decoder.config, rngs=nnx.Rngs(0))})["policy"]
    expected = engine(alone).sample(jobs, 2)
    own = engine(sharded, decode_rows=2)
    assert_equal_rows(own.sample(jobs, 2), expected)
    # Every device had work: eight slots, so fewer steps than one device needs at least.
    pages = own.contexts.pages.k[0]
    assert pages.sharding.shard_shape(pages.shape)[:2] == (1, 2 * 14 + 1)
    follow = [
        job._replace(ids=job.ids + rows[0].ids) for job, rows in zip(jobs, expected, strict=True)
    ]
    assert_equal_rows(own.sample(follow, 1), engine(alone).sample(follow, 1))


def conversation(own: SlotEngine | JobSampler, turns: int) -> list[list[list[Row]]]:
    """Three conversations whose every turn follows the last reply and an observation."""
    jobs, rng, rounds = jobs_of([9, 14, 6]), np.random.default_rng(1), []
    for _ in range(turns):
        rounds.append(own.sample(jobs, 2) if isinstance(own, SlotEngine) else own.start(jobs, 2)())
        jobs = [
            job._replace(ids=job.ids + rows[1].ids + tuple(rng.integers(3, 250, 10).tolist()))
            for job, rows in zip(jobs, rounds[-1], strict=True)
        ]
    return rounds


def test_a_conversation_computes_only_what_is_new():
    batches = JobSampler(split_policy(), tokenizer(), BATCHES)
    expected = conversation(batches, 4)
    kept, evicted = engine(kept_contexts=16), engine(decode_rows=2, kept_contexts=1)
    for own in (kept, evicted):
        for rows, others in zip(conversation(own, 4), expected, strict=True):
            assert_equal_rows(rows, others)
    # One chunk of 16 per conversation and turn; contexts that were given up cost more.
    assert kept.counters.prefill_tokens == 3 * 4 * 16
    assert 3 * 4 * 16 < evicted.counters.prefill_tokens < batches.counters.prefill_tokens


def streamed(own: SlotEngine, waves: list[list[tuple[SamplingJob, int]]]) -> dict[int, list[Row]]:
    """Samples jobs that arrive in waves, one per program that decodes."""
    rest = iter(waves[1:])
    pairs = [*own.stream(waves[0], lambda: next(rest, []))]
    assert len({number for number, _ in pairs}) == len(pairs)
    return dict(pairs)


def test_jobs_that_arrive_take_free_slots_while_others_run(monkeypatch: pytest.MonkeyPatch):
    """One long row, and later nine short jobs, with longer prompts, more rows and other options."""
    monkeypatch.setattr(engine_module, "STREAM_STEPS", 8)
    (long_job, *others) = jobs_of([60, 3, 4, 2, 5, 3, 4, 2, 5, 6])
    others = [job._replace(ids=(*job.ids, *range(5, 5 + 12 * i))) for i, job in enumerate(others)]
    others[4] = others[4]._replace(top_p=0.8)
    widths = [1, 1, 2, 3, 1, 1, 2, 1, 1, 1]
    jobs = [*zip([long_job, *others], widths, strict=True)]
    own, steps = engine(decode_rows=8), list[int]()
    own.counters.add_decode = lambda rows, count: steps.append(count)  # type: ignore[method-assign]
    rows = streamed(own, [jobs[:1], jobs[1:4], [], jobs[4:7], jobs[7:]])
    for n, (job, width) in enumerate(jobs):
        assert_equal_rows([rows[n]], engine().sample([job], width))
    assert [*rows][-1] == 0  # the long row ends last
    # All other rows took part in the steps of the long one.
    assert sum(steps) <= 64


BOUNDED = {"decode_rows": 8, "slot_tokens": 512}  # 8, 4 and 2 slots of 64, 128 and 256 tokens


def jobs_of_all_lengths() -> list[SamplingJob]:
    """Short, middle and long prompts in turn, with replies of 1 to 60 tokens."""
    jobs = jobs_of([9, 3, 18, 60, 1, 25, 4, 4, 12, 8, 40, 5, 6, 2])
    return [job._replace(ids=(job.ids * 15)[: (14, 50, 120)[i % 3]]) for i, job in enumerate(jobs)]


def sizes_of_programs(own: SlotEngine, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The slots and the tokens per context of each program that decodes, as it is called."""
    sizes, name = [], engine_module.decode_name

    def record(slots: int, capacity: int, kind: str) -> str:
        sizes.append((slots, capacity))
        return name(slots, capacity, kind)

    monkeypatch.setattr(engine_module, "decode_name", record)
    return sizes


def test_slots_hold_no_more_tokens_than_they_may(monkeypatch: pytest.MonkeyPatch):
    jobs, own = jobs_of_all_lengths(), engine(**BOUNDED)
    expected = engine().sample(jobs, 2)
    sizes = sizes_of_programs(own, monkeypatch)
    assert_equal_rows(own.sample(jobs, 2), expected)
    assert own.sample(jobs[:1], 1) and sizes[-1] == (2, 64)
    assert {*sizes} >= {(2, 256), (4, 128), (8, 64)}, "the longest first, in the fewest slots"
    assert {size for size in sizes if size[0] * size[1] > 512} == set()
    listed = [(shape.slots, shape.capacity) for shape in decode_shapes(own.shapes, limit=1)]
    assert {*sizes} <= {*listed}


def test_long_prompts_that_arrive_wait_for_few_live_rows(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(engine_module, "STREAM_STEPS", 8)
    jobs = [(job, 1) for job in jobs_of_all_lengths()]
    short = [(job._replace(limit=4 + 8 * i), 1) for i, (job, _) in enumerate(jobs[::3])]
    others = [job for i, job in enumerate(jobs) if i % 3][::-1]  # a long one first
    own = engine(**BOUNDED)
    sizes = sizes_of_programs(own, monkeypatch)
    rows = streamed(own, [short, others[:1], [], others[1:]])
    for n, (job, width) in enumerate([*short, *others]):
        assert_equal_rows([rows[n]], engine().sample([job], width))
    assert sizes[0] == (8, 64) and (2, 256) in sizes
    assert max(slots * capacity for slots, capacity in sizes) <= 512


def test_further_slots_are_empty():
    config = split_policy().merge().config
    state = slots.empty_slots(config, 4, 64, 16, is_strict=False)
    state = state._replace(done_B=jax.device_put(np.array([False, True, False, False])))
    numbers = jax.device_put(np.array([[0, 9, 9], [1, 0, 9]], np.int32))
    resized = slots.resize_slots(state, numbers)
    assert jax.device_get(resized.done_B).tolist() == [False, True, True, False, False, True]


@pytest.mark.parametrize("bounds", [{"decode_rows": 2}, {"decode_rows": 4, "slot_tokens": 256}])
def test_slots_of_several_devices_take_jobs_that_arrive(bounds: dict[str, int]):
    jobs = [(job, 1 + n % 2) for n, job in enumerate(jobs_of_all_lengths())]
    mesh = make_mesh((1, 4, 1), jax.devices()[:4])
    decoder = init_sharded(split_policy().merge().config, mesh, nnx.Rngs(0))
    own = engine(for_sampling({"policy": decoder})["policy"], **bounds)
    alone = for_sampling({"policy": Decoder(decoder.config, rngs=nnx.Rngs(0))})["policy"]
    rows = streamed(own, [jobs[:2], jobs[2:3], jobs[3:9], [], jobs[9:]])
    for n, (job, width) in enumerate(jobs):
        assert_equal_rows([rows[n]], engine(alone).sample([job], width))


def test_an_engine_repeats_its_work_exactly():
    """Bit for bit, also the log-probabilities: a resumed run starts with an empty engine."""
    first, second = (conversation(engine(kept_contexts=6), 3) for _ in range(2))
    assert first == second


def test_other_seeds_compile_nothing():
    programs = (slots.decode_slots, slots.extend_contexts, slots.load_slots, slots.store_slots)
    jobs, counts = jobs_of([9, 3, 18, 7, 1, 25]), []
    for seed in (0, 40):
        engine().sample([job._replace(seed=job.seed + seed, limit=9) for job in jobs], 1)
        counts.append([program._cache_size() for program in programs])
    assert counts[0] == counts[1]


def test_a_prompt_that_is_too_long_is_an_error():
    with pytest.raises(ValueError, match="161 tokens exceeds 160"):
        engine().sample([SamplingJob((5,) * 161, 0, 1.0, 1.0, 4)], 1)


@pytest.mark.slow
def test_the_tape_in_slots_wastes_little():
    """The bars: 1.3 row-steps per token and 1.2 prefilled tokens per distinct one."""
    equal = bench_tape(TapeWork(conversations=6))
    assert equal["equal_replies"] == 1.0
    model = for_sampling({"policy": Decoder(POLICY, rngs=nnx.Rngs(0))})["policy"]
    sampler = JobSampler(model, TAPE_TOKENIZER, TapeWork().shapes())
    rounds = [*replay(read_tape(), sampler, TapeWork().new)]
    result = summary(sampler.counters, [job.ids for jobs, _ in rounds for job in jobs])
    assert result["row_steps_per_token"] < 1.3
    assert result["prefill_per_distinct_token"] < 1.2
