"""Value heads and critics."""

from pathlib import Path

import decoding
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_ragrl.models.decoder import causal_mask
from jax_ragrl.models.heads import ActorCritic, Critic, ValueHead
from jax_ragrl.models.hf import load_decoder

GOLDEN = Path(__file__).parent / "golden"
IDS_BL = np.arange(12, dtype=np.int32).reshape(2, 6)
POSITIONS_BL = np.tile(np.arange(6, dtype=np.int32), (2, 1))


@pytest.fixture(scope="module")
def policy():
    return load_decoder(GOLDEN / "llama3")


def test_a_value_is_the_inner_product_with_the_hidden_state():
    head = ValueHead(3)
    head.kernel[...], head.bias[...] = jnp.array([1.0, 0.0, -2.0]), jnp.array(0.5)
    values = head(jnp.array([[1.0, 5.0, 0.25]], jnp.bfloat16))
    np.testing.assert_array_equal(values, [1.0])
    assert values.dtype == jnp.float32


def test_no_device_rounds_the_factors_of_a_value():
    """A TPU would take them in bfloat16, where nothing is said."""
    lowered = jax.jit(lambda hidden: ValueHead(3)(hidden)).lower(jnp.ones((2, 3), jnp.bfloat16))
    assert "precision = [HIGHEST, HIGHEST]" in lowered.as_text()


def test_an_untrained_critic_says_zero(policy):
    critic = Critic(policy)
    values = decoding.call(critic, IDS_BL, POSITIONS_BL, causal_mask(np.ones_like(IDS_BL)))
    np.testing.assert_array_equal(values, np.zeros((2, 6)))


def test_a_critic_carries_no_head_for_tokens():
    """Neither its weights nor their moments: an untied one is a tenth of a model."""
    policy = load_decoder(GOLDEN / "qwen2")
    critic = Critic(policy)
    own, trunk = (nnx.state(x, nnx.Param) for x in (policy, critic.trunk))
    assert set(own) - set(trunk) == {"lm_head"}
    assert critic.trunk.embed[...] is policy.embed[...]
    mask = causal_mask(np.ones_like(IDS_BL))
    expected, _ = decoding.call(policy, IDS_BL, POSITIONS_BL, mask)
    found, _ = decoding.call(critic.trunk, IDS_BL, POSITIONS_BL, mask)
    np.testing.assert_array_equal(found, expected)
    assert policy.lm_head is not None


def test_a_shared_trunk_gives_the_policys_hidden_states_and_values_from_them(policy):
    both = ActorCritic(policy)
    both.head.kernel[...] = jnp.ones((32,))
    mask = causal_mask(np.ones_like(IDS_BL))
    hidden, values = decoding.call(both, IDS_BL, POSITIONS_BL, mask)
    np.testing.assert_allclose(values, np.sum(hidden, axis=-1), atol=1e-5)
    alone, _ = decoding.call(policy, IDS_BL, POSITIONS_BL, mask)
    np.testing.assert_allclose(hidden, alone, atol=1e-6)
    assert isinstance(nnx.state(both), nnx.State)
