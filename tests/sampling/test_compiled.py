"""Programs of the sampler as they are compiled for a TPU that need not be present."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_ragrl.plan.traffic import program_traffic
from jax_ragrl.runtime.topology import describe_devices
from jax_ragrl.sampling.decode import rows_minor, sample_token, scaled

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
