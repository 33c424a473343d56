"""Eight-bit weights are smaller and give nearly the same logits."""

import dataclasses
import sys
from pathlib import Path

import decoding
import hf_reference
import jax
import numpy as np
import pytest
from flax import nnx

from jax_ragrl.errors import UserError
from jax_ragrl.llm.kinds import LocalLLMConfig
from jax_ragrl.models.config import DecoderConfig, param_count
from jax_ragrl.models.hf import load_decoder, save_decoder
from jax_ragrl.models.int8 import quantize_decoder
from jax_ragrl.models.lora import LoRAConfig, add_lora
from jax_ragrl.run.models import load_llm
from jax_ragrl.run.short_names import parse_llm
from jax_ragrl.sampling.sampler import Shapes
from jax_ragrl.types import LLMRequest, Message, Sampling
from tests.tiny import tokenizer

GOLDEN = Path(__file__).parent / "golden"
IDS_BL, MASK_BL = hf_reference.padded_batch(9)
WIDE = DecoderConfig(64, 64, 128, 2, 4, 2, 16)


def test_int8_logits_are_near_the_original_ones():
    pytest.importorskip("qwix")
    base = load_decoder(GOLDEN / "qwen2")
    expected = decoding.logits(base, IDS_BL, MASK_BL)[MASK_BL]
    actual = decoding.logits(quantize_decoder(base), IDS_BL, MASK_BL)[MASK_BL]
    assert 0 < np.mean(np.abs(actual - expected)) < 0.04 * np.std(expected)
    np.testing.assert_array_equal(decoding.logits(base, IDS_BL, MASK_BL)[MASK_BL], expected)


def test_projections_take_one_byte_per_parameter():
    pytest.importorskip("qwix")
    config = dataclasses.replace(WIDE, param_dtype="bfloat16")
    small = quantize_decoder(decoding.random_decoder(config))
    size = sum(x.nbytes for x in jax.tree.leaves(nnx.state(small)))
    table = config.vocab_size * config.hidden_size
    assert size < 1.1 * (param_count(config) - table) + 2 * table


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
