"""Adapters as PEFT has them, and eight-bit weights: each changes the base through its term only."""

import dataclasses
import sys
from pathlib import Path

import decoding
import hf_reference
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_ragrl.cli.main import CONFIGS, load_config
from jax_ragrl.errors import UserError
from jax_ragrl.llm.kinds import LocalLLMConfig
from jax_ragrl.models.config import DecoderConfig
from jax_ragrl.models.decoder import Decoder
from jax_ragrl.models.hf import load_decoder, save_decoder
from jax_ragrl.models.int8 import quantize_decoder
from jax_ragrl.models.lora import (
    LoRAConfig,
    adapter_arrays,
    add_lora,
    lora_config,
    merge_lora,
    with_adapter,
)
from jax_ragrl.models.peft import load_lora, save_lora
from jax_ragrl.models.split import SplitModel
from jax_ragrl.run.load import load_job
from jax_ragrl.run.models import load_llm, load_policies
from jax_ragrl.run.short_names import parse_llm
from jax_ragrl.runtime.sharding import make_mesh
from jax_ragrl.sampling.sampler import Shapes
from jax_ragrl.sampling.weights import for_sampling
from jax_ragrl.types import LLMRequest, Message, Sampling
from tests.model_folders import change_json
from tests.tiny import tokenizer

GOLDEN = Path(__file__).parent / "golden"
LORA = LoRAConfig(rank=4, alpha=12.0)
IDS_BL, MASK_BL = hf_reference.padded_batch(9)


@pytest.fixture(scope="module")
def base() -> Decoder:
    return load_decoder(GOLDEN / "qwen3")


def adapted_decoder(base: Decoder, seed: int = 0, lora: LoRAConfig = LORA) -> Decoder:
    """Returns the base with an adapter whose B is not zero."""
    fresh = add_lora(base, lora, rngs=nnx.Rngs(seed))
    rng = np.random.default_rng(seed)
    arrays = {
        name: jnp.asarray(rng.normal(0, 0.3, x.shape), jnp.float32)
        for name, x in adapter_arrays(fresh).items()
    }
    return with_adapter(base, arrays, fresh.adapter_scale)


def test_a_fresh_adapter_changes_nothing_and_shares_the_base(base):
    fresh = add_lora(base, LORA, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(decoding.logits(fresh, IDS_BL), decoding.logits(base, IDS_BL))
    assert fresh.embed[...] is base.embed[...]
    assert lora_config(fresh) == LoRAConfig(4, 12.0, tuple(sorted(LORA.targets)))


def test_only_the_adapter_has_a_gradient(base):
    split = SplitModel.from_model(adapted_decoder(base), nnx.LoRAParam)

    def loss(adapter):
        decoder = dataclasses.replace(split, params=adapter).merge()
        return jnp.mean(decoding._forward(*nnx.split(decoder), IDS_BL, MASK_BL, IDS_BL) ** 2)

    grads = jax.jit(jax.grad(loss))(split.params)
    leaves = jax.tree.leaves(grads)
    assert len(leaves) == 2 * len(LORA.targets)
    assert all(bool(jnp.any(g != 0)) for g in leaves)


def test_an_adapter_loads_as_it_was_saved_and_no_decoder_with_one_is_saved(base, tmp_path):
    adapted = adapted_decoder(base, lora=LoRAConfig(2, 5.0, ("o_proj", "gate_proj")))
    back = load_lora(base, save_lora(adapted, tmp_path / "adapter"))
    assert lora_config(back) == lora_config(adapted)
    jax.tree.map(np.testing.assert_array_equal, adapter_arrays(back), adapter_arrays(adapted))
    with pytest.raises(UserError, match="merge_lora it"):
        save_decoder(adapted_decoder(base), tmp_path / "out")
    with pytest.raises(UserError, match="carries no adapter"):
        save_lora(base, tmp_path / "out")


def test_an_adapter_on_a_mesh_computes_the_same(base, tmp_path):
    mesh = make_mesh((2, 2, 2))
    adapted = adapted_decoder(base)
    folder = save_lora(adapted, tmp_path / "adapter")
    sharded = load_lora(load_decoder(GOLDEN / "qwen3", mesh), folder, mesh)
    a = adapter_arrays(sharded)["q_proj_lora_a"]
    assert a.addressable_shards[0].data.shape == (2, 32 // 2, 4)
    actual = decoding.logits(sharded, IDS_BL)
    np.testing.assert_allclose(actual, decoding.logits(adapted, IDS_BL), atol=1e-4)
    fresh = add_lora(load_decoder(GOLDEN / "qwen3", mesh), LORA, rngs=nnx.Rngs(0))
    same = add_lora(base, LORA, rngs=nnx.Rngs(0))
    for name, x in adapter_arrays(fresh).items():
        np.testing.assert_array_equal(jax.device_get(x), adapter_arrays(same)[name])


@pytest.mark.parametrize("name", ["qwen3", "qwen2", "llama"])
def test_adapters_load_in_peft_with_equal_logits(name, tmp_path):
    torch = pytest.importorskip("torch")
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    base = load_decoder(GOLDEN / name)
    adapted = adapted_decoder(base)
    save_decoder(base, tmp_path / "base")
    save_lora(adapted, tmp_path / "adapter", base_model=str(tmp_path / "base"))
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "base", dtype=torch.float32, trust_remote_code=False
    )
    model = peft.PeftModel.from_pretrained(model, tmp_path / "adapter").eval()
    logits = hf_reference.logits(model, IDS_BL, MASK_BL)
    actual = decoding.logits(adapted, IDS_BL, MASK_BL)
    np.testing.assert_allclose(actual[MASK_BL], logits[MASK_BL], atol=2e-4)
    save_decoder(merge_lora(adapted), tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(
        tmp_path / "merged", dtype=torch.float32, trust_remote_code=False
    )
    alone = hf_reference.logits(merged, IDS_BL, MASK_BL)
    np.testing.assert_allclose(alone[MASK_BL], logits[MASK_BL], atol=2e-4)


def test_peft_adapters_load_here_with_equal_logits(base, tmp_path):
    torch = pytest.importorskip("torch")
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        GOLDEN / "qwen3", dtype=torch.float32, trust_remote_code=False
    )
    config = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], init_lora_weights=False
    )
    model = peft.get_peft_model(model, config).eval()
    model.save_pretrained(tmp_path / "adapter")
    adapted = load_lora(base, tmp_path / "adapter")
    logits = hf_reference.logits(model, IDS_BL, MASK_BL)
    actual = decoding.logits(adapted, IDS_BL, MASK_BL)
    np.testing.assert_allclose(actual[MASK_BL], logits[MASK_BL], atol=2e-4)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"use_dora": True}, "use_dora = True"),
        ({"bias": "all"}, "bias = 'all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"peft_type": "IA3"}, "is a IA3"),
        ({"target_modules": "all-linear"}, "is a pattern"),
        ({"target_modules": ["q_proj", "router"]}, "'router' is not a projection"),
        ({"r": 8}, r"lora_A.weight has shape \[4, 48\], but this base needs \[8, 48\]"),
        ({"target_modules": ["q_proj"]}, "the base has no place"),
    ],
)
def test_an_unsupported_adapter_is_refused(base, changes, words, tmp_path):
    folder = save_lora(adapted_decoder(base), tmp_path / "adapter")
    change_json(folder / "adapter_config.json", **changes)
    with pytest.raises(UserError, match=words):
        load_lora(base, folder)


def test_a_base_below_adapters_is_in_the_compute_dtype():
    """The base is not trained, so a sampler shares it instead of casting a float32 copy."""
    values = load_config(CONFIGS / "tiny" / "c3po.py", ["--config.compute_dtype=bfloat16"])
    lora_job = load_job(values | {"lora": {"rank": 2}})
    ((name, one),) = load_policies(lora_job, None)[0].items()
    ((_, full),) = load_policies(load_job(values), None)[0].items()
    dtypes = [{x.dtype.name for x in jax.tree.leaves(d.params())} for d in (one, full)]
    assert dtypes == [{"bfloat16"}, {"float32"}]
    assert {x.dtype.name for x in adapter_arrays(one).values()} == {"float32"}
    sampler_model = for_sampling({name: one})[name].merge()
    assert sampler_model.embed[...] is one.embed[...]


WIDE = DecoderConfig(64, 64, 128, 2, 4, 2, 16)


def test_int8_logits_are_near_the_original_ones():
    pytest.importorskip("qwix")
    base = load_decoder(GOLDEN / "qwen2")
    expected = decoding.logits(base, IDS_BL, MASK_BL)[MASK_BL]
    actual = decoding.logits(quantize_decoder(base), IDS_BL, MASK_BL)[MASK_BL]
    assert 0 < np.mean(np.abs(actual - expected)) < 0.04 * np.std(expected)
    np.testing.assert_array_equal(decoding.logits(base, IDS_BL, MASK_BL)[MASK_BL], expected)


def test_the_config_key_int8_shrinks_a_local_llm_that_answers(tmp_path):
    pytest.importorskip("qwix")
    tokenizer().save(tmp_path / "tokenizer")
    config = dataclasses.replace(WIDE, vocab_size=len(tokenizer()))
    base = decoding.random_decoder(config)
    folder = str(save_decoder(base, tmp_path / "model", tmp_path / "tokenizer"))
    shapes = Shapes(prompt_lengths=(32,), batch_sizes=(1,), max_new_tokens=4)
    small, plain = (
        load_llm(LocalLLMConfig(folder, int8=int8), None, "", shapes) for int8 in (True, False)
    )
    sizes = [sum(x.nbytes for x in jax.tree.leaves(llm._model)) for llm in (small, plain)]
    assert sizes[0] < 0.6 * sizes[1]
    request = LLMRequest("answer", (Message("user", "film"),), Sampling(max_tokens=4))
    assert isinstance(small.complete([request])[0], str)
    with pytest.raises(UserError, match="use int8 with a local model only"):
        parse_llm("openai:m", int8=True)


def test_adapters_and_saving_are_refused_for_int8(tmp_path, monkeypatch):
    base = load_decoder(GOLDEN / "qwen2")
    with pytest.raises(UserError, match="merge_lora it before"):
        quantize_decoder(add_lora(base, LoRAConfig(rank=2), rngs=nnx.Rngs(0)))
    monkeypatch.setitem(sys.modules, "qwix", None)
    with pytest.raises(UserError, match="pip install qwix"):
        quantize_decoder(base)
    monkeypatch.undo()
    pytest.importorskip("qwix")
    with pytest.raises(UserError, match="save the decoder that was quantized"):
        save_decoder(quantize_decoder(base), tmp_path / "out")
