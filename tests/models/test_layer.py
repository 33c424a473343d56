"""Parts of a layer, with numbers small enough to check by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ragrl.models.config import DecoderConfig
from jax_ragrl.models.layer import rms_norm, write_cache
from tests.models import decoding

TINY = DecoderConfig(64, 32, 48, 2, 4, 2, 8)


def test_a_norm_divides_by_the_root_mean_square_and_rounds_once():
    x_D, gain_D = np.float32([3e-3, -4e-3]), np.float32([1, 2])
    actual_D = jax.device_get(rms_norm(*jax.device_put((x_D, gain_D)), 3.5e-6))
    np.testing.assert_allclose(actual_D, [3e-3 / 4e-3, -2 * 4e-3 / 4e-3], rtol=1e-6)
    rng = np.random.default_rng(0)
    x_BD, gain_D = jax.device_put((rng.normal(size=(4, 64)), rng.normal(size=64)))
    x_BD, gain_D = x_BD.astype(jnp.bfloat16), gain_D.astype(jnp.float32)
    wide_BD = rms_norm(x_BD.astype(jnp.float32), gain_D, 1e-6)
    assert rms_norm(x_BD, gain_D, 1e-6).dtype == jnp.bfloat16
    np.testing.assert_array_equal(rms_norm(x_BD, gain_D, 1e-6), wide_BD.astype(jnp.bfloat16))


def test_zero_embeddings_give_zero_hidden_states():
    """Norms of zeros are zeros, also the norms of queries and keys."""
    decoder = decoding.random_decoder(TINY)
    decoder.embed[...] = jnp.zeros_like(decoder.embed[...])
    ids_BL = np.zeros((1, 4), np.int32)
    hidden_BLD = decoding.call(decoder, ids_BL, np.arange(4, dtype=np.int32)[None], None)[0]
    assert TINY.qk_norm and not np.any(jax.device_get(hidden_BLD))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_each_row_is_written_at_its_own_offset_and_not_past_the_end(dtype):
    cache_BKSF = jnp.zeros((2, 1, 4, 1), dtype)
    new_BLKF = jnp.arange(1, 7, dtype=jnp.float32).reshape(2, 3, 1, 1)
    actual_BKSF = write_cache(cache_BKSF, new_BLKF, jnp.asarray([0, 2], jnp.int32))
    assert actual_BKSF.dtype == dtype
    assert actual_BKSF[:, 0, :, 0].tolist() == [[1, 2, 3, 0], [0, 0, 4, 5]]
