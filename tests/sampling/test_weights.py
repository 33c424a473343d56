"""A rollout's weights are cast and gathered once, and sample what the trained ones do."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
import pytest
from flax import nnx

from jax_ragrl.models.decoder import Decoder, init_sharded
from jax_ragrl.models.lora import LoRAConfig, add_lora
from jax_ragrl.runtime.sharding import Rules, make_mesh, replicate, shard_batch
from jax_ragrl.sampling.decode import Grammar, Sampled, generate
from jax_ragrl.sampling.sampler import Job, Shapes, pad_prompts, sample_jobs
from jax_ragrl.sampling.weights import for_sampling
from tests.compiled import compilations
from tests.tiny import policy, tokenizer


def half(dtype: str = "bfloat16") -> Decoder:
    """Float32 weights, computing in half precision."""
    decoder = nnx.merge(*policy())
    config = dataclasses.replace(decoder.config, dtype=dtype)
    return Decoder.from_params(config, decoder.params())


def test_no_weight_and_no_row_of_the_cache_is_gathered_while_a_mesh_samples():
    """The program holds no all-gather at all, so none in the loop over tokens."""
    mesh = make_mesh((1, 4, 1), jax.devices()[:4])
    config = dataclasses.replace(half().config, num_kv_heads=2)
    decoder = init_sharded(config, mesh, nnx.Rngs(0))
    jobs = [Job((3, 4, 5), i, 1.0, 1.0, 4) for i in range(4)]
    with jax.set_mesh(mesh):
        prompts = shard_batch(pad_prompts(jobs, 16, 4), mesh)
        stops = replicate(np.array([1], np.int32), mesh)
        acting = for_sampling({"policy": decoder})["policy"]
        lowered = generate.lower(*acting, prompts, Grammar(stops), width=1, steps=4)
        text = lowered.compile({"xla_backend_optimization_level": 0}).as_text()
    assert "while(" in text and "all-gather" not in text


@pytest.mark.parametrize("kv_heads", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_on_a_tensor_axis_joined_weights_sample_the_same_and_none_is_moved(monkeypatch, kv_heads):
    mesh = make_mesh((1, 1, 2), jax.devices()[:2])
    config = dataclasses.replace(half("float32").config, num_kv_heads=kv_heads)
    decoder = init_sharded(config, mesh, nnx.Rngs(0), Rules(kv="tensor" if kv_heads > 1 else None))
    layers_apart, given = Decoder.layers_apart, []

    def sampled(join: bool) -> tuple[Sampled, str]:
        def layers(decoder: Decoder, **_: bool) -> list[dict]:
            given.append(layers_apart(decoder, join))
            return given[-1]

        monkeypatch.setattr(Decoder, "layers_apart", layers)
        jobs = [Job((3, 4, 5), i, 1.0, 1.0, 4) for i in range(2)]
        with jax.set_mesh(mesh):
            prompts = shard_batch(pad_prompts(jobs, 16, 2), mesh)
            stops = replicate(np.array([1], np.int32), mesh)
            graph, params = nnx.split(decoder, nnx.Param)
            anew = jax.jit(functools.partial(generate.__wrapped__, graph, width=2, steps=4))
            compiled = anew.lower(params, prompts, Grammar(stops)).compile()
            return compiled(params, prompts, Grammar(stops)), compiled.as_text()

    (found, text), (expected, before) = sampled(True), sampled(False)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), found, expected)
    assert ("qkv_proj" in given[0][0]) == (kv_heads == 2) and "gate_up_proj" in given[0][0]
    for name in ("all-gather(", "all-reduce(", "all-to-all(", "collective-permute("):
        assert text.count(name) <= before.count(name), name


def test_weights_cast_once_sample_what_those_cast_with_every_token_sample():
    jobs = [Job((3, 4, 5 + i), i, 1.0, 1.0, 6) for i in range(2)]
    shapes = Shapes(lengths=(16,), batches=(2,), steps=6)
    decoder = half()
    given = (tokenizer(), jobs, 2, shapes)
    expected = sample_jobs(*nnx.split(decoder, nnx.Param), *given)
    found = sample_jobs(*for_sampling({"policy": decoder})["policy"], *given)
    for row, other in zip(sum(found, []), sum(expected, []), strict=True):
        assert row[0] == other[0]
        np.testing.assert_array_equal(row[1], other[1])


def test_gains_of_norms_stay_float32_and_every_other_weight_is_in_the_compute_dtype():
    graph, params = for_sampling({"a norm": half()})["a norm"]
    acting = nnx.merge(graph, params)
    assert acting.embed[...].dtype == acting.layers["q_proj"][...].dtype == jax.numpy.bfloat16
    assert acting.final_norm[...].dtype == acting.layers["q_norm"][...].dtype == np.float32


def test_without_a_mesh_and_without_a_cast_nothing_is_copied():
    decoder = nnx.merge(*policy())
    _, params = for_sampling({"policy": decoder})["policy"]
    own = jax.tree.leaves(nnx.state(decoder, nnx.Param))
    assert all(a is b for a, b in zip(jax.tree.leaves(params), own, strict=True))


def test_a_base_that_policies_share_is_cast_once():
    base, lora = half(), LoRAConfig(2, 4.0, ("q_proj",))
    pair = {name: add_lora(base, lora, rngs=nnx.Rngs(i)) for i, name in enumerate("ab")}
    one, other = (nnx.merge(*split) for split in for_sampling(pair).values())
    assert one.embed[...] is other.embed[...] and one.embed[...].dtype == jax.numpy.bfloat16
    a, b = (x.adapter["q_proj_lora_a"][...] for x in (one, other))
    assert a is not b and a.dtype == jax.numpy.bfloat16


def test_the_weights_of_every_update_are_cast_by_one_program(caplog):
    decoder = half("float16")
    once = compilations("_cast", caplog, lambda: for_sampling({"policy": decoder}))
    updated = Decoder.from_params(decoder.config, jax.tree.map(jax.numpy.copy, decoder.params()))
    again = compilations("_cast", caplog, lambda: for_sampling({"policy": updated}))
    assert once == 1 and again == 0
