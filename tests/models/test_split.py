"""A split model is a pytree around a static graph; activations that a loop over layers keeps."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_ragrl.models.config import DecoderConfig
from jax_ragrl.models.decoder import Decoder
from jax_ragrl.models.lora import LoRAConfig, add_lora
from jax_ragrl.models.saveable import pack, unpack
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


LAYERS, WIDTH = 5, 48  # sizes that occur in no other shape


def config(remat: str) -> DecoderConfig:
    return DecoderConfig(64, WIDTH, 96, LAYERS, 4, 2, 12, dtype="bfloat16", remat=remat)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_packing_keeps_every_bit(dtype):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 4)), dtype)
    assert pack(x).dtype == (jnp.uint16 if dtype == jnp.bfloat16 else dtype)
    np.testing.assert_array_equal(unpack(pack(x), x.dtype), x)


def gradient(remat: str, lora: bool):
    """Returns the jitted gradient of a sum of hidden states, and its arguments."""
    decoder = Decoder(config(remat), rngs=nnx.Rngs(0))
    if lora:
        decoder = add_lora(decoder, LoRAConfig(4), rngs=nnx.Rngs(0))
    split = SplitModel.from_model(decoder, nnx.LoRAParam if lora else nnx.Param)
    ids_RL = jnp.arange(2 * 32, dtype=jnp.int32).reshape(2, 32) % 64

    def loss(params):
        model = nnx.merge(split.graph, params, split.frozen)
        hidden_RLD, _ = model(ids_RL, jnp.tile(jnp.arange(32, dtype=jnp.int32), (2, 1)), None)
        return jnp.sum(jnp.square(hidden_RLD.astype(jnp.float32)))

    return jax.jit(jax.grad(loss)), split.params


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("remat", ["dots", "full"])
def test_no_layer_converts_what_all_layers_keep(remat, lora):
    """Whole stacks were converted to float32 and back in each layer."""
    function, params = gradient(remat, lora)
    text = function.lower(params).compile().as_text()
    dtypes = re.findall(rf"= (\w+)\[{LAYERS},2,32[\d,]*\]", text)
    assert dtypes and set(dtypes) == {"u16"}


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True])
def test_the_backward_pass_repeats_no_product_with_weights(lora):
    """Only products of the width of the adapter are cheaper to repeat than to keep."""
    function, params = gradient("dots", lora)
    text = function.lower(params).compile().as_text()
    shapes = re.findall(r"= \w+\[([\d,]+)\]\S* dot\(.*rematted_computation/dot_general", text)
    assert {shape.split(",")[-1] for shape in shapes} <= {"4"}


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True])
def test_gradients_do_not_depend_on_what_is_kept(lora):
    gradients = []
    for remat in ("none", "dots", "full"):
        function, params = gradient(remat, lora)
        gradients.append(jax.device_get(function(params)))
    for other in gradients[1:]:
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(x, y, rtol=0.05, atol=0.05), gradients[0], other
        )
