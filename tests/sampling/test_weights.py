"""Weights are cast and gathered once per rollout, and sample the same tokens as before."""

import dataclasses
import inspect

import jax
import numpy as np
import pytest
from flax import nnx

from jax_ragrl.llm.kinds import LocalLLMConfig
from jax_ragrl.models.decoder import Decoder, init_sharded
from jax_ragrl.models.hf import save_decoder
from jax_ragrl.models.lora import LoRAConfig, add_lora
from jax_ragrl.models.split import SplitModel
from jax_ragrl.run.models import load_llm
from jax_ragrl.runtime.sharding import Rules, make_mesh, replicate, shard_batch
from jax_ragrl.sampling.decode import Grammar, Samples, decode, start_decode
from jax_ragrl.sampling.grouping import pad_ids, pad_prompts
from jax_ragrl.sampling.sampler import SamplingJob, Shapes, sample_jobs
from jax_ragrl.sampling.weights import for_sampling
from tests.compiled import compilations
from tests.tiny import split_policy, tokenizer

STOPS = np.array([1], np.int32)


def decoder_in(dtype: str = "bfloat16") -> Decoder:
    """A decoder with float32 weights that computes in half precision."""
    decoder = split_policy().merge()
    config = dataclasses.replace(decoder.config, dtype=dtype)
    return Decoder.from_params(config, decoder.params())


def sample(model, prompts, ids_BL, grammar, zero_W) -> Samples:
    # Not the jitted functions, which would be traced once for all tests.
    start, step = inspect.unwrap(start_decode), inspect.unwrap(decode)
    state, prefix = start(model, prompts, ids_BL, slots=4)
    return step(model, prompts, grammar, zero_W, state, prefix).samples()


def arguments(mesh: jax.sharding.Mesh, count: int, width: int = 1) -> tuple:
    jobs = [SamplingJob((3, 4, 5), i, 1.0, 1.0, 4) for i in range(count)]
    ids_BL = pad_ids([job.ids for job in jobs], count, 16)
    batch = shard_batch((pad_prompts([[job] for job in jobs], count, width=width), ids_BL), mesh)
    return *batch, *replicate((Grammar(STOPS), np.zeros(mesh.shape["fsdp"], np.int32)), mesh)


def sampling_program(model: SplitModel, mesh: jax.sharding.Mesh) -> str:
    """The compiled program that samples four prompts over four devices."""
    with jax.set_mesh(mesh):
        lowered = jax.jit(sample).lower(model, *arguments(mesh, 4))
        return lowered.compile({"xla_backend_optimization_level": 0}).as_text()


@pytest.mark.slow
@pytest.mark.parametrize("int8", [False, True])
def test_a_frozen_model_on_a_mesh_gathers_no_weight(int8, tmp_path):
    mesh = make_mesh((1, 4, 1), jax.devices()[:4])
    if int8:
        pytest.importorskip("qwix")
    tokenizer().save(tmp_path / "tokenizer")
    base = dataclasses.replace(decoder_in().config, num_kv_heads=2, vocab_size=len(tokenizer()))
    decoder = Decoder(dataclasses.replace(base, dtype="float32"), rngs=nnx.Rngs(0))
    folder = save_decoder(decoder, tmp_path / "model", tmp_path / "tokenizer")
    config = LocalLLMConfig(str(folder), dtype="float32", int8=int8)
    model = load_llm(config, None, "", Shapes((16,), (1,)), mesh)._model
    text = sampling_program(model, mesh)
    assert "while(" in text and "all-gather" not in text
    dtypes = {x.dtype.name for x in jax.tree.leaves(model)}
    assert dtypes == ({"float32", "int8"} if int8 else {"float32"})


@pytest.mark.parametrize("kv_heads", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_fused_weights_sample_the_same_on_a_tensor_axis(monkeypatch, kv_heads):
    """Fused weights move no more data between devices than separate weights."""
    mesh = make_mesh((1, 1, 2), jax.devices()[:2])
    config = dataclasses.replace(decoder_in("float32").config, num_kv_heads=kv_heads)
    decoder = init_sharded(config, mesh, nnx.Rngs(0), Rules(kv="tensor" if kv_heads > 1 else None))
    unstacked_layers, layers_of_calls = Decoder.unstacked_layers, []

    def run(fuse: bool) -> tuple[Samples, str]:
        def unstacked(decoder: Decoder, **_: bool) -> list[dict]:
            layers_of_calls.append(unstacked_layers(decoder, fuse))
            return layers_of_calls[-1]

        monkeypatch.setattr(Decoder, "unstacked_layers", unstacked)
        with jax.set_mesh(mesh):
            args = SplitModel.from_model(decoder), *arguments(mesh, 2, width=2)
            # A new function: one that is traced already keeps the layers of the first run.
            program = jax.jit(lambda *args: sample(*args)).lower(*args).compile()
            return program(*args), program.as_text()

    (actual, text), (expected, separate_text) = run(True), run(False)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), actual, expected)
    fused = layers_of_calls[0][0]
    assert ("qkv_proj" in fused) == (kv_heads == 2) and "gate_up_proj" in fused
    for name in ("all-gather(", "all-reduce(", "all-to-all(", "collective-permute("):
        assert text.count(name) <= separate_text.count(name), name


def test_weights_are_cast_once_for_a_shared_base_and_gains_of_norms_stay_float32():
    model = for_sampling({"a norm": decoder_in()})["a norm"].merge()
    assert model.embed[...].dtype == model.layers["q_proj"][...].dtype == jax.numpy.bfloat16
    assert model.final_norm[...].dtype == model.layers["q_norm"][...].dtype == np.float32
    base, lora = decoder_in(), LoRAConfig(2, 4.0, ("q_proj",))
    pair = {name: add_lora(base, lora, rngs=nnx.Rngs(i)) for i, name in enumerate("ab")}
    one, other = (model.merge() for model in for_sampling(pair).values())
    assert one.embed[...] is other.embed[...] and one.embed[...].dtype == jax.numpy.bfloat16
    a, b = (x.adapter["q_proj_lora_a"][...] for x in (one, other))
    assert a is not b and a.dtype == jax.numpy.bfloat16
    # They sample what weights that are cast per token sample.
    jobs = [SamplingJob((3, 4, 5 + i), i, 1.0, 1.0, 6) for i in range(2)]
    shapes = Shapes(prompt_lengths=(16,), batch_sizes=(2,), max_new_tokens=6)
    decoder = decoder_in()
    args = (tokenizer(), jobs, 2, shapes)
    expected = sample_jobs(SplitModel.from_model(decoder), *args)
    actual = sample_jobs(for_sampling({"policy": decoder})["policy"], *args)
    for row, other in zip(sum(actual, []), sum(expected, []), strict=True):
        assert row[0] == other[0]
        np.testing.assert_array_equal(row[1], other[1])


def test_the_weights_of_all_updates_are_cast_by_one_program(caplog):
    decoder = decoder_in("float16")
    first = compilations("_cast", caplog, lambda: for_sampling({"policy": decoder}))
    copies = jax.tree.map(jax.numpy.copy, decoder.params())
    new_weights = Decoder.from_params(decoder.config, copies)
    second = compilations("_cast", caplog, lambda: for_sampling({"policy": new_weights}))
    assert first == 1 and second == 0


def test_arrays_that_an_update_donates_are_copied():
    """Staleness 1 samples while the update reuses these buffers."""
    decoder = decoder_in("float32")
    own = jax.tree.leaves(SplitModel.from_model(decoder).params)

    def buffers(*donated: jax.Array) -> set[int]:
        (model,) = for_sampling({"policy": decoder}, donated).values()
        return {x.unsafe_buffer_pointer() for x in jax.tree.leaves(model.params)}

    pointers = {x.unsafe_buffer_pointer() for x in own}
    assert buffers() == pointers and not buffers(*own) & pointers
    assert buffers(own[0]) & pointers == {x.unsafe_buffer_pointer() for x in own[1:]}
