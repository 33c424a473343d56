"""A split model is a pytree of arrays around a static graph."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

from jax_ragrl.models.config import DecoderConfig
from jax_ragrl.models.decoder import Decoder
from jax_ragrl.models.lora import LoRAConfig, add_lora
from jax_ragrl.models.split import SplitModel
from tests.compiled import compilations

CONFIG = DecoderConfig(32, 16, 16, 2, 2, 1, 8)


def adapted_decoder() -> Decoder:
    base = Decoder(CONFIG, rngs=nnx.Rngs(0))
    return add_lora(base, LoRAConfig(2, 4.0, ("q_proj",)), rngs=nnx.Rngs(1))


@pytest.mark.parametrize(("trained_filter", "count"), [(nnx.Param, None), (nnx.LoRAParam, 2)])
def test_a_merged_model_shares_every_array(trained_filter, count):
    decoder = adapted_decoder()
    split = SplitModel.from_model(decoder, trained_filter)
    before, after = (jax.tree.leaves(nnx.state(model)) for model in (decoder, split.merge()))
    assert all(a is b for a, b in zip(before, after, strict=True))
    assert len(jax.tree.leaves(split.params)) == (count or len(before))
    assert len(jax.tree.leaves(split)) == len(before)
    changed = dataclasses.replace(split, params=jax.tree.map(jax.numpy.zeros_like, split.params))
    assert not np.any(jax.device_get(changed.merge().adapter["q_proj_lora_a"][...]))


def test_equal_graphs_share_a_compiled_program(caplog):
    @jax.jit
    def sum_of_queries(split: SplitModel) -> jax.Array:
        return jax.numpy.sum(split.merge().layers["q_proj"][...])

    decoder = Decoder(CONFIG, rngs=nnx.Rngs(0))
    other = dataclasses.replace(CONFIG, max_positions=8)
    programs = [
        compilations("sum_of_queries", caplog, lambda m=m: sum_of_queries(m))
        for m in (
            SplitModel.from_model(decoder),
            SplitModel.from_model(Decoder(CONFIG, rngs=nnx.Rngs(1))),
            SplitModel.from_model(Decoder.from_params(other, decoder.params())),
        )
    ]
    assert programs == [1, 0, 1]
