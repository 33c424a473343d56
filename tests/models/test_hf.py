"""Hugging Face folders in and out; an export is loaded again and compared."""

import contextlib
import json
import shutil
from pathlib import Path
from unittest.mock import Mock

import decoding
import hf_reference
import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from jax_ragrl.errors import UserError
from jax_ragrl.export import export, export_adapter, max_logit_difference
from jax_ragrl.export import weights as export_module
from jax_ragrl.models import hf_config, safetensors_io
from jax_ragrl.models.config import DecoderConfig, param_count
from jax_ragrl.models.decoder import Decoder
from jax_ragrl.models.hf import load_decoder, read_config, save_decoder
from jax_ragrl.models.lora import LoRAConfig, adapter_arrays, add_lora, with_adapter
from jax_ragrl.models.peft import CONFIG_FILE, WEIGHTS_FILE
from jax_ragrl.models.published import MODEL_CONFIGS
from jax_ragrl.runtime.sharding import make_mesh
from tests.model_folders import base_model, model_folder

GOLDEN = Path(__file__).parent / "golden"


def assert_same_params(one: Decoder, other: Decoder) -> None:
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(jax.device_get(a), jax.device_get(b)),
        one.params(),
        other.params(),
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", hf_reference.CASES)
def test_export_loads_in_transformers_with_no_key_missing_and_equal_logits(name, tmp_path):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    decoder = load_decoder(GOLDEN / name)
    # 20 kB per shard: an index and several files.
    save_decoder(decoder, tmp_path / "out", max_shard_bytes=20_000 if "tied" in name else 10**9)
    model, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out",
        output_loading_info=True,
        dtype=torch.float32,
        attn_implementation="eager",
        trust_remote_code=False,
    )
    assert not any(info.values()), info
    golden = np.load(GOLDEN / name / "reference.npz")
    logits = hf_reference.logits(model, golden["ids"], golden["mask"])
    real = golden["mask"]
    # The stored logits are from another processor: the same float32 sums round up to 1.1e-5 apart.
    np.testing.assert_allclose(logits[real], golden["logits"][real], atol=5e-5)


@pytest.mark.parametrize("name", hf_reference.CASES)
def test_import_export_import_keeps_every_parameter_and_the_config(name, tmp_path):
    decoder = load_decoder(GOLDEN / name, dtype="bfloat16")
    back = load_decoder(save_decoder(decoder, tmp_path / "out"), dtype="bfloat16")
    assert back.config == decoder.config
    assert_same_params(back, decoder)


@pytest.mark.parametrize("shape", [(1, 8, 1), (2, 2, 2), (1, 2, 4)])
def test_a_sharded_load_holds_the_same_numbers_and_only_its_slices(shape, tmp_path):
    mesh = make_mesh(shape)
    whole = load_decoder(GOLDEN / "qwen2")
    sharded = load_decoder(GOLDEN / "qwen2", mesh)
    assert_same_params(sharded, whole)
    down = sharded.layers["down_proj"][...]
    tensor, fsdp = mesh.shape["tensor"], mesh.shape["fsdp"]
    assert down.addressable_shards[0].data.shape == (2, 48 // tensor, 32 // fsdp)
    back = load_decoder(save_decoder(sharded, tmp_path / "out", max_shard_bytes=20_000))
    assert_same_params(back, whole)


@pytest.mark.parametrize("name", MODEL_CONFIGS)
def test_a_published_shape_has_as_many_parameters_in_transformers(name):
    torch = pytest.importorskip("torch")
    from transformers import AutoConfig, AutoModelForCausalLM

    raw = hf_config.to_hf(MODEL_CONFIGS[name], "float32")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**raw))
    assert model.num_parameters() == param_count(MODEL_CONFIGS[name])


def config_with(**changes) -> dict:
    return read_config(GOLDEN / "qwen3") | changes


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2'"),
        ({"num_experts": 8}, "sets num_experts = 8"),
        ({"model_type": "gemma3_text"}, "of Gemma 3"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"hidden_size": None}, "hidden_size as None"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope scaling 'longrope'"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "mscale": 1}}, "'mscale'"),
        ({"rope_parameters": {"rope_type": "linear"}}, "no factor"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "part of"),
        ({"layer_types": ["chunked_attention"] * 2}, "chunked_attention"),
        ({"rope_scaling": hf_reference.YARN}, "rope_parameters and another rope_scaling"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 5e5}}}, "per kind of layer"),
    ],
)
def test_a_config_field_that_is_not_supported_is_refused_by_name(changes, words):
    with pytest.raises(UserError, match=words):
        hf_config.from_hf(config_with(**changes))


def test_unknown_fields_are_named_and_both_spellings_of_rope_are_one_config():
    with pytest.warns(UserWarning, match="sets trained_on, unknown here and ignored"):
        config = hf_config.from_hf(config_with(trained_on="notes", unk_token_id=0, odd=None))
    assert config == hf_config.from_hf(config_with())
    old = config_with(rope_theta=5e5, rope_scaling={"type": "linear", "factor": 2.0})
    del old["rope_parameters"]
    new = {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}
    assert hf_config.from_hf(old) == hf_config.from_hf(config_with(rope_parameters=new))
    both = old | {"rope_parameters": old["rope_scaling"]}
    assert hf_config.from_hf(both) == hf_config.from_hf(old)


def test_sliding_layers_have_the_default_window_of_transformers():
    raw = config_with(use_sliding_window=True, max_window_layers=1, layer_types=None)
    for fields, window in ((raw, None), (raw | {"sliding_window": 8}, 8)):
        assert hf_config.from_hf(fields).sliding_window == window
    del raw["sliding_window"]
    assert hf_config.from_hf(raw).sliding_window == 4096


def copy_with_config(folder: Path, **changes) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config_with(**changes)))
    (folder / "model.safetensors").symlink_to(GOLDEN / "qwen3" / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"intermediate_size": 64}, r"gate_proj.weight of shape \[48, 32\].*asks for \[64, 32\]"),
        ({"num_hidden_layers": 3, "layer_types": None}, "lacks model.layers.2"),
        ({"num_hidden_layers": 1, "layer_types": None}, "model.layers.1.*no place for"),
    ],
)
def test_a_checkpoint_of_another_shape_is_refused_with_both_shapes(changes, words, tmp_path):
    with pytest.raises(UserError, match=words):
        load_decoder(copy_with_config(tmp_path / "model", **changes))


def test_of_a_single_file_and_an_index_the_file_is_read_as_in_transformers(tmp_path):
    """The shards are of an earlier model; without the file, the index says which tensors count."""
    folder, new = tmp_path / "model", load_decoder(GOLDEN / "qwen3")
    old = Decoder.from_params(new.config, jax.tree.map(lambda x: 2 * x, new.params()))
    save_decoder(old, folder, max_shard_bytes=20_000)
    shutil.copy(GOLDEN / "qwen3" / "model.safetensors", folder)
    assert_same_params(load_decoder(folder), new)
    (folder / "model.safetensors").unlink()
    assert_same_params(load_decoder(folder), old)
    index = json.loads((folder / safetensors_io.INDEX).read_text())
    del index["weight_map"]["model.layers.1.mlp.up_proj.weight"]
    (folder / safetensors_io.INDEX).write_text(json.dumps(index))
    with pytest.raises(UserError, match="lacks model.layers.1.mlp.up_proj.weight"):
        load_decoder(folder)


def test_values_that_a_dtype_cannot_hold_are_not_saved(tmp_path):
    decoder = load_decoder(GOLDEN / "llama")
    decoder.final_norm[...] = 1e6 * decoder.final_norm[...]
    with pytest.raises(UserError, match="model.norm.weight has values that float16 cannot hold"):
        save_decoder(decoder, tmp_path / "out", dtype="float16")


def test_folders_that_hold_no_whole_checkpoint_are_refused(tmp_path):
    with pytest.raises(UserError, match="config.json does not exist"):
        load_decoder(tmp_path)
    folder = copy_with_config(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match="neither model.safetensors nor"):
        load_decoder(folder)
    whole = (GOLDEN / "qwen3" / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match="not a whole safetensors file"):
        load_decoder(folder)
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (folder / safetensors_io.INDEX).write_text(json.dumps(index))
    with pytest.raises(UserError, match="lacks model-00001-of-00002.safetensors"):
        load_decoder(folder)


def test_saving_never_writes_over_a_folder_nor_leaves_half_of_one(tmp_path, monkeypatch):
    decoder = load_decoder(GOLDEN / "llama")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="not an empty folder"):
        save_decoder(decoder, tmp_path / "full")
    with pytest.raises(UserError, match="mount the bucket"):
        save_decoder(decoder, "gs://bucket/model")
    monkeypatch.setattr(safetensors_io, "write_file", Mock(side_effect=OSError("no space left")))
    with pytest.raises(OSError, match="no space"):
        save_decoder(decoder, tmp_path / "half")
    assert not (tmp_path / "half").exists()


def test_an_export_holds_the_tokenizer_and_every_id_that_ends_a_turn(tmp_path):
    """A base model: its `eos` is not the token with which its chat template ends turns."""
    tokenizer = base_model(tmp_path / "tokenizer")
    generation = tokenizer / "generation_config.json"
    generation.write_text(json.dumps({"eos_token_id": 0, "temperature": 0.7}))
    out = save_decoder(load_decoder(GOLDEN / "llama"), tmp_path / "out", tokenizer)
    assert (out / "tokenizer.json").is_file()
    for file in ("config.json", "generation_config.json"):
        raw = json.loads((out / file).read_text())
        assert (raw["eos_token_id"], raw["pad_token_id"]) == ([2, 0], 0)
        assert "bos_token_id" not in raw
    assert raw["temperature"] == 0.7
    with pytest.raises(UserError, match="no tokenizer_config.json"):
        save_decoder(load_decoder(GOLDEN / "llama"), tmp_path / "again", tmp_path)


def test_a_head_that_differs_from_the_embeddings_is_not_tied_in_silence(tmp_path):
    folder = model_folder(tmp_path / "tied")
    weights = load_file(folder / "model.safetensors")
    head = np.array(weights["model.embed_tokens.weight"])
    for factor, is_refused in ((1, False), (2, True)):
        save_file(weights | {"lm_head.weight": head * factor}, folder / "model.safetensors")
        with pytest.raises(UserError, match="lm_head") if is_refused else contextlib.nullcontext():
            load_decoder(folder)


def test_a_decoder_no_family_describes_is_not_exported(tmp_path):
    config = DecoderConfig(16, 8, 8, 1, 2, 1, 4, qkv_bias=True, qk_norm=True)
    with pytest.raises(UserError, match="no family in Transformers"):
        save_decoder(decoding.random_decoder(config), tmp_path / "out")


def test_bfloat16_loading_rounds_and_computes_in_bfloat16():
    decoder = load_decoder(GOLDEN / "qwen3", dtype="bfloat16")
    assert decoder.embed[...].dtype == "bfloat16"
    golden = np.load(GOLDEN / "qwen3" / "reference.npz")
    logits = decoding.logits(decoder, golden["ids"], golden["mask"])
    assert logits.dtype == np.float32
    error = np.abs(logits - golden["logits"])[golden["mask"]]
    assert np.mean(error) < 0.05 * np.std(golden["logits"])


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


def test_an_export_with_other_logits_is_reported(tmp_path, monkeypatch):
    def load_corrupted(folder, *args, **kwargs):
        decoder = load_decoder(folder, *args, **kwargs)
        decoder.final_norm[...] = 2 * decoder.final_norm[...]
        return decoder

    monkeypatch.setattr(export_module, "load_decoder", load_corrupted)
    with pytest.raises(UserError, match="reads back with logits off by"):
        export(load_decoder(GOLDEN / "llama"), tmp_path / "out")
