"""Properties of the decoder, its layers, heads and split that involve no other implementation."""

import dataclasses
import functools
import pathlib
import re
from pathlib import Path

import decoding
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax._src.cudnn import fused_attention_stablehlo

from jax_ragrl.errors import UserError
from jax_ragrl.models import attention as attention_module
from jax_ragrl.models.config import DecoderConfig, abstract_params
from jax_ragrl.models.decoder import Decoder, causal_mask, init_cache
from jax_ragrl.models.heads import Critic, ValueHead
from jax_ragrl.models.hf import load_decoder
from jax_ragrl.models.layer import rms_norm, write_cache
from jax_ragrl.models.lora import LoRAConfig, add_lora
from jax_ragrl.models.published import published_config
from jax_ragrl.models.rope import RopeScaling
from jax_ragrl.models.saveable import pack, unpack
from jax_ragrl.models.split import SplitModel
from jax_ragrl.run.overrides import load_config
from tests.compiled import compilations

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
TINY = DecoderConfig(64, 32, 48, 3, 4, 2, 8)


@pytest.fixture(scope="module")
def tiny() -> Decoder:
    return decoding.random_decoder(TINY)


def random_ids(batch: int, length: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, TINY.vocab_size, (batch, length), np.int32)


@functools.partial(jax.jit, static_argnums=(0, 5))
def _logits_after_prefix(graphdef, state, prompts_PL, ids_BT, length_P, fuse=False):
    """Returns logits of two continuations per prompt; prompts are padded and prefilled once."""
    decoder, (count, length), (batch, steps) = (
        nnx.merge(graphdef, state),
        prompts_PL.shape,
        ids_BT.shape,
    )
    at_PL = jnp.broadcast_to(jnp.arange(length)[None], (count, length))
    _, prefix = decoder(prompts_PL, at_PL, None, return_cache=True)
    cache = init_cache(decoder.config, batch, steps)._replace(prefix=prefix)
    length_B1 = jnp.repeat(length_P, batch // count)[:, None]
    prompt_BL = jnp.broadcast_to(jnp.arange(length)[None], (batch, length))
    at_BT = length_B1 + jnp.arange(steps)[None]
    prompt_BTL = jnp.broadcast_to((prompt_BL < length_B1)[:, None], (batch, steps, length))
    own_BTT = jnp.broadcast_to(jnp.tril(jnp.ones((steps, steps), bool)), (batch, steps, steps))
    mask_BTS = jnp.concatenate([prompt_BTL, own_BTT], axis=2)
    keys_BS = jnp.concatenate([prompt_BL, at_BT], axis=1)
    zeros_B = jnp.zeros(batch, jnp.int32)
    layers = decoder.unstacked_layers(fuse)
    return decoder.logits(
        decoder(ids_BT, at_BT, mask_BTS, cache, zeros_B, keys_BS, layers=layers)[0]
    )


@pytest.mark.parametrize("window", [None, 4])
def test_siblings_after_a_prefix_equal_separate_forward_passes(window):
    config = dataclasses.replace(
        TINY, sliding_window=window, sliding_layers=(0, 2) if window else ()
    )
    decoder, ids = decoding.random_decoder(config), random_ids(4, 9)
    prompts_PL, lengths = np.stack([ids[0, :5], ids[2, :5]]), np.array([5, 3], np.int32)
    actual = jax.device_get(
        _logits_after_prefix(*nnx.split(decoder), prompts_PL, ids[:, 5:], lengths)
    )
    for b, row in enumerate(ids):
        length = lengths[b // 2]
        text = np.concatenate([prompts_PL[b // 2, :length], row[5:]])[None]
        expected = decoding.logits(decoder, np.pad(text, ((0, 0), (0, 9 - text.shape[1]))))
        np.testing.assert_allclose(actual[b], expected[0, length : length + 4], atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("adapter", [False, True])
def test_fused_projections_compute_the_same(bias, adapter):
    decoder = decoding.random_decoder(dataclasses.replace(TINY, qkv_bias=bias))
    if adapter:
        decoder = add_lora(decoder, LoRAConfig(rank=2), rngs=nnx.Rngs(0))
        for name, value in decoder.adapter.items():
            value[...] = 0.1 * jax.random.normal(jax.random.key(len(name)), value.shape)
    ids, lengths = random_ids(4, 9), np.array([5, 3], np.int32)
    args = *nnx.split(decoder), ids[::2, :5], ids[:, 5:], lengths
    np.testing.assert_allclose(
        _logits_after_prefix(*args, True), _logits_after_prefix(*args, False), atol=1e-5
    )
    names = decoder.unstacked_layers(fuse=True)[0].keys()
    assert {"qkv_proj", "gate_up_proj"} <= names and not {"q_proj", "gate_proj"} & names


def test_no_gradient_flows_through_masked_pairs(tiny):
    segments_BL = np.array([[1, 1, 1, 2, 2, 0]], np.int32)
    positions_BL = np.array([[0, 1, 2, 0, 1, 0]], np.int32)
    ids_BL = np.arange(6, dtype=np.int32)[None]  # each row of the table is one position
    params = tiny.params()

    def hidden(table_VD, query):
        decoder = Decoder.from_params(TINY, params | {"embed": table_VD})
        out_BLD, _ = decoder(ids_BL, positions_BL, causal_mask(segments_BL))
        return jnp.sum(out_BLD[0, query] * jnp.arange(32.0))

    each_query = jax.vmap(jax.grad(hidden), (None, 0))
    grads = jax.jit(each_query)(params["embed"], np.arange(6))
    has_gradient = np.any(jax.device_get(grads) != 0, axis=-1)[:, :6]
    expected = np.zeros((6, 6), bool)
    expected[:3, :3], expected[3:5, 3:5] = np.tri(3, dtype=bool), np.tri(2, dtype=bool)
    expected[5, 5] = True
    np.testing.assert_array_equal(has_gradient, expected)


def test_saving_matmuls_saves_the_attention_kernel(monkeypatch):
    monkeypatch.setattr(attention_module, "on_cuda", lambda: True)
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)
    ids_BL = jnp.zeros((1, 1024), jnp.int32)

    def calls(remat: str) -> int:
        config = dataclasses.replace(TINY, head_dim=128, dtype="bfloat16", remat=remat)
        graph, params = nnx.split(Decoder.from_params(config, abstract_params(config)))

        def loss(params):
            hidden_BLD, _ = nnx.merge(graph, params)(ids_BL, ids_BL, None)
            return jnp.sum(hidden_BLD.astype(jnp.float32))

        gradient = str(jax.make_jaxpr(jax.grad(loss))(params))
        return gradient.count("dot_product_attention_fwd_wrapper[")

    assert calls("dots") == calls("full") - 1


@pytest.mark.slow
def test_saving_matmuls_takes_a_fraction_of_the_memory():
    """A model of 135M parameters with all activations of 2,048 tokens would take 4 GB of them."""

    def bytes_per_layer(remat: str) -> int:
        sizes = [gradient_bytes(remat, layers) for layers in (1, 3)]
        return (sizes[1] - sizes[0]) // 2

    for file in CONFIGS.glob("real/[!_]*.py"):
        assert load_config(file, [])["remat"] == "dots", file
    assert bytes_per_layer("dots") < bytes_per_layer("none") / 3


def gradient_bytes(remat: str, layers: int) -> int:
    """Bytes of the intermediate values of a gradient, for a batch of the configs of SmolLM2."""
    config = dataclasses.replace(
        published_config("smollm2"), num_layers=layers, vocab_size=64, dtype="bfloat16", remat=remat
    )
    graph, params = nnx.split(Decoder.from_params(config, abstract_params(config)))
    ids_RL = jax.ShapeDtypeStruct((4, 512), jnp.int32)

    def loss(params, ids_RL):
        hidden_RLD, _ = nnx.merge(graph, params)(ids_RL, ids_RL, ids_RL)
        return jnp.sum(hidden_RLD.astype(jnp.float32))

    compiled = jax.jit(jax.grad(loss)).lower(params, ids_RL).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: dataclasses.replace(TINY, num_kv_heads=3), "4 heads cannot share 3"),
        (lambda: dataclasses.replace(TINY, head_dim=7), "head_dim is 7"),
        (lambda: dataclasses.replace(TINY, sliding_layers=(0,)), "sliding_window is not set"),
        (
            lambda: dataclasses.replace(TINY, attention_impl="flash"),
            "'flash': use one of auto, xla",
        ),
        (lambda: RopeScaling("dynamic", 2.0), "'dynamic': use one of linear"),
        (lambda: RopeScaling("linear", 0.5), "factor 0.5 is below 1"),
        (lambda: published_config("qwen9"), "no model size named 'qwen9'"),
    ],
)
def test_impossible_configs_are_refused(make, words):
    with pytest.raises(UserError, match=words):
        make()


def test_a_cache_without_its_offsets_is_refused(tiny):
    ids_BL, mask = random_ids(1, 2), np.ones((1, 2, 4), bool)
    with pytest.raises(UserError, match="without write_B"):
        tiny(ids_BL, ids_BL, mask, init_cache(TINY, 1, 4))


@pytest.mark.parametrize("qkv_bias", [True, False])
def test_no_gradient_sums_tokens_in_half_precision(qkv_bias):
    """In bfloat16 a sum of thousands of similar numbers stops growing, on a TPU too."""
    config = dataclasses.replace(TINY, dtype="bfloat16", qkv_bias=qkv_bias, qk_norm=not qkv_bias)
    graphdef, state = nnx.split(jax.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))
    ids_BL = jax.ShapeDtypeStruct((2, 64), jnp.int32)

    def loss(state, ids_BL):
        hidden, _ = nnx.merge(graphdef, state)(ids_BL, ids_BL, None)
        return jnp.sum(hidden.astype(jnp.float32))

    lines = jax.jit(jax.grad(loss)).lower(state, ids_BL).as_text().splitlines()
    sums = [line for line in lines if "stablehlo.reduce(" in line and "stablehlo.add" in line]
    assert sums and not [line for line in sums if re.search(r"tensor<2x64x\S*bf16>", line)]


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


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_each_row_is_written_at_its_own_offset_and_not_past_the_end(dtype):
    cache_BKSF = jnp.zeros((2, 1, 4, 1), dtype)
    new_BLKF = jnp.arange(1, 7, dtype=jnp.float32).reshape(2, 3, 1, 1)
    actual_BKSF = write_cache(cache_BKSF, new_BLKF, jnp.asarray([0, 2], jnp.int32))
    assert actual_BKSF.dtype == dtype
    assert actual_BKSF[:, 0, :, 0].tolist() == [[1, 2, 3, 0], [0, 0, 4, 5]]


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
