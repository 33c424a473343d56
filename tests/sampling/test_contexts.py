"""Kept contexts change no token, share pages, and are given up in the order of their last use."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ragrl.runtime.sharding import commit_like, sharding_of_results
from jax_ragrl.sampling import jobs as jobs_module
from jax_ragrl.sampling.contexts import PAGE, KeptContexts
from jax_ragrl.sampling.sampler import JobSampler, SamplingJob, Shapes
from tests.sampling.test_batches import jobs_of
from tests.sampling.test_grouping import assert_equal_samples
from tests.tiny import split_policy, tokenizer

ROLE = "instructions of a role: "  # a page and a half


def ids(text: str) -> np.ndarray:
    return np.array([ord(c) for c in text], np.int32)


def kept(*texts: str, pages: int = 8) -> KeptContexts:
    contexts = KeptContexts(pages)
    for text in texts:
        contexts.add(ids(text))
        contexts.release()
    return contexts


def test_contexts_share_full_pages_of_which_those_used_longest_ago_are_given_up():
    contexts = kept("a" * 40, "a" * 16 + "b" * 16)
    assert len(contexts.match(ids("a" * 40))) == 2
    assert contexts.match(ids("a" * 16 + "b" * 20))[0] == contexts.match(ids("a" * 20))[0]
    assert contexts.match(ids("a" * 15)) == contexts.match(ids("b" * 40)) == []
    # One token at least is run.
    assert len(contexts.match(ids("a" * 32))) == 1
    contexts = KeptContexts(8)
    assert [*contexts.add(ids(ROLE + "one" * 5))] == [0, 1]
    assert [*contexts.add(ids(ROLE + "two" * 5))] == [1]
    assert contexts.add(ids(ROLE)) == {}
    contexts = kept("a" * 48, "b" * 16, pages=4)
    assert len(contexts.match(ids("a" * 17))) == 1  # used again, and pinned
    assert len(contexts.add(ids("c" * 48))) == 3  # a page of b, and two of a
    assert len(contexts.match(ids("a" * 49))) == 1 and contexts.match(ids("b" * 17)) == []
    # Now all pages are pinned.
    assert contexts.add(ids("d" * 16)) == {}
    contexts.release()
    assert len(contexts.add(ids("d" * 16))) == 1


def test_no_page_is_in_two_contexts_of_a_long_random_use():
    rng, contexts, texts = np.random.default_rng(0), KeptContexts(20), dict[int, bytes]()
    for _ in range(300):
        start = rng.integers(3, size=2)
        context = np.concatenate([np.repeat(start, PAGE), rng.integers(4, size=rng.integers(60))])
        pages = contexts.match(context.astype(np.int32))
        for place, number in enumerate(pages):
            assert texts[number] == context[: PAGE * (place + 1)].astype(np.int32).tobytes()
        new = contexts.add(context.astype(np.int32))
        for place, number in new.items():
            texts[number] = context[: PAGE * (place + 1)].astype(np.int32).tobytes()
        contexts.release()


SHAPES = Shapes((64, 128), (1, 2, 4), max_new_tokens=32, kept_contexts=16)


@pytest.mark.slow
@pytest.mark.parametrize("regex", ["", "[a-z ]+"])
@pytest.mark.parametrize("first_cache", [16, 32])
def test_conversations_have_the_tokens_of_whole_prompts(first_cache, regex, monkeypatch):
    """Of unequal lengths, with siblings that both continue; batches grow and shrink."""
    monkeypatch.setattr(jobs_module, "FIRST_CACHE", first_cache)
    whole, conversation = (
        JobSampler(split_policy(), tokenizer(), shapes)
        for shapes in (dataclasses.replace(SHAPES, kept_contexts=0), SHAPES)
    )
    jobs = [job._replace(ids=(7,) * 20 + job.ids) for job in jobs_of([30, 3, 18], regex=regex)]
    for turn in range(3):
        expected, actual = (own.start(jobs, 2)() for own in (whole, conversation))
        assert_equal_samples(actual, expected)
        jobs = [
            next_turn(job, row.ids, turn)
            for job, rows in zip(jobs, actual, strict=True)
            for row in rows
        ]
        jobs = jobs[::2] if turn else jobs
    tokens = [own.counters.prefill_tokens for own in (whole, conversation)]
    assert tokens[1] < 0.8 * tokens[0]


def next_turn(job: SamplingJob, reply: tuple[int, ...], turn: int) -> SamplingJob:
    observation = tuple(range(10 + turn, 17 + turn))
    return job._replace(ids=(*job.ids, *reply, *observation), seed=job.seed + 10 * len(reply) + 1)


def test_equal_prompts_with_several_seeds_keep_the_contexts_of_all_rows():
    job, sampler = jobs_of([20])[0]._replace(ids=(5,) * 30), None
    sampler = JobSampler(split_policy(), tokenizer(), SHAPES)
    rows = sampler.start([job._replace(seed=seed) for seed in range(3)], 1)()
    before = sampler.counters.prefill_tokens
    jobs = [next_turn(job, row.ids, 0) for [row] in rows]
    sampler.start(jobs, 1)()
    assert sampler.counters.prefill_tokens - before <= 4 * 32


@pytest.mark.parametrize("is_committed", [False, True])
def test_arrays_are_committed_as_the_results_of_a_program_would_be(is_committed):
    x, weights = jnp.arange(4.0), jnp.ones(4)
    arguments = (x, jax.device_put(weights, jax.devices()[0]) if is_committed else weights)
    result, placed = jax.jit(jnp.multiply)(*arguments), commit_like(x, arguments)
    assert placed.committed == result.committed == is_committed
    assert (sharding_of_results(arguments) == result.sharding) == is_committed
    assert placed.unsafe_buffer_pointer() == x.unsafe_buffer_pointer(), "a copy"
