from __future__ import annotations

import re

import jax
import numpy as np
import pytest
from flax import nnx

from jax_ragrl.learner.gradients import score
from jax_ragrl.learner.packing import Layout, Turn, by_action, grouped, lay_out
from jax_ragrl.sampling.decode import Grammar, choose, drawn, generate, only, truncated
from jax_ragrl.sampling.sampler import Job, Shapes, chunks, pad_prompts, sample_jobs
from tests.tiny import policy, tokenizer

DIGITS = "[0-9]+"
SHAPES = Shapes(lengths=(16, 32, 64), batches=(2, 8), steps=12)


def jobs_of(lengths: list[int], temperature: float = 1.0, top_p: float = 1.0) -> list[Job]:
    rng = np.random.default_rng(0)
    return [
        Job(tuple(rng.integers(3, 250, n).tolist()), 100 + i, temperature, top_p, 12)
        for i, n in enumerate(lengths)
    ]


def sample(
    jobs: list[Job], width: int = 2
) -> list[list[tuple[tuple[int, ...], tuple[float, ...]]]]:
    return sample_jobs(*policy(), tokenizer(), jobs, width, SHAPES)


@pytest.mark.parametrize(("temperature", "digits"), [(0.7, ()), (1.0, ()), (0.7, (1, 4))])
def test_scoring_reproduces_the_samplers_log_probabilities(temperature: float, digits: tuple):
    jobs = jobs_of([5, 16, 17, 31, 60], temperature)  # every bucket, full and padded
    jobs = [job._replace(tokens=DIGITS if i in digits else "") for i, job in enumerate(jobs)]
    drawn = sample(jobs)
    turns = [
        Turn(2 * i + k, "masked" if i in digits else "free", job.ids, ids)
        for i, (job, rows) in enumerate(zip(jobs, drawn, strict=True))
        for k, (ids, _) in enumerate(rows)
    ]
    seen = {2 * i + k: logps for i, rows in enumerate(drawn) for k, (_, logps) in enumerate(rows)}
    layout = Layout(lengths=(48, 96), tokens=192)
    mask_V = tokenizer().allowed(DIGITS)
    allowed_ZV = jax.device_put(np.stack([np.ones_like(mask_V), mask_V])) if digits else None
    checked = 0
    for batch in lay_out(grouped(turns, layout), ["free", "masked"], layout):
        heat = jax.device_put(np.float32(temperature))
        reading = score(*policy(), nnx.State({}), jax.device_put(batch.rows), heat, allowed_ZV)
        assert np.isfinite(jax.device_get(reading.entropy_RM)).all()
        logp_AT = by_action([batch], [jax.device_get(reading.logp_RM)], 12)
        for node, logps in zip(batch.actions.node_A.tolist(), logp_AT, strict=True):
            np.testing.assert_allclose(logps[: len(seen[node])], seen[node], atol=1e-4)
            checked += 1
    assert checked == 10


def test_a_question_sampled_alone_gets_the_tokens_it_gets_among_others():
    jobs = jobs_of([5, 9, 17, 30, 12])
    together = sample(jobs)
    for job, rows in zip(jobs, together, strict=True):
        assert [ids for ids, _ in sample([job])[0]] == [ids for ids, _ in rows]


def test_batches_grow_with_the_devices_that_share_them():
    shapes = Shapes(lengths=(512, 1024, 2048, 4096), batches=(16, 64), tokens=65536)
    assert [shapes.most(n) for n in shapes.lengths] == [64, 64, 16, 16]
    assert shapes.sizes(8) == [16, 64, 128, 512]
    assert [shapes.most(n, 8) for n in shapes.lengths] == [512, 512, 128, 128]
    assert [shapes.batch(n, 1024, 8) for n in (3, 17, 65, 400, 999)] == [16, 64, 128, 512, 512]
    assert shapes.sizes(3) == [18, 48, 66, 192]  # every size divides over the devices
    jobs = [Job((1,) * 600, i, 1.0, 1.0, 4) for i in range(1000)]
    assert [len(chunk) for chunk, _ in chunks(jobs, shapes, 8)] == [512, 488]


def test_siblings_differ_and_a_seed_repeats_them():
    jobs = jobs_of([8])
    first, second = sample(jobs)[0]
    assert first[0] != second[0]
    assert sample(jobs)[0][0] == first
    other = [jobs[0]._replace(seed=7)]
    assert sample(other)[0][0][0] != first[0]


@pytest.mark.parametrize("top_p", [None, 0.7])
def test_tokens_are_drawn_as_often_as_they_are_likely_whatever_was_drawn_before(top_p):
    """At temperature 0.5, of 20,000 rows each; a nucleus of 0.7 holds the first two. Reported is
    the probability before anything is left out."""
    rows, prob_V = 20_000, np.array([0.4, 0.3, 0.2, 0.1])
    logits_BV = np.tile(np.log(prob_V), (rows, 1)).astype(np.float32)
    heat_B = np.full(rows, 0.5, np.float32)
    top_p_B = None if top_p is None else np.full(rows, top_p, np.float32)
    given = jax.device_put((logits_BV, heat_B, top_p_B))
    keys_B = jax.random.split(jax.random.key(0), rows)
    draw = jax.jit(lambda t, x, keys: choose(x[0], t, x[1], x[2], keys))
    drawn = [jax.device_get(draw(jax.device_put(np.int32(t)), given, keys_B)) for t in (0, 1)]
    whole_V = prob_V**2 / (prob_V**2).sum()
    kept_V = whole_V * (np.arange(4) < (4 if top_p is None else 2))
    kept_V /= kept_V.sum()
    found_VV = np.zeros((4, 4))
    np.add.at(found_VV, (drawn[0][0], drawn[1][0]), 1 / rows)
    np.testing.assert_allclose(found_VV, np.outer(kept_V, kept_V), atol=0.015)
    for ids_B, logps_B in drawn:
        np.testing.assert_allclose(logps_B, np.log(whole_V)[ids_B], rtol=1e-4)


@pytest.mark.parametrize("vocab", [4096, 5000])
def test_tokens_of_a_large_vocabulary_are_drawn_as_often_as_they_are_likely(vocab):
    """Two of them side by side, one near, one the last, which has padding after it. A row has a key
    of its own, and its neighbours change nothing."""
    rows, tokens, prob = 3000, [0, 1, 41, vocab - 1], np.array([0.4, 0.3, 0.2, 0.1])
    logits_V = np.full(vocab, -np.inf, np.float32)
    logits_V[tokens] = np.log(prob)
    keys_B = jax.random.split(jax.random.key(1), rows)
    draw = jax.jit(lambda x_V, keys_B: drawn(jax.lax.broadcast(x_V, keys_B.shape), keys_B))
    ids_B = jax.device_get(draw(jax.device_put(logits_V), keys_B))
    found = [float((ids_B == token).mean()) for token in tokens]
    np.testing.assert_allclose(found, prob, atol=0.03)
    few_B = jax.device_get(draw(jax.device_put(logits_V), keys_B[:7]))
    np.testing.assert_array_equal(few_B, ids_B[:7])


def test_a_greedy_token_is_reported_at_temperature_one():
    logits_BV = np.log(np.array([[0.1, 0.6, 0.3]], np.float32))
    zero_B = np.zeros(1, np.float32)
    given = jax.device_put((logits_BV, np.int32(0), zero_B, zero_B + 1))
    ids_B, logps_B = jax.device_get(jax.jit(choose)(*given, jax.random.split(jax.random.key(0), 1)))
    assert ids_B.tolist() == [1] and logps_B[0] == pytest.approx(np.log(0.6), rel=1e-5)


def test_temperature_zero_takes_the_likeliest_token():
    greedy = sample(jobs_of([8], temperature=0.0))[0]
    assert greedy[0] == greedy[1]
    almost = sample(jobs_of([8], temperature=1e-4))[0]
    assert almost[0][0] == greedy[0][0]


def test_a_tiny_nucleus_is_greedy():
    nucleus = sample(jobs_of([8], top_p=1e-6))[0]
    assert nucleus[0][0] == sample(jobs_of([8], temperature=0.0))[0][0][0]


def test_a_grammar_mask_lets_nothing_else_be_written():
    free, bound = jobs_of([5, 9]), [job._replace(tokens=DIGITS) for job in jobs_of([5, 9])]
    drawn = sample([*free, *bound])
    # Jobs with and without a grammar do not meet in a batch, and do not change each other.
    assert drawn[:2] == sample(free)
    written = [ids for rows in drawn[2:] for ids, _ in rows]
    texts = [tokenizer().decode([i]) for ids in written for i in ids]
    assert texts and all(re.fullmatch(DIGITS + "|", text) for text in texts)
    allowed = tokenizer().allowed(DIGITS)
    assert allowed is not None and allowed[list(tokenizer().stop_ids)].all()
    assert tokenizer().allowed("") is None


def test_probabilities_under_a_mask_sum_to_one_over_what_it_allows():
    logits_BV = jax.device_put(np.log(np.array([[0.1, 0.2, 0.3, 0.4]], np.float32)))
    masked = only(logits_BV, jax.device_put(np.array([[True, False, True]])))  # shorter than V
    probs = jax.device_get(jax.nn.softmax(masked, axis=-1))
    np.testing.assert_allclose(probs, [[0.25, 0.0, 0.75, 0.0]], rtol=1e-6)


def test_a_row_ends_at_its_limit_or_with_a_stop_id():
    jobs = [job._replace(limit=3 + i) for i, job in enumerate(jobs_of([6, 7, 8, 9]))]
    stops = set(tokenizer().stop_ids)
    for job, rows in zip(jobs, sample(jobs), strict=True):
        for ids, logps in rows:
            assert len(ids) == len(logps) <= job.limit
            assert len(ids) == job.limit or ids[-1] in stops
            assert not stops & set(ids[:-1])


def test_looking_up_less_often_changes_nothing_and_writes_nothing_past_the_end():
    """Five does not divide the twelve steps; some rows ask for more than there are."""
    jobs = [job._replace(limit=3 + 4 * i) for i, job in enumerate(jobs_of([6, 16, 8, 9]))]
    prompts = jax.device_put(pad_prompts(jobs, 16, 8))
    stops = jax.device_put(np.array(tokenizer().stop_ids, np.int32))
    fixed = {"width": 2, "steps": 12, "nucleus": False}
    often, seldom = (
        jax.device_get(generate(*policy(), prompts, Grammar(stops), **fixed, stride=stride))
        for stride in (1, 5)
    )
    for one, other in zip(often, seldom, strict=True):
        np.testing.assert_array_equal(one, other)
    assert often.count_B.max() == 12 and (often.count_B[8:] == 0).all()


def test_a_row_without_a_nucleus_stays_as_it_is_among_rows_that_have_one():
    """The rounded probability of the first token is 1, and others may be written all the same."""
    logits_BV = np.tile(-30.0 * np.arange(4, dtype=np.float32), (2, 1))
    top_p_B = np.array([1.0, 0.9], np.float32)
    whole, cut = jax.device_get(truncated(*jax.device_put((logits_BV, top_p_B))))
    np.testing.assert_array_equal(whole, logits_BV[0])
    assert np.isfinite(cut).sum() == 1


@pytest.mark.parametrize("width", [1, 2])
def test_a_row_ends_with_the_shortest_ids_whose_text_holds_a_stop(width: int):
    """Whatever came after is what a row without stops writes on with."""
    jobs = jobs_of([5, 9, 17, 30, 12, 8, 14, 31])
    free = sample(jobs, width)
    spoken = "".join(tokenizer().decode(rows[0][0]) for rows in free)
    pairs = [a + b for a, b in zip(spoken, spoken[1:], strict=False) if (a + b).isascii()]
    stops = (*pairs[::9], "never written")
    bound = sample([job._replace(stops=stops) for job in jobs], width)
    ends = 0
    for whole, cut in zip(sum(free, []), sum(bound, []), strict=True):
        texts = [tokenizer().decode(whole[0][: n + 1]) for n in range(len(whole[0]))]
        held = [any(stop in text for stop in stops) for text in texts]
        size = held.index(True) + 1 if any(held) else len(whole[0])
        assert cut == (whole[0][:size], whole[1][:size])
        ends += any(held)
    assert 0 < ends < len(sum(free, []))


def test_rows_of_several_roles_end_with_their_own_stops():
    jobs = jobs_of([5, 9])
    mixed = sample([jobs[0]._replace(stops=("a",)), jobs[1]._replace(stops=("ec", "R"))])
    assert mixed[0] == sample([jobs[0]._replace(stops=("a",))])[0]
    assert mixed[1] == sample([jobs[1]._replace(stops=("ec", "R"))])[0]


@pytest.mark.parametrize("parts", [2, 8])
@pytest.mark.parametrize("logit", [-3.0, 0.0, 1e-30, 17.3])
def test_a_nucleus_tells_a_logit_from_the_next_float_above_it(logit, parts):
    pair = np.array([[logit, np.nextafter(np.float32(logit), np.float32(99))]], np.float32)
    cut = jax.device_get(truncated(*jax.device_put((pair, np.array([0.3], np.float32))), parts))
    np.testing.assert_array_equal(np.isfinite(cut), [[False, True]])


@pytest.mark.parametrize("parts", [2, 8])
@pytest.mark.parametrize("top_p", [1e-5, 0.3, 0.9, 0.999, 1.0])
def test_a_nucleus_is_the_smallest_set_of_likeliest_tokens_that_reaches_top_p(top_p, parts):
    """Logits of both signs, equal ones and forbidden ones among them."""
    rng = np.random.default_rng(0)
    logits_BV = np.round(rng.normal(size=(20, 400)) * 6, 1).astype(np.float32)
    logits_BV[:, ::7] = -np.inf
    top_p_B = np.full(20, top_p, np.float32)
    cut_BV = jax.device_get(truncated(*jax.device_put((logits_BV, top_p_B)), parts))
    for logits, cut in zip(logits_BV.astype(np.float64), cut_BV, strict=True):
        probs = np.exp(logits) / np.exp(logits).sum()
        before = np.array([probs[logits > x].sum() for x in logits])
        kept = ((before < top_p - 1e-6) | (top_p == 1)) & np.isfinite(logits)
        np.testing.assert_array_equal(np.isfinite(cut), kept)
        np.testing.assert_array_equal(cut[kept], logits[kept])
