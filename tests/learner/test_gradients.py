"""The packed, chunked and sharded train step equals the plain one: one turn per row, one device."""

import dataclasses
import math
import re
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from jax_ragrl.learner import logprobs
from jax_ragrl.learner.gradients import Gradient, TrainState, add, apply, gradient, layout_of, score
from jax_ragrl.learner.logprobs import token_loss
from jax_ragrl.learner.objective import KL, Objective
from jax_ragrl.learner.packing import Rows
from jax_ragrl.learner.targets import Targets
from jax_ragrl.models import matmul
from jax_ragrl.models.config import DecoderConfig
from jax_ragrl.models.decoder import Decoder, init_sharded
from jax_ragrl.models.heads import ActorCritic, Critic
from jax_ragrl.models.split import SplitModel
from jax_ragrl.runtime.sharding import make_mesh, replicate, shard_batch
from tests.learner.turns import (
    assert_close,
    conversation,
    pack,
    pack_separately,
    siblings,
    strangers,
    targets_of,
    total_gradient,
)
from tests.tiny import policy, split_policy

# Every term of the loss at once.
GRPO = Objective(
    loss="dual_clipped_policy_loss",
    critic="none",
    advantage="group_normalised",
    kl=KL("loss", "k3"),
    entropy_coefficient=0.01,
)
PPO = Objective()
FAMILIES = {"siblings": siblings, "a conversation": conversation, "strangers": strangers}


def split_critic() -> SplitModel:
    model = SplitModel.from_model(Critic(nnx.merge(*policy())))
    kernel = model.params["head"]["kernel"]
    kernel.set_value(jax.device_put(np.linspace(-1, 1, 16, dtype=np.float32)))
    return model


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["policy", "critic"])
def test_packing_changes_neither_loss_nor_gradient(family, kind):
    turns = FAMILIES[family]()
    model, objective = (split_policy(), GRPO) if kind == "policy" else (split_critic(), PPO)
    batches, separate = pack(turns), pack_separately(turns)
    assert len(batches) == 1 and len(separate) == len(turns)
    actual = total_gradient(model, batches, objective)
    assert_close(actual, total_gradient(model, separate, objective))


@pytest.mark.parametrize("compute", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_adding_a_gradient_in_place_is_bitwise_exact(compute):
    decoder = nnx.merge(*policy())
    decoder.config = dataclasses.replace(decoder.config, dtype=compute, remat="full")
    model = SplitModel.from_model(decoder)
    (one,), (other,) = pack(siblings()), pack(strangers())
    inputs = [
        jax.device_put((b.rows, targets_of([b])[0], np.float32(1), np.float32(0.1)))
        for b in (one, other)
    ]
    first, second = (gradient(model, *args, objective=GRPO).grads for args in inputs)
    expected = add(jax.tree.map(jax.numpy.copy, first), second)
    actual = gradient(model, *inputs[1], objective=GRPO, total=first).grads
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)


def test_accumulation_needs_no_second_gradient_tree():
    config = DecoderConfig(256, 64, 256, 4, 2, 1, 32)
    model = SplitModel.from_model(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))
    (batch,) = pack(siblings())
    args = (model, batch.rows, targets_of([batch])[0], *np.float32([1, 0.1]))

    def temporary_bytes(**total: Any) -> int:
        lowered = gradient.lower(*args, objective=GRPO, **total)
        compiled = lowered.compile({"xla_backend_optimization_level": 0})
        return compiled.memory_analysis().temp_size_in_bytes

    layers = sum(4 * x.size for x in jax.tree.leaves(model.params["layers"]))
    assert temporary_bytes(total=model.params) < temporary_bytes() + layers / 2


@pytest.mark.parametrize("family", [conversation, strangers])
def test_omitting_the_mask_of_single_context_rows_changes_nothing(family):
    turns = family()[:3]  # of the conversation, the turns of one rollout
    batches = pack(turns) if family is conversation else pack_separately(turns)
    targets = targets_of(batches)
    plain = [b._replace(rows=b.rows._replace(until_RL=None)) for b in batches]
    expected = total_gradient(split_policy(), batches, GRPO, targets)
    assert_close(total_gradient(split_policy(), plain, GRPO, targets), expected)


def test_chunked_losses_have_the_gradient_of_plain_logits(monkeypatch):
    """With a temperature, grammars, chunks of two and a factor before the sum; padding is zero."""
    monkeypatch.setattr(logprobs, "SCORED_CHUNK", 2)
    draw, decoder = np.random.default_rng(0), nnx.merge(*policy())
    vocab, width = decoder.config.vocab_size, decoder.config.hidden_size
    allowed_ZV = draw.random((2, vocab)) < 0.5
    allowed_ZV[:, :3] = True
    mask_RM = np.arange(6) < np.array([[4], [0], [3]])
    target_RM, state_RM = (draw.integers(0, n, (3, 6)).astype(np.int32) for n in (3, 2))
    hidden_RMD = draw.normal(size=(3, 6, width)).astype(np.float32)
    logits_RMV = jax.device_get(decoder.logits(jax.device_put(hidden_RMD)))
    best_RM = np.where(allowed_ZV[state_RM], logits_RMV, -np.inf).argmax(axis=-1)
    target_RM[0, :2] = best_RM[0, :2]
    rows = Rows(*[target_RM] * 5, mask_RM, state_RM)
    args = jax.device_put((hidden_RMD, np.float32(0.7), allowed_ZV, draw.random((3, 6), "f4")))

    def loss(logp, entropy, mask, inputs):
        return inputs * jax.numpy.square(logp) + entropy + mask.astype(np.float32)

    def chunked(hidden_RMD, heat, allowed_ZV, inputs_RM):
        total, scores = token_loss(decoder, hidden_RMD, rows, heat, allowed_ZV, loss, inputs_RM)
        return 2.5 * total, scores

    def masked(*scores):
        return (jax.numpy.where(mask_RM, x, 0.0) for x in scores)

    def plain(hidden_RMD, heat, allowed_ZV, inputs_RM):
        logits_RMV = decoder.logits(hidden_RMD) / heat
        logp_RMV = jax.nn.log_softmax(logits_RMV, where=allowed_ZV[state_RM])
        p_RMV = jax.nn.softmax(logits_RMV, where=allowed_ZV[state_RM])
        entropy = -jax.numpy.sum(p_RMV * jax.numpy.maximum(logp_RMV, -1e9), axis=-1)
        logp = jax.numpy.take_along_axis(logp_RMV, target_RM[..., None], axis=-1)[..., 0]
        logp, entropy = masked(logp, entropy)
        return 2.5 * jax.numpy.sum(loss(logp, entropy, mask_RM, inputs_RM)), (logp, entropy)

    ((total, scores), grad), ((expected, plain_scores), plain_grad) = (
        jax.device_get(jax.jit(jax.value_and_grad(f, has_aux=True))(*args))
        for f in (chunked, plain)
    )
    np.testing.assert_allclose(total, expected, rtol=1e-5)
    np.testing.assert_allclose(grad, plain_grad, rtol=1e-4, atol=1e-6)
    assert grad[mask_RM].any() and not grad[~mask_RM].any()
    for x_RM, y_RM in zip(scores[:2], plain_scores, strict=True):
        np.testing.assert_allclose(x_RM[mask_RM], y_RM[mask_RM], rtol=1e-5)
    np.testing.assert_array_equal(scores.likeliest_RM[mask_RM], (target_RM == best_RM)[mask_RM])
    assert not any(x_RM[:, 4:].any() for x_RM in scores)  # after the last token of any row


def test_padding_never_reaches_the_gradient():
    """Padding may contain anything: other ids, other targets, NaN."""
    (batch,) = pack(siblings())
    (targets,) = targets_of([batch])
    clean = total_gradient(split_policy(), [batch], GRPO, [targets])
    rows, pad_RM = batch.rows, ~batch.rows.mask_RM
    padding_RL = (rows.until_RL == np.arange(1, 49)) & (rows.positions_RL == 0)
    assert padding_RL[:, -1].all()
    changed = rows._replace(
        ids_RL=np.where(padding_RL, 5, rows.ids_RL).astype(np.int32),
        target_RM=np.where(pad_RM, 7, rows.target_RM).astype(np.int32),
    )
    nan = jax.tree.map(lambda x: np.where(pad_RM, np.float32(np.nan), x), targets)
    nan = nan._replace(weight=targets.weight)
    dirty = total_gradient(split_policy(), [batch._replace(rows=changed)], GRPO, [nan])
    jax.tree.map(np.testing.assert_array_equal, dirty, clean)


@pytest.mark.slow
@pytest.mark.parametrize(("platform", "shape"), [("cpu", (2, 2, 2)), ("tpu", (1, 4, 2))])
def test_eight_devices_compute_the_gradient_of_one(platform, shape, monkeypatch):
    """Also by the way that a TPU takes. The meshes differ, so that each is traced by itself."""
    for module in (logprobs, matmul):
        monkeypatch.setattr(module, "target_platform", lambda: platform)
    (batch,) = pack([*siblings(), *(t._replace(node=t.node + 10) for t in strangers())])
    (targets,) = targets_of([batch])
    expected = total_gradient(split_policy(), [batch], GRPO, [targets])
    mesh = make_mesh(shape)
    decoder = nnx.merge(*policy())
    model = SplitModel.from_model(init_sharded(decoder.config, mesh, nnx.Rngs(0)))
    with jax.set_mesh(mesh):
        rows, placed = shard_batch((batch.rows, targets), mesh)
        one, tenth = replicate(jax.device_put((np.float32(1.0), np.float32(0.1))), mesh)
        layout = layout_of(model.params)
        actual = gradient(model, rows, placed, one, tenth, objective=GRPO, layout=layout)
    assert_close(Gradient(*jax.device_get(actual)), expected)
    q_grad = actual.grads["layers"]["q_proj"][...]
    embed_and_heads = math.prod(shape[1:])
    assert q_grad.addressable_shards[0].data.size == q_grad.size // embed_and_heads


@pytest.mark.slow
def test_on_a_mesh_the_head_is_gathered_once():
    """No loop or branch of the compiled step gathers the head or reduces its gradient, and each
    device gets only its part of the sum: the gathered head is the only full table."""
    mesh, config = make_mesh((1, 4, 1), jax.devices()[:4]), nnx.merge(*policy()).config
    model = SplitModel.from_model(init_sharded(config, mesh, nnx.Rngs(0)))
    shapes = Rows(*[np.zeros((4, 256), np.int32)] * 5, np.ones((4, 256), bool))
    with jax.set_mesh(mesh):
        rows, targets = shard_batch((shapes, Targets(*[np.ones((4, 256), np.float32)] * 7)), mesh)
        one = replicate(jax.device_put(np.float32(1.0)), mesh)
        layout = layout_of(model.params)
        lowered = gradient.lower(model, rows, targets, one, one, objective=GRPO, layout=layout)
    text = lowered.compile({"xla_backend_optimization_level": 0}).as_text()
    table = f"[{config.vocab_size},{config.hidden_size}]"
    collectives = {}
    for computation in re.split(r"\n(?=\S)", text):
        shapes = re.findall(r"= (.*?) (?:all-gather|all-reduce|reduce-scatter)\(", computation)
        entry = computation.startswith("ENTRY")
        count = sum(shape.count(table) for shape in shapes)
        collectives[entry] = collectives.get(entry, 0) + count
    assert collectives == {True: 1, False: 0} and " while(" in text


def test_the_logits_of_a_whole_batch_never_exist():
    """8,192 scored tokens, vocabulary 300: no array of the step has 8,192 x 300 numbers."""
    model = split_policy()
    count, length, vocab = 32, 256, model.merge().config.vocab_size

    def abstract(dtype: type) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((count, length), dtype)

    rows = Rows(*[abstract(np.int32)] * 5, abstract(bool))
    scalar = jax.ShapeDtypeStruct((), np.float32)
    targets = Targets(*[abstract(np.float32)] * 7)
    lowered = gradient.lower(model, rows, targets, scalar, scalar, objective=GRPO)
    text = lowered.compile({"xla_backend_optimization_level": 0}).as_text()
    shapes = {tuple(map(int, s.split(","))) for s in re.findall(r"[a-z]+\d+\[([\d,]+)\]", text)}
    logit_rows = [np.prod(s) // vocab for s in shapes if vocab in s]
    assert max(logit_rows) <= logprobs.SCORED_TOKENS < count * length


def test_a_gradient_has_three_vocabulary_products_and_scoring_one():
    """Logits, and at once the gradients of hidden states and of the vocabulary matrix."""
    (batch,) = pack(siblings())
    vocab, one = nnx.merge(*policy()).config.vocab_size, np.float32(1.0)

    def products(lowered: Any) -> int:
        lines = [line for line in lowered.as_text().splitlines() if ".dot_general" in line]
        return sum(re.search(rf"[<x]{vocab}x", line) is not None for line in lines)

    args = (split_policy(), batch.rows)
    step = gradient.lower(*args, *targets_of([batch]), one, one, objective=GRPO)
    assert products(step) == 3 and products(score.lower(*args, one)) == 1


def test_a_plain_value_loss_equals_an_unbounded_clip():
    batches = pack(siblings())
    plain, wide, tight = (
        total_gradient(split_critic(), batches, dataclasses.replace(PPO, **changes))
        for changes in ({"value_loss": "plain"}, {"value_clip": 100.0}, {"value_clip": 0.01})
    )
    assert_close(plain, wide)
    assert tight.sums["loss/value"] > 1.01 * plain.sums["loss/value"]


def test_clipped_tokens_are_counted_on_both_sides():
    """Clipped tokens, entropy and tokens are unweighted sums; the losses are weighted."""
    (batch,), uneven = pack(siblings()), dataclasses.replace(GRPO, eps_low=0.1, eps_high=0.3)
    (targets,) = targets_of([batch])
    one = jax.device_put(np.float32(1.0))
    outputs = jax.device_get(score(split_policy(), jax.device_put(batch.rows), one))
    mask_RM = batch.rows.mask_RM
    ratio = np.exp(outputs.logp_RM - targets.old_logp)[mask_RM]
    sums = total_gradient(split_policy(), [batch], uneven, [targets]).sums
    low, high = (ratio < 0.9).sum(), (ratio > 1.3).sum()
    assert sums["clipped"] == low + high and min(low, high) > 0
    np.testing.assert_allclose(sums["entropy"], outputs.entropy_RM[mask_RM].sum(), rtol=1e-5)
    assert sums["tokens"] == mask_RM.sum()
    assert not outputs.likeliest_RM[mask_RM].all()


def test_a_shared_trunk_adds_the_scaled_gradient_of_its_value_loss():
    """The trunk gets the sum of both gradients."""
    both = ActorCritic(nnx.merge(*policy()))
    both.head.kernel[...] = jax.device_put(np.linspace(-1, 1, 16, dtype=np.float32))
    model, batches = SplitModel.from_model(both), pack(siblings())
    shared = dataclasses.replace(GRPO, critic="shared", advantage="gae", value_coefficient=0.5)
    alone = total_gradient(split_policy(), batches, GRPO)
    value = total_gradient(split_critic(), batches, PPO)
    actual = total_gradient(model, batches, shared)
    expected = jax.tree.map(lambda p, v: p + 0.5 * v, alone.grads, value.grads["trunk"])
    assert_close(Gradient(actual.grads["policy"], {}), Gradient(expected, {}))
    head = jax.tree.map(lambda v: 0.5 * v, value.grads["head"])
    assert_close(Gradient(actual.grads["head"], {}), Gradient(head, {}))
    np.testing.assert_allclose(actual.sums["loss/value"], value.sums["loss/value"], rtol=1e-5)


def test_a_single_non_finite_number_is_flagged_after_a_step():
    """A float16 moment overflows at a gradient that is itself finite."""
    adam = optax.adam(1e-3, mu_dtype="float16")
    params = {"w": jax.device_put(np.ones(2, np.float32))}
    grads = {"w": jax.device_put(np.array([1.0, 1e7], np.float32))}
    state, metrics = apply(adam, TrainState(params, adam.init(params)), grads)
    assert float(metrics["skipped"]) == 0.0 and np.isfinite(state.params["w"]).all()
    assert float(metrics["not_finite"]) == 1.0
