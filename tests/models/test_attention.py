"""Attention in blocks of queries."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ragrl.models.attention import BLOCK, attention


@pytest.mark.parametrize("length", [2 * BLOCK, 8 * BLOCK, 3 * BLOCK + 1])
def test_causal_attention_in_blocks_is_attention_at_once(length):
    """Values and gradients under a mask that hides every later key and many earlier ones."""
    rng = np.random.default_rng(0)
    mask = np.tril(rng.random((2, length, length)) < 0.5) | np.eye(length, dtype=bool)
    q, k, v = (rng.normal(size=(2, length, n, 4)).astype(np.float32) for n in (4, 2, 2))

    def outcome(causal: bool):
        def total(q, k, v, mask):
            out = attention(q, k, v, mask, "xla", causal=causal)
            return jnp.sum(jnp.sin(out)), out

        grads, out = jax.jit(jax.grad(total, argnums=(0, 1, 2), has_aux=True))(
            *jax.device_put((q, k, v, mask))
        )
        return jax.device_get((out, *grads))

    for found, expected in zip(outcome(True), outcome(False), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=2e-6)
