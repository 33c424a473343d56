"""Tables of the vocabulary: their products in the compute dtype, their gradients in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ragrl.models.vocabulary import copied, look_up, project, sink

RNG = np.random.default_rng(0)
TABLE_VD = RNG.normal(size=(16, 8)).astype(np.float32)
# Most tokens of a batch are one token.
IDS = np.where(RNG.random(6000) < 0.8, 3, RNG.integers(0, 16, 6000)).astype(np.int32)


def looked_up(table_VD, ids, dtype):
    return look_up(copied(table_VD, dtype), sink(table_VD), ids)


def projected(table_VD, hidden, dtype):
    return project(copied(table_VD, dtype), sink(table_VD), hidden.astype(dtype))


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 1e-2)])
def test_a_frequent_tokens_gradient_is_the_sum_of_all_of_them(dtype, tolerance):
    """Summed in bfloat16, what 4,800 occurrences add up to stops at a few hundred."""
    push_ND = (1 + 0.1 * RNG.normal(size=(len(IDS), 8))).astype(np.float32)

    def total(table_VD, ids, push_ND):
        return jnp.sum(looked_up(table_VD, ids, dtype).astype(jnp.float32) * push_ND)

    grad_VD = jax.device_get(jax.jit(jax.grad(total))(*jax.device_put((TABLE_VD, IDS, push_ND))))
    expected_VD = np.zeros((16, 8))
    np.add.at(expected_VD, IDS, push_ND)
    assert grad_VD.dtype == np.float32
    np.testing.assert_allclose(grad_VD, expected_VD, rtol=tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 2e-2)])
def test_logits_and_their_gradients_are_those_of_the_product(dtype, tolerance):
    hidden_ND, push_NV = RNG.normal(size=(2, 50, 8)), RNG.normal(size=(2, 50, 16))
    given = jax.device_put([x.astype(np.float32) for x in (TABLE_VD, hidden_ND, push_NV)])

    def total(table_VD, hidden_ND, push_NV):
        logits_NV = projected(table_VD, hidden_ND, dtype)
        assert logits_NV.dtype == jnp.float32
        return jnp.sum(logits_NV * push_NV), logits_NV

    grads, logits_NV = jax.jit(jax.grad(total, argnums=(0, 1), has_aux=True))(*given)
    found = jax.device_get((logits_NV, *grads))
    expected = (
        hidden_ND @ TABLE_VD.T,
        np.einsum("bnv,bnd->vd", push_NV, hidden_ND),
        push_NV @ TABLE_VD,
    )
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, atol=tolerance * np.abs(y).max())


def test_products_of_the_backward_pass_are_in_the_compute_dtype():
    def total(table_VD, hidden_ND):
        return jnp.sum(projected(table_VD, hidden_ND, "bfloat16"))

    given = (jnp.zeros((16, 8)), jnp.zeros((4, 8)))
    lines = jax.jit(jax.grad(total, argnums=(0, 1))).lower(*given).as_text().splitlines()
    products = [line for line in lines if "dot_general" in line]
    assert len(products) >= 2
    for line in products:
        operands = line.rpartition(": (")[2].partition(")")[0]
        assert operands.count("bf16") == 2, line
