"""Tokens, their probabilities and their ends, for any batch."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_ragrl.plan.traffic import program_traffic
from jax_ragrl.runtime.topology import describe_devices
from jax_ragrl.sampling import decode
from jax_ragrl.sampling.decode import (
    Grammar,
    Samples,
    _likeliest,
    gumbel_sample,
    rows_minor,
    sample_token,
    scaled,
    start_decode,
    top_p_filter,
)
from jax_ragrl.sampling.grouping import pad_ids, pad_prompts
from jax_ragrl.sampling.sampler import JobSamples, SamplingJob, Shapes, sample_jobs
from tests.tiny import split_policy, tokenizer

DIGITS = "[0-9]+"
SHAPES = Shapes(prompt_lengths=(16, 32, 64), batch_sizes=(2, 8), max_new_tokens=12)


def jobs_of(lengths: list[int], temperature: float = 1.0, top_p: float = 1.0) -> list[SamplingJob]:
    rng = np.random.default_rng(0)
    return [
        SamplingJob(tuple(rng.integers(3, 250, n).tolist()), 100 + i, temperature, top_p, 12)
        for i, n in enumerate(lengths)
    ]


def sample(jobs: list[SamplingJob], width: int = 2) -> JobSamples:
    return sample_jobs(split_policy(), tokenizer(), jobs, width, SHAPES)


def test_batch_sizes_grow_with_the_number_of_devices():
    shapes = Shapes(
        prompt_lengths=(512, 1024, 2048, 4096), batch_sizes=(16, 64), max_prompt_tokens=65536
    )
    assert [shapes.max_batch_size(n) for n in shapes.prompt_lengths] == [64, 64, 16, 16]
    assert shapes.global_batch_sizes(8) == [16, 64, 128, 512]
    assert [shapes.max_batch_size(n, 8) for n in shapes.prompt_lengths] == [512, 512, 128, 128]
    assert shapes.global_batch_sizes(3) == [18, 48, 66, 192]  # every size divides over the devices


def test_siblings_differ_by_their_seed_unless_only_the_likeliest_token_is_taken():
    jobs = jobs_of([8])
    first, second = sample(jobs)[0]
    assert first[0] != second[0]
    assert sample(jobs)[0][0] == first
    other = [jobs[0]._replace(seed=7)]
    assert sample(other)[0][0][0] != first[0]
    greedy = sample(jobs_of([8], temperature=0.0))[0]
    assert greedy[0] == greedy[1]
    almost = sample(jobs_of([8], temperature=1e-4))[0]
    assert almost[0][0] == greedy[0][0]
    nucleus = sample(jobs_of([8], top_p=1e-6))[0]
    assert nucleus[0][0] == sample(jobs_of([8], temperature=0.0))[0][0][0]


@pytest.mark.parametrize("top_p", [None, 0.7])
def test_tokens_are_sampled_in_proportion_to_their_probability(top_p):
    """At temperature 0.5, in 20,000 rows, whatever the token before is; a nucleus of 0.7 holds the
    first two tokens. The log-probability is the one before the nucleus filter."""
    rows, prob_V = 20_000, np.array([0.4, 0.3, 0.2, 0.1])
    logits_BV = np.tile(np.log(prob_V), (rows, 1)).astype(np.float32)
    heat_B = np.full(rows, 0.5, np.float32)
    top_p_B = None if top_p is None else np.full(rows, top_p, np.float32)
    args = jax.device_put((logits_BV, heat_B, top_p_B))
    keys_B = jax.random.split(jax.random.key(0), rows)
    draw = jax.jit(lambda t, x, keys: sample_token(scaled(x[0], x[1]), t, x[1], x[2], keys))
    samples = [jax.device_get(draw(jax.device_put(np.int32(t)), args, keys_B)) for t in (0, 1)]
    full_V = prob_V**2 / (prob_V**2).sum()
    nucleus_V = full_V * (np.arange(4) < (4 if top_p is None else 2))
    nucleus_V /= nucleus_V.sum()
    frequency_VV = np.zeros((4, 4))
    np.add.at(frequency_VV, (samples[0][0], samples[1][0]), 1 / rows)
    np.testing.assert_allclose(frequency_VV, np.outer(nucleus_V, nucleus_V), atol=0.015)
    for ids_B, logps_B in samples:
        np.testing.assert_allclose(logps_B, np.log(full_V)[ids_B], rtol=1e-4)


@pytest.mark.parametrize("vocab", [4096, 5000, 16 * 8 * 39, 5120])
def test_two_level_sampling_keeps_the_probabilities(vocab):
    """Two tokens are adjacent, one is near and one is the last, followed by padding. Each row has
    its own key, and other rows change nothing."""
    rows, tokens, prob = 3000, [0, 1, 41, vocab - 1], np.array([0.4, 0.3, 0.2, 0.1])
    logits_V = np.full(vocab, -np.inf, np.float32)
    logits_V[tokens] = np.log(prob)
    keys_B = jax.random.split(jax.random.key(1), rows)

    @jax.jit
    def draw(x_V, keys_B):
        x_BV = jax.lax.broadcast(x_V, keys_B.shape)
        return gumbel_sample(x_BV, jnp.max(x_BV, axis=1), keys_B)

    ids_B, total_B = jax.device_get(draw(jax.device_put(logits_V), keys_B))
    np.testing.assert_allclose(total_B, 1 / 0.4, rtol=1e-5)
    frequencies = [float((ids_B == token).mean()) for token in tokens]
    np.testing.assert_allclose(frequencies, prob, atol=0.03)
    few_B = jax.device_get(draw(jax.device_put(logits_V), keys_B[:7]))[0]
    np.testing.assert_array_equal(few_B, ids_B[:7])


def test_a_greedy_token_is_the_first_of_the_likeliest_at_temperature_one():
    logits_BV = np.log(np.array([[0.1, 0.6, 0.3]], np.float32))
    zero_B = np.zeros(1, np.float32)
    args = jax.device_put((logits_BV, np.int32(0), zero_B, zero_B + 1))
    keys_B = jax.random.split(jax.random.key(0), 1)
    ids_B, logps_B = jax.device_get(jax.jit(sample_token)(*args, keys_B))
    assert ids_B.tolist() == [1] and logps_B[0] == pytest.approx(np.log(0.6), rel=1e-5)
    low = -np.inf
    logits_BV = np.array([[0, 2, 2], [low, low, low], [low, 1, low], [-3, -4, -3]], np.float32)
    ids_B = jax.device_get(jax.jit(_likeliest)(jax.device_put(logits_BV)))
    np.testing.assert_array_equal(ids_B, np.argmax(logits_BV, axis=-1))


def test_a_token_mask_allows_nothing_else():
    free = jobs_of([5, 9])
    masked = [job._replace(allowed_token_regex=DIGITS) for job in free]
    samples = sample([*free, *masked])
    # Jobs with and without a mask are in separate batches, and do not change each other.
    assert samples[:2] == sample(free)
    texts = [tokenizer().decode([i]) for rows in samples[2:] for row in rows for i in row.ids]
    assert texts and all(re.fullmatch(DIGITS + "|", text) for text in texts)
    allowed = tokenizer().allowed_tokens(DIGITS)
    assert allowed is not None and allowed[list(tokenizer().stop_ids)].all()
    assert tokenizer().allowed_tokens("") is None


def sample_batch(jobs, prompts, length, stride=1) -> Samples:
    ids_BL = pad_ids([job.ids for job in jobs], len(prompts.length_B), length)
    stops, zero_W = np.array(tokenizer().stop_ids, np.int32), np.zeros(1, np.int32)
    prompts, ids_BL, stops, zero_W = jax.device_put((prompts, ids_BL, stops, zero_W))
    state, prefix = start_decode(split_policy(), prompts, ids_BL, slots=12)
    args = split_policy(), prompts, Grammar(stops), zero_W, state, prefix
    return jax.device_get(decode.decode(*args, use_top_p=False, stride=stride).samples())


def test_a_stride_between_checks_changes_no_result():
    """The stride 5 does not divide 12 steps, and some rows have a limit above 12: nothing is
    written past the end."""
    jobs = [job._replace(limit=3 + 4 * i) for i, job in enumerate(jobs_of([6, 16, 8, 9]))]
    prompts = pad_prompts([[job] for job in jobs], 8, width=2)
    every_step, every_fifth = (sample_batch(jobs, prompts, 16, stride=stride) for stride in (1, 5))
    for one, other in zip(every_step, every_fifth, strict=True):
        np.testing.assert_array_equal(one, other)
    assert every_step.count_B.max() == 12 and (every_step.count_B[8:] == 0).all()


@pytest.mark.slow
def test_a_gpu_divides_the_stored_logits_with_equal_results(monkeypatch):
    """There a state has logits before the division; a few tokens of rows of two temperatures."""
    jobs = [job for temperature in (0.5, 2.0) for job in jobs_of([6], temperature)]
    prompts = pad_prompts([[job] for job in jobs], 2, width=2)

    def samples() -> Samples:
        # New functions, because compiled ones keep the platform that they were traced for.
        jax.clear_caches()
        return sample_batch(jobs, prompts, 8)

    divided_when_written = samples()
    monkeypatch.setattr(decode, "_stored", lambda logits_BV, _: logits_BV)
    assert not np.allclose(samples().logps_BT, divided_when_written.logps_BT)
    monkeypatch.setattr(decode, "_loaded", scaled)
    for one, other in zip(samples()[:3], divided_when_written[:3], strict=True):
        np.testing.assert_array_equal(one, other)


def test_top_p_one_filters_nothing_beside_filtered_rows():
    """The rounded probability of the first token is 1; the others are allowed nevertheless."""
    logits_BV = np.tile(-30.0 * np.arange(4, dtype=np.float32), (2, 1))
    top_p_B = np.array([1.0, 0.9], np.float32)
    unfiltered, nucleus = jax.device_get(top_p_filter(*jax.device_put((logits_BV, top_p_B))))
    np.testing.assert_array_equal(unfiltered, logits_BV[0])
    assert np.isfinite(nucleus).sum() == 1


@pytest.mark.parametrize("width", [1, 2])
def test_a_row_ends_when_its_text_contains_a_stop_string(width: int):
    """The row is a prefix of the row without stop strings."""
    jobs = jobs_of([5, 9, 17, 30, 12, 8, 14, 31])
    free = sample(jobs, width)
    text = "".join(tokenizer().decode(rows[0][0]) for rows in free)
    pairs = [a + b for a, b in zip(text, text[1:], strict=False) if (a + b).isascii()]
    stops = (*pairs[::9], "never written")
    stopped_rows = sample([job._replace(stop_strings=stops) for job in jobs], width)
    ends = 0
    for (ids, logps, _), row in zip(sum(free, []), sum(stopped_rows, []), strict=True):
        prefixes = [tokenizer().decode(ids[: n + 1]) for n in range(len(ids))]
        has_stop = [any(stop in prefix for stop in stops) for prefix in prefixes]
        size = has_stop.index(True) + 1 if any(has_stop) else len(ids)
        assert row == (ids[:size], logps[:size], None)
        ends += any(has_stop)
    assert 0 < ends < len(sum(free, []))


def test_roles_with_different_stop_strings_do_not_mix():
    jobs = jobs_of([5, 9])
    both = sample(
        [jobs[0]._replace(stop_strings=("a",)), jobs[1]._replace(stop_strings=("ec", "R"))]
    )
    assert both[0] == sample([jobs[0]._replace(stop_strings=("a",))])[0]
    assert both[1] == sample([jobs[1]._replace(stop_strings=("ec", "R"))])[0]


@pytest.mark.parametrize("parts", [2, 8])
@pytest.mark.parametrize("logit", [-3.0, 0.0, 1e-30, 17.3])
def test_the_nucleus_search_resolves_adjacent_floats(logit, parts):
    pair = np.array([[logit, np.nextafter(np.float32(logit), np.float32(99))]], np.float32)
    args = jax.device_put((pair, np.array([0.3], np.float32)))
    nucleus = jax.device_get(top_p_filter(*args, parts))
    np.testing.assert_array_equal(np.isfinite(nucleus), [[False, True]])


@pytest.mark.parametrize("parts", [2, 8])
@pytest.mark.parametrize("top_p", [1e-5, 0.3, 0.9, 0.999, 1.0])
def test_a_nucleus_is_the_smallest_set_that_reaches_top_p(top_p, parts):
    """Logits of both signs, with equal ones and masked ones among them."""
    rng = np.random.default_rng(0)
    logits_BV = np.round(rng.normal(size=(20, 400)) * 6, 1).astype(np.float32)
    logits_BV[:, ::7] = -np.inf
    top_p_B = np.full(20, top_p, np.float32)
    nucleus_BV = jax.device_get(top_p_filter(*jax.device_put((logits_BV, top_p_B)), parts))
    for logits, nucleus in zip(logits_BV.astype(np.float64), nucleus_BV, strict=True):
        probs = np.exp(logits) / np.exp(logits).sum()
        above = np.array([probs[logits > x].sum() for x in logits])
        expected = ((above < top_p - 1e-6) | (top_p == 1)) & np.isfinite(logits)
        np.testing.assert_array_equal(np.isfinite(nucleus), expected)
        np.testing.assert_array_equal(nucleus[expected], logits[expected])


ROWS, VOCAB, WIDTH = 256, 151936, 896


@pytest.mark.slow
def test_a_draw_on_a_tpu_moves_the_logits_four_times(monkeypatch):
    """One write and three reads: the largest logit, the sums of the blocks, the block of a row."""
    pytest.importorskip("libtpu")
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    mesh = Mesh(np.array(describe_devices("v5e:2x2")[:1]), ("x",))
    everywhere = NamedSharding(mesh, PartitionSpec())

    def array(shape: tuple[int, ...], dtype: str) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=everywhere)

    def draw(hidden_BD, head_VD, t, temperature_B, keys):
        logits_BV = jnp.einsum("bd,vd->bv", hidden_BD, head_VD, preferred_element_type=jnp.float32)
        logits_BV = rows_minor(scaled(logits_BV, temperature_B))
        return sample_token(logits_BV, t, temperature_B, None, jax.random.wrap_key_data(keys))

    arguments = (
        array((ROWS, WIDTH), "bfloat16"),
        array((VOCAB, WIDTH), "bfloat16"),
        array((), "int32"),
        array((ROWS,), "float32"),
        array((ROWS, 2), "uint32"),
    )
    traffic = program_traffic(jax.jit(draw).lower(*arguments).compile().as_text())
    logits, head = 4 * ROWS * VOCAB, 2 * VOCAB * WIDTH
    assert 4 * logits + head <= traffic.hbm_bytes < 1.01 * (4 * logits + head)
