"""Export, verified by reading back."""

from pathlib import Path

import numpy as np
import pytest
from flax import nnx

from jax_ragrl import export as export_module
from jax_ragrl.errors import UserError
from jax_ragrl.export import export, max_logit_difference
from jax_ragrl.models.decoder import param_count
from jax_ragrl.models.hf import load_decoder
from jax_ragrl.models.lora import LoRAConfig, adapter_arrays, add_lora, with_adapter
from jax_ragrl.sharding import make_mesh

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_exported_reads_back_with_the_same_logits(dtype, tmp_path):
    decoder = load_decoder(GOLDEN / "qwen2")
    result = export(decoder, tmp_path / "out", dtype=dtype)
    assert result.max_difference == 0.0
    width = {"float32": 4, "bfloat16": 2}[dtype]
    tensors = (result.folder / "model.safetensors").stat().st_size
    assert width * param_count(decoder.config) < tensors < result.num_bytes


def test_a_sharded_decoder_with_an_adapter_is_exported_merged(tmp_path):
    mesh = make_mesh((1, 4, 2))
    base = load_decoder(GOLDEN / "qwen3", mesh)
    fresh = add_lora(base, LoRAConfig(rank=2), rngs=nnx.Rngs(0), mesh=mesh)
    arrays = {name: x + 0.1 for name, x in adapter_arrays(fresh).items()}
    adapted = with_adapter(base, arrays, fresh.adapter_scale)
    result = export(adapted, tmp_path / "out", dtype="float32")
    assert result.max_difference < 1e-4
    back = load_decoder(result.folder, mesh)
    assert max_logit_difference(adapted, back) < 1e-3
    assert max_logit_difference(base, back) > 0.1


def test_an_export_that_reads_back_differently_is_reported(tmp_path, monkeypatch):
    def corrupting(folder, *args, **kwargs):
        decoder = load_decoder(folder, *args, **kwargs)
        decoder.final_norm[...] = 2 * decoder.final_norm[...]
        return decoder

    monkeypatch.setattr(export_module, "load_decoder", corrupting)
    with pytest.raises(UserError, match="reads back with logits off by"):
        export(load_decoder(GOLDEN / "llama"), tmp_path / "out")


def test_probing_needs_no_tokenizer_and_repeats_itself():
    decoder = load_decoder(GOLDEN / "llama")
    assert max_logit_difference(decoder, decoder) == 0.0
    assert np.isfinite(max_logit_difference(decoder, load_decoder(GOLDEN / "qwen2")))
