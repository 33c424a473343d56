"""Value heads and critics."""

from pathlib import Path

import decoding
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_ragrl.models.decoder import causal_mask
from jax_ragrl.models.heads import Critic, ValueHead
from jax_ragrl.models.hf import load_decoder

GOLDEN = Path(__file__).parent / "golden"
IDS_BL = np.arange(12, dtype=np.int32).reshape(2, 6)
POSITIONS_BL = np.tile(np.arange(6, dtype=np.int32), (2, 1))


def test_a_value_is_the_inner_product_with_the_hidden_state_in_full_precision():
    head = ValueHead(3)
    head.kernel[...], head.bias[...] = jnp.array([1.0, 0.0, -2.0]), jnp.array(0.5)
    values = head(jnp.array([[1.0, 5.0, 0.25]], jnp.bfloat16))
    np.testing.assert_array_equal(values, [1.0])
    assert values.dtype == jnp.float32
    # The default precision of a TPU is bfloat16.
    lowered = jax.jit(lambda hidden: ValueHead(3)(hidden)).lower(jnp.ones((2, 3), jnp.bfloat16))
    assert "precision = [HIGHEST, HIGHEST]" in lowered.as_text()


def test_a_critic_predicts_zero_at_first_and_has_no_language_model_head():
    """A critic saves the weights and the moments of an untied head, a tenth of a model."""
    policy = load_decoder(GOLDEN / "qwen2")
    critic = Critic(policy)
    policy_state, trunk = (nnx.state(x, nnx.Param) for x in (policy, critic.trunk))
    assert set(policy_state) - set(trunk) == {"lm_head"}
    assert critic.trunk.embed[...] is policy.embed[...]
    mask = causal_mask(np.ones_like(IDS_BL))
    expected, _ = decoding.call(policy, IDS_BL, POSITIONS_BL, mask)
    actual, _ = decoding.call(critic.trunk, IDS_BL, POSITIONS_BL, mask)
    np.testing.assert_array_equal(actual, expected)
    np.testing.assert_array_equal(critic.head(actual), np.zeros((2, 6)))
    assert policy.lm_head is not None
