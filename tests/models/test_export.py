"""An export is verified: it is loaded again and compared."""

import json
from pathlib import Path

import jax
import pytest
from flax import nnx

from jax_ragrl.cli.main import main
from jax_ragrl.errors import UserError
from jax_ragrl.export import export, export_adapter, max_logit_difference
from jax_ragrl.export import weights as export_module
from jax_ragrl.models.config import param_count
from jax_ragrl.models.decoder import Decoder
from jax_ragrl.models.hf import load_decoder
from jax_ragrl.models.lora import LoRAConfig, adapter_arrays, add_lora, with_adapter
from jax_ragrl.models.peft import CONFIG_FILE, WEIGHTS_FILE
from jax_ragrl.runtime.sharding import make_mesh

GOLDEN = Path(__file__).parent / "golden"


def with_changed_adapter(fresh: Decoder) -> Decoder:
    arrays = {name: jax.device_get(x) + 0.1 for name, x in adapter_arrays(fresh).items()}
    layout = {name: x.sharding for name, x in adapter_arrays(fresh).items()}
    return with_adapter(fresh, jax.device_put(arrays, layout), fresh.adapter_scale)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_export_loads_with_the_same_logits(dtype, tmp_path):
    decoder = load_decoder(GOLDEN / "qwen2")
    result = export(decoder, tmp_path / "out", dtype=dtype)
    assert result.max_difference == 0.0
    width = {"float32": 4, "bfloat16": 2}[dtype]
    tensors = (result.folder / "model.safetensors").stat().st_size
    assert width * param_count(decoder.config) < tensors < result.num_bytes


def test_a_sharded_decoder_with_an_adapter_is_exported_merged(tmp_path):
    mesh = make_mesh((1, 4, 2))
    base = load_decoder(GOLDEN / "qwen3", mesh)
    fresh = add_lora(base, LoRAConfig(rank=2), rngs=nnx.Rngs(0))
    adapted = with_changed_adapter(fresh)
    result = export(adapted, tmp_path / "out", dtype="float32")
    assert result.max_difference < 1e-4
    back = load_decoder(result.folder, mesh)
    assert max_logit_difference(adapted, back) < 1e-3
    assert max_logit_difference(base, back) > 0.1


def test_an_adapter_export_loads_on_the_same_base(tmp_path):
    base = load_decoder(GOLDEN / "qwen2")
    adapted = with_changed_adapter(add_lora(base, LoRAConfig(rank=2), rngs=nnx.Rngs(0)))
    result = export_adapter(adapted, tmp_path / "out", "somewhere/base", "v1")
    assert result.max_difference == 0.0
    files = {f.name: f.stat().st_size for f in result.folder.iterdir()}
    assert result.num_bytes == sum(files.values()) and set(files) == {CONFIG_FILE, WEIGHTS_FILE}
    config = json.loads((result.folder / CONFIG_FILE).read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == ("somewhere/base", "v1")
    with pytest.raises(UserError, match="carries no adapter"):
        export_adapter(base, tmp_path / "again")


def test_only_a_run_can_be_exported(tmp_path, capsys):
    assert main(["export", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert "give the --workdir of a run" in capsys.readouterr().err


def test_an_export_with_other_logits_is_reported(tmp_path, monkeypatch):
    def load_corrupted(folder, *args, **kwargs):
        decoder = load_decoder(folder, *args, **kwargs)
        decoder.final_norm[...] = 2 * decoder.final_norm[...]
        return decoder

    monkeypatch.setattr(export_module, "load_decoder", load_corrupted)
    with pytest.raises(UserError, match="reads back with logits off by"):
        export(load_decoder(GOLDEN / "llama"), tmp_path / "out")
