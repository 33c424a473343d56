"""The step computes what one turn a row, unpacked, unchunked and on one device would."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from jax_ragrl.errors import UserError
from jax_ragrl.learner import logprobs as scoring
from jax_ragrl.learner.gradients import (
    Gradient,
    Learner,
    add,
    apply,
    check_finite,
    gradient,
    layout_of,
    score,
    zeros,
)
from jax_ragrl.learner.logprobs import SCORED_TOKENS, score_tokens, token_loss
from jax_ragrl.learner.objective import KL, Objective
from jax_ragrl.learner.packing import Rows
from jax_ragrl.learner.targets import Targets
from jax_ragrl.models.config import DecoderConfig
from jax_ragrl.models.decoder import Decoder, init_sharded
from jax_ragrl.models.heads import ActorCritic, Critic
from jax_ragrl.runtime.sharding import make_mesh, replicate, shard_batch
from tests.learner.turns import (
    NOTHING,
    apart,
    assert_close,
    conversation,
    siblings,
    strangers,
    targets_of,
    together,
    total_gradient,
)
from tests.tiny import policy

# Every term of the loss at once.
GRPO = Objective(
    ratio="dual_clip",
    critic="none",
    advantage="group_normalised",
    kl=KL("loss", "k3"),
    entropy=0.01,
)
PPO = Objective()
FAMILIES = {"siblings": siblings, "a conversation": conversation, "strangers": strangers}


def critic() -> tuple:
    """A critic with a head that says something."""
    graph, params = nnx.split(Critic(nnx.merge(*policy())), nnx.Param)
    kernel = params["head"]["kernel"]
    kernel.set_value(jax.device_put(np.linspace(-1, 1, 16, dtype=np.float32)))
    return graph, params


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["policy", "critic"])
def test_turns_in_shared_rows_have_the_loss_and_gradient_of_turns_alone(family, kind):
    turns = FAMILIES[family]()
    model, objective = (policy(), GRPO) if kind == "policy" else (critic(), PPO)
    packed = together(turns)
    assert len(packed) == 1 and len(apart(turns)) == len(turns)
    found = total_gradient(model, packed, objective)
    assert_close(found, total_gradient(model, apart(turns), objective))


def test_gradients_accumulated_over_batches_equal_those_of_one():
    turns = [*siblings(), *(t._replace(node=t.node + 10) for t in strangers())]
    halves = together(turns[:5]) + together(turns[5:])
    assert len(halves) == 2
    one = total_gradient(policy(), together(turns), GRPO)
    assert_close(total_gradient(policy(), halves, GRPO), one)


@pytest.mark.parametrize("compute", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_a_gradient_added_in_place_is_to_the_last_bit_the_sum_of_two(compute):
    decoder = nnx.merge(*policy())
    decoder.config = dataclasses.replace(decoder.config, dtype=compute, remat="full")
    model = nnx.split(decoder, nnx.Param)
    (one,), (other,) = together(siblings()), together(strangers())
    args = [
        (NOTHING, *jax.device_put((b.rows, targets_of([b])[0], np.float32(1), np.float32(0.1))))
        for b in (one, other)
    ]
    first, second = (gradient(*model, *given, objective=GRPO).grads for given in args)
    expected = add(jax.tree.map(jax.numpy.copy, first), second)
    found = gradient(*model, *args[1], objective=GRPO, total=first).grads
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)


def test_beside_the_sum_of_gradients_there_is_no_second_tree_of_them():
    config = DecoderConfig(256, 64, 256, 4, 2, 1, 32)
    graph, params = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))), nnx.Param)
    (batch,) = together(siblings())
    given = (graph, params, NOTHING, batch.rows, targets_of([batch])[0], *np.float32([1, 0.1]))

    def beside(**total: Any) -> int:
        lowered = gradient.lower(*given, objective=GRPO, **total)
        compiled = lowered.compile({"xla_backend_optimization_level": 0})
        return compiled.memory_analysis().temp_size_in_bytes

    layers = sum(4 * x.size for x in jax.tree.leaves(params["layers"]))
    assert beside(total=params) < beside() + layers / 2


@pytest.mark.parametrize("family", [conversation, strangers])
def test_rows_of_one_context_each_have_without_a_mask_the_gradient_they_have_with_it(family):
    turns = family()[:3]  # of the conversation, those of one rollout
    batches = together(turns) if family is conversation else apart(turns)
    targets = targets_of(batches)
    plain = [b._replace(rows=b.rows._replace(until_RL=None)) for b in batches]
    expected = total_gradient(policy(), batches, GRPO, targets)
    assert_close(total_gradient(policy(), plain, GRPO, targets), expected)


def test_logits_in_chunks_give_what_all_at_once_give(monkeypatch):
    (batch,) = together(strangers())
    whole = total_gradient(policy(), [batch], GRPO)
    monkeypatch.setattr(
        scoring, "SCORED_TOKENS", 64
    )  # 8 rows x 8: six chunks, some of padding alone
    graph, params = policy()
    chunked = jax.jit(functools.partial(gradient.__wrapped__, graph, objective=GRPO))
    arguments = (batch.rows, targets_of([batch])[0], np.float32(1.0), np.float32(0.1))
    assert not batch.rows.mask_RM[:, 40:].any()
    assert_close(jax.device_get(chunked(params, NOTHING, *jax.device_put(arguments))), whole)


@pytest.mark.parametrize("of", ["a sum", "scores"])
def test_the_gradient_of_losses_is_that_of_the_plain_logits(of, monkeypatch):
    """At a temperature, under grammars, in chunks of two, and with a factor before the sum. Of
    padding a loss is told zeros."""
    monkeypatch.setattr(scoring, "SCORED_CHUNK", 2)
    draw, decoder = np.random.default_rng(0), nnx.merge(*policy())
    vocab, width = decoder.config.vocab_size, decoder.config.hidden_size
    allowed_ZV = draw.random((2, vocab)) < 0.5
    allowed_ZV[:, :3] = True
    mask_RM = np.arange(6) < np.array([[4], [0], [3]])
    target_RM, role_RM = (draw.integers(0, n, (3, 6)).astype(np.int32) for n in (3, 2))
    rows = Rows(*[target_RM] * 5, mask_RM, role_RM)
    hidden_RMD = draw.normal(size=(3, 6, width)).astype(np.float32)
    given = jax.device_put((hidden_RMD, np.float32(0.7), allowed_ZV, draw.random((3, 6), "f4")))

    def loss(logp, entropy, mask, given):
        return given * jax.numpy.square(logp) + entropy + mask.astype(np.float32)

    def found(hidden_RMD, heat, allowed_ZV, given_RM):
        if of == "scores":
            scores = score_tokens(decoder, hidden_RMD, rows, heat, allowed_ZV)
            return 2.5 * jax.numpy.sum(loss(*masked(*scores[:2]), mask_RM, given_RM)), scores
        total, scores = token_loss(decoder, hidden_RMD, rows, heat, allowed_ZV, loss, given_RM)
        return 2.5 * total, scores

    def masked(*scores):
        return (jax.numpy.where(mask_RM, x, 0.0) for x in scores)

    def plain(hidden_RMD, heat, allowed_ZV, given_RM):
        logits_RMV = decoder.logits(hidden_RMD) / heat
        logp_RMV = jax.nn.log_softmax(logits_RMV, where=allowed_ZV[role_RM])
        p_RMV = jax.nn.softmax(logits_RMV, where=allowed_ZV[role_RM])
        entropy = -jax.numpy.sum(p_RMV * jax.numpy.maximum(logp_RMV, -1e9), axis=-1)
        logp = jax.numpy.take_along_axis(logp_RMV, target_RM[..., None], axis=-1)[..., 0]
        logp, entropy = masked(logp, entropy)
        return 2.5 * jax.numpy.sum(loss(logp, entropy, mask_RM, given_RM)), (logp, entropy)

    ((total, scores), grad), ((expected, kept), slope) = (
        jax.device_get(jax.jit(jax.value_and_grad(f, has_aux=True))(*given)) for f in (found, plain)
    )
    np.testing.assert_allclose(total, expected, rtol=1e-5)
    np.testing.assert_allclose(grad, slope, rtol=1e-4, atol=1e-6)
    assert grad[mask_RM].any() and not grad[~mask_RM].any()
    for x_RM, y_RM in zip(scores[:2], kept, strict=True):
        np.testing.assert_allclose(x_RM[mask_RM], y_RM[mask_RM], rtol=1e-5)
    assert not any(x_RM[:, 4:].any() for x_RM in scores)  # behind the last token of any row


def test_rows_are_scored_in_equal_chunks_of_no_more_tokens_than_are_held_at_once():
    shapes = [(8, 48), (64, 48), (9, 1000), (SCORED_TOKENS + 1, 4)]
    chunks = [scoring._chunks(np.arange(m) < np.full((r, 1), 25)) for r, m in shapes]
    assert [size for size, _ in chunks] == [48, 24, 125, 1]
    assert [int(used) for _, used in chunks] == [1, 2, 1, 4]  # up to the last that any row scores


def test_on_a_mesh_each_device_scores_its_own_rows(monkeypatch):
    seen, chunks, decoder = [], scoring._chunks, nnx.merge(*policy())
    monkeypatch.setattr(scoring, "_chunks", lambda mask: seen.append(mask.shape) or chunks(mask))
    rows = Rows(*[np.zeros((8, 6), np.int32)] * 5, np.ones((8, 6), bool))
    hidden_RMD = np.zeros((8, 6, decoder.config.hidden_size), np.float32)
    with jax.set_mesh(make_mesh((2, 2, 2))):
        jax.eval_shape(lambda x: score_tokens(decoder, x, rows, np.float32(1), None), hidden_RMD)
    assert set(seen) == {(2, 6)}


def test_padding_never_reaches_the_gradient():
    """What is padding may hold anything: other ids, other targets, nan."""
    (batch,) = together(siblings())
    (targets,) = targets_of([batch])
    clean = total_gradient(policy(), [batch], GRPO, [targets])
    rows, pad_RM = batch.rows, ~batch.rows.mask_RM
    padding_RL = (rows.until_RL == np.arange(1, 49)) & (rows.positions_RL == 0)
    assert padding_RL[:, -1].all()
    spoiled = rows._replace(
        ids_RL=np.where(padding_RL, 5, rows.ids_RL).astype(np.int32),
        target_RM=np.where(pad_RM, 7, rows.target_RM).astype(np.int32),
    )
    nan = Targets(*(np.where(pad_RM, np.float32(np.nan), x) for x in targets))
    nan = nan._replace(weight=targets.weight)
    dirty = total_gradient(policy(), [batch._replace(rows=spoiled)], GRPO, [nan])
    jax.tree.map(np.testing.assert_array_equal, dirty, clean)


def test_a_mesh_of_eight_devices_computes_what_one_does():
    (batch,) = together([*siblings(), *(t._replace(node=t.node + 10) for t in strangers())])
    (targets,) = targets_of([batch])
    expected = total_gradient(policy(), [batch], GRPO, [targets])
    mesh = make_mesh((2, 2, 2))
    decoder = nnx.merge(*policy())
    graph, params = nnx.split(init_sharded(decoder.config, mesh, nnx.Rngs(0)), nnx.Param)
    with jax.set_mesh(mesh):
        rows, placed = shard_batch((batch.rows, targets), mesh)
        one, tenth = replicate(jax.device_put((np.float32(1.0), np.float32(0.1))), mesh)
        found = gradient(
            *(graph, params, NOTHING, rows, placed, one, tenth),
            objective=GRPO,
            layout=layout_of(params),
        )
    assert_close(Gradient(*jax.device_get(found)), expected)
    q_grad = found.grads["layers"]["q_proj"][...]
    assert q_grad.addressable_shards[0].data.size == q_grad.size // 4  # embed and heads


def test_on_a_mesh_the_head_travels_once_and_not_with_every_chunk():
    """No loop or branch of the compiled step gathers the head or sums its gradient, and of the sum
    every device gets its part only: nothing but the gathering makes a whole table."""
    mesh, config = make_mesh((1, 4, 1), jax.devices()[:4]), nnx.merge(*policy()).config
    graph, params = nnx.split(init_sharded(config, mesh, nnx.Rngs(0)), nnx.Param)
    shapes = Rows(*[np.zeros((4, 256), np.int32)] * 5, np.ones((4, 256), bool))
    with jax.set_mesh(mesh):
        rows, targets = shard_batch((shapes, Targets(*[np.ones((4, 256), np.float32)] * 7)), mesh)
        one = replicate(jax.device_put(np.float32(1.0)), mesh)
        given = (graph, params, NOTHING, rows, targets, one, one)
        lowered = gradient.lower(*given, objective=GRPO, layout=layout_of(params))
    text = lowered.compile({"xla_backend_optimization_level": 0}).as_text()
    whole = f"[{config.vocab_size},{config.hidden_size}]"
    travels = {}
    for computation in re.split(r"\n(?=\S)", text):
        moved = re.findall(r"= (.*?) (?:all-gather|all-reduce|reduce-scatter)\(", computation)
        travels[computation[:5] == "ENTRY"] = travels.get(computation[:5] == "ENTRY", 0) + sum(
            shape.count(whole) for shape in moved
        )
    assert travels == {True: 1, False: 0} and " while(" in text


def test_no_program_holds_the_logits_of_a_whole_batch():
    """8,192 scored tokens, vocabulary 300: nothing in the compiled step has 8,192 x 300 numbers."""
    graph, params = policy()
    count, length, vocab = 32, 256, nnx.merge(graph, params).config.vocab_size

    def shaped(dtype: type) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((count, length), dtype)

    rows = Rows(*[shaped(np.int32)] * 5, shaped(bool))
    scalar = jax.ShapeDtypeStruct((), np.float32)
    targets = Targets(*[shaped(np.float32)] * 7)
    lowered = gradient.lower(graph, params, NOTHING, rows, targets, scalar, scalar, objective=GRPO)
    text = lowered.compile({"xla_backend_optimization_level": 0}).as_text()
    shapes = {tuple(map(int, s.split(","))) for s in re.findall(r"[a-z]+\d+\[([\d,]+)\]", text)}
    of_logits = [np.prod(s) // vocab for s in shapes if vocab in s]
    assert max(of_logits) <= scoring.SCORED_TOKENS < count * length


def test_a_gradient_multiplies_with_the_vocabulary_three_times_and_scoring_once():
    """Logits, and from them at once the gradients of hidden states and of the vocabulary."""
    (batch,) = together(siblings())
    vocab, one = nnx.merge(*policy()).config.vocab_size, np.float32(1.0)

    def products(lowered: Any) -> int:
        lines = [line for line in lowered.as_text().splitlines() if ".dot_general" in line]
        return sum(re.search(rf"[<x]{vocab}x", line) is not None for line in lines)

    given = (*policy(), NOTHING, batch.rows)
    step = gradient.lower(*given, *targets_of([batch]), one, one, objective=GRPO)
    assert products(step) == 3 and products(score.lower(*given, one)) == 1


def test_a_plain_value_loss_is_the_clipped_one_with_room_for_any_change():
    batches = together(siblings())
    plain, roomy, tight = (
        total_gradient(critic(), batches, dataclasses.replace(PPO, **changes))
        for changes in ({"value_loss": "plain"}, {"value_clip": 100.0}, {"value_clip": 0.01})
    )
    assert_close(plain, roomy)
    assert tight.sums["loss/value"] > 1.01 * plain.sums["loss/value"]


def test_clipped_tokens_are_those_whose_ratio_left_its_bounds_on_either_side():
    """What is clipped, the entropy and the tokens are counted; the losses are weighted."""
    (batch,), uneven = together(siblings()), dataclasses.replace(GRPO, eps_low=0.1, eps_high=0.3)
    (targets,) = targets_of([batch])
    one = jax.device_put(np.float32(1.0))
    reading = jax.device_get(score(*policy(), NOTHING, jax.device_put(batch.rows), one))
    mask_RM = batch.rows.mask_RM
    ratio = np.exp(reading.logp_RM - targets.old_logp)[mask_RM]
    sums = total_gradient(policy(), [batch], uneven, [targets]).sums
    low, high = (ratio < 0.9).sum(), (ratio > 1.3).sum()
    assert sums["clipped"] == low + high and min(low, high) > 0
    np.testing.assert_allclose(sums["entropy"], reading.entropy_RM[mask_RM].sum(), rtol=1e-5)
    assert sums["tokens"] == mask_RM.sum()


def test_a_shared_trunk_adds_the_scaled_gradient_of_its_value_loss():
    """On the trunk the policy's own gradient is added to it."""
    both = ActorCritic(nnx.merge(*policy()))
    both.head.kernel[...] = jax.device_put(np.linspace(-1, 1, 16, dtype=np.float32))
    model, batches = nnx.split(both, nnx.Param), together(siblings())
    shared = dataclasses.replace(GRPO, critic="shared", advantage="gae", value_coefficient=0.5)
    alone = total_gradient(policy(), batches, GRPO)
    value = total_gradient(critic(), batches, PPO)
    found = total_gradient(model, batches, shared)
    expected = jax.tree.map(lambda p, v: p + 0.5 * v, alone.grads, value.grads["trunk"])
    assert_close(Gradient(found.grads["policy"], {}), Gradient(expected, {}))
    head = jax.tree.map(lambda v: 0.5 * v, value.grads["head"])
    assert_close(Gradient(found.grads["head"], {}), Gradient(head, {}))
    np.testing.assert_allclose(found.sums["loss/value"], value.sums["loss/value"], rtol=1e-5)


def test_a_reading_says_what_a_plain_softmax_says():
    """Log-probability at a temperature, entropy, likeliness: against logits of each context. The
    last token of all is the likeliest."""
    graph, params = policy()
    *turns, last = conversation()[:3]
    best = next_logits(nnx.merge(graph, params), last.prompt + last.ids[:-1]).argmax()
    turns.append(last._replace(ids=(*last.ids[:-1], int(best))))
    (batch,) = together(turns)
    heat = jax.device_put(np.float32(0.7))
    reading = jax.device_get(score(graph, params, NOTHING, jax.device_put(batch.rows), heat))
    decoder = nnx.merge(graph, params)
    for a, node in enumerate(batch.actions.node_A.tolist()):
        r, first = batch.actions.row_A[a], batch.actions.first_A[a]
        for t, target in enumerate(turns[node].ids):
            logits_V = next_logits(decoder, turns[node].prompt + turns[node].ids[:t]) / 0.7
            logp_V = logits_V - np.log(np.exp(logits_V).sum())
            at = (r, first + t)
            np.testing.assert_allclose(reading.logp_RM[at], logp_V[target], atol=1e-5)
            entropy = -(np.exp(logp_V) * logp_V).sum()
            np.testing.assert_allclose(reading.entropy_RM[at], entropy, rtol=1e-5)
            assert reading.likeliest_RM[at] == (logp_V.argmax() == target)
    assert 0 < reading.likeliest_RM[batch.rows.mask_RM].mean() < 1


def next_logits(decoder: Decoder, context: tuple[int, ...]) -> np.ndarray:
    """After a context padded to 48 tokens: what is past its end it does not see."""
    ids_1L = np.zeros((1, 48), np.int32)
    ids_1L[0, : len(context)] = context
    logits_1LV = _plain(*nnx.split(decoder), jax.device_put(ids_1L))
    return jax.device_get(logits_1LV)[0, len(context) - 1].astype(np.float64)


@functools.partial(jax.jit, static_argnums=0)
def _plain(graph, state, ids_1L):
    decoder = nnx.merge(graph, state)
    at_L = jax.numpy.arange(48, dtype=np.int32)
    mask_1LL = (at_L[None, :] <= at_L[:, None])[None]
    return decoder.logits(decoder(ids_1L, at_L[None], mask_1LL)[0])


def test_a_gradient_that_is_not_finite_changes_nothing_and_is_counted():
    adam = optax.adam(0.1)
    learner = Learner({"w": jax.device_put(np.ones(2, np.float32))}, None)
    learner = learner._replace(opt_state=adam.init(learner.params))
    good, bad = ({"w": jax.device_put(np.array(x, np.float32))} for x in ([1, 2], [np.inf, 1]))
    learner, metrics = apply(adam, learner, bad)
    assert float(metrics["skipped"]) == 1
    np.testing.assert_array_equal(learner.params["w"], [1, 1])
    learner, metrics = apply(adam, learner, good)
    assert float(metrics["skipped"]) == 0
    np.testing.assert_allclose(learner.params["w"], [0.9, 0.9], rtol=1e-5)


@pytest.mark.parametrize("weight", [1.0, np.nan, np.inf])
def test_parameters_that_are_not_finite_after_a_step_are_flagged(weight: float):
    """One number of one array is enough; a finite gradient may follow from such a number."""
    params = {"a": jax.device_put(np.ones(3, np.float32))}
    params["b"] = jax.device_put(np.array([1, weight], np.float32))
    sgd = optax.sgd(0.1)
    learner = Learner(params, sgd.init(params))
    grads = {name: jax.device_put(np.ones(x.shape, np.float32)) for name, x in params.items()}
    _, metrics = apply(sgd, learner, grads)
    assert float(metrics["skipped"]) == 0.0
    assert float(metrics["not_finite"]) == (not np.isfinite(weight))


def test_flags_of_finite_parameters_are_removed_and_others_name_their_model():
    metrics = {"not_finite": 0.0, "value/not_finite": 0.0, "loss": 1.0}
    check_finite(metrics)
    assert metrics == {"loss": 1.0}
    with pytest.raises(UserError, match="parameters of the policy are"):
        check_finite({"not_finite": 1.0, "value/not_finite": 0.0})
    with pytest.raises(UserError, match="parameters of the critic are"):
        check_finite({"not_finite": 0.0, "value/not_finite": 2.0})


def test_the_sum_of_no_gradients_is_placed_as_later_sums_are():
    put = jax.device_put(policy()[1], jax.devices()[0])
    assert all(x.committed for x in jax.tree.leaves(zeros(put)))
