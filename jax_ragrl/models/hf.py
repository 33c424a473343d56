"""Reads and writes decoders in Hugging Face folders: `config.json` and safetensors.

Loading reads, for each device, only the slices that the device holds, so a model larger than one
host can be loaded onto a mesh. Saving fetches one tensor of one layer at a time.
"""

from __future__ import annotations

import dataclasses
import math
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, Sharding, SingleDeviceSharding

from jax_ragrl.config.schema import local
from jax_ragrl.errors import UserError
from jax_ragrl.json_text import read_object
from jax_ragrl.models import hf_config, safetensors_io
from jax_ragrl.models.config import DecoderConfig, Weight, input_axes, layer_weights, weights
from jax_ragrl.models.decoder import Decoder
from jax_ragrl.runtime.jsonl import write_json
from jax_ragrl.runtime.sharding import Rules, replicate_like, to_host, to_sharding
from jax_ragrl.text.tokenizer import SPECIAL_IDS, ChatTokenizer

TOP_NAMES = {
    "embed": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "lm_head": "lm_head.weight",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm.weight",
    "q_proj": "self_attn.q_proj.weight",
    "k_proj": "self_attn.k_proj.weight",
    "v_proj": "self_attn.v_proj.weight",
    "o_proj": "self_attn.o_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "gate_proj": "mlp.gate_proj.weight",
    "up_proj": "mlp.up_proj.weight",
    "down_proj": "mlp.down_proj.weight",
}
TOKENIZER_FILES = (
    "added_tokens.json chat_template.jinja generation_config.json merges.txt "
    "special_tokens_map.json tokenizer.json tokenizer.model tokenizer_config.json "
    "vocab.json".split()
)


class Layout(NamedTuple):
    """The layout of one of our arrays (of one layer) in a checkpoint tensor.

    The first `inputs` axes of a kernel are its input axes: `[in..., out...]` here is stored as
    `[out, in]`. If `inputs` is 0 the array is stored as it is; a bias (`flat`) becomes one axis.
    """

    shape: tuple[int, ...]
    inputs: int
    flat: bool = False

    @property
    def stored_shape(self) -> tuple[int, ...]:
        if self.inputs:
            return (math.prod(self.shape[self.inputs :]), math.prod(self.shape[: self.inputs]))
        return (math.prod(self.shape),) if self.flat else self.shape

    def stored_index(self, index: tuple[slice, ...]) -> tuple[slice, ...]:
        """The part of the stored tensor that holds `self[index]`."""
        if self.inputs:
            ins, outs = index[: self.inputs], index[self.inputs :]
            dims_in, dims_out = self.shape[: self.inputs], self.shape[self.inputs :]
            return (_span(outs, dims_out), _span(ins, dims_in))
        return (_span(index, self.shape),) if self.flat else index

    def from_stored(self, block: np.ndarray, index: tuple[slice, ...]) -> np.ndarray:
        shape = [len(range(*s.indices(n))) for s, n in zip(index, self.shape, strict=True)]
        return (block.T if self.inputs else block).reshape(shape)

    def to_stored(self, value: np.ndarray) -> np.ndarray:
        if not self.inputs:
            return value.reshape(self.stored_shape)
        return value.reshape(self.stored_shape[::-1]).T


def _span(index: tuple[slice, ...], dims: tuple[int, ...]) -> slice:
    """The flattened range of a slice of the first of `dims`; the others must be whole."""
    stride = math.prod(dims[1:])
    start, stop, _ = index[0].indices(dims[0])
    parts = zip(index[1:], dims[1:], strict=True)
    assert all(s.indices(n) == (0, n, 1) for s, n in parts), "no rule splits a head"
    return slice(start * stride, stop * stride)


def layout_of(name: str, weight: Weight) -> Layout:
    return Layout(weight.shape, input_axes(name), flat=name.endswith("_bias"))


def stored_name(name: str, layer: int | None) -> str:
    """The checkpoint's name of a parameter of a layer, or of the model if `layer` is None."""
    return TOP_NAMES[name] if layer is None else f"model.layers.{layer}.{LAYER_NAMES[name]}"


def stored_tensors(config: DecoderConfig) -> Iterator[tuple[str, str, int | None, Layout]]:
    """`(stored name, our name, layer or None, layout)` of every tensor, in model order."""
    top = {n: w for n, w in weights(config).items() if n != "layers"}
    yield (stored_name("embed", None), "embed", None, layout_of("embed", top["embed"]))
    for layer in range(config.num_layers):
        for name, weight in layer_weights(config).items():
            yield stored_name(name, layer), name, layer, layout_of(name, weight)
    for name in [n for n in top if n != "embed"]:
        yield stored_name(name, None), name, None, layout_of(name, top[name])


def read_config(folder: str | Path) -> dict[str, Any]:
    """The parsed `config.json` of a local folder; `UserError` if it is missing or no JSON."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise UserError(f"{path} does not exist: give a local Hugging Face model folder")
    return read_object(path, "copy it again")


def load_decoder(
    folder: str | Path,
    mesh: Mesh | None = None,
    dtype: str = "float32",
    *,
    param_dtype: str | None = None,
    head: bool = True,
    rules: Rules | None = None,
) -> Decoder:
    """Loads the decoder of a local Hugging Face folder, to compute in `dtype`.

    Args:
      mesh: the devices that the parameters are sharded over; None: the first device.
      param_dtype: the dtype that the parameters are kept in; None: `dtype`.
      head: whether logits are needed; False leaves an untied head out, as for a text encoder.

    Raises:
      UserError: a family or config field that is not supported, or tensors that are missing,
        unexpected or of another shape.
    """
    folder = Path(folder)
    config = hf_config.from_hf(read_config(folder))
    config = dataclasses.replace(config, dtype=dtype, param_dtype=param_dtype or dtype)
    if not head:
        # A tied decoder has no tensor for its head, so none is read.
        config = dataclasses.replace(config, tie_embeddings=True)
    files = safetensors_io.locate(folder)
    # Shapes are in the headers of the files: a wrong checkpoint fails before gigabytes are read.
    check_tensors(config, files)
    if head:
        check_tied_head(config, files)
    return Decoder.from_params(config, _load_params(config, files, mesh, rules))


def check_tensors(config: DecoderConfig, files: dict[str, Path]) -> None:
    """Raises `UserError` unless the tensors in `safetensors_io.locate` match a config."""
    config_shapes = {name: layout.stored_shape for name, _, _, layout in stored_tensors(config)}
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(set(files.values())):
        stored_shapes = safetensors_io.shapes_of(path)
        # An index may lack a tensor of its files.
        shapes |= {full_name(name): x for name, x in stored_shapes.items() if name in files}
    for name, shape in config_shapes.items():
        if name not in shapes:
            raise UserError(f"checkpoint lacks {name}: config.json describes another model")
        if shapes[name] != shape:
            raise UserError(
                f"checkpoint has {name} of shape {list(shapes[name])}, but config.json asks for "
                f"{list(shape)}: they belong to different models"
            )
    # Constants may remain, and the copy of the embeddings in some tied checkpoints.
    head = TOP_NAMES["lm_head"] if config.tie_embeddings else None
    others = sorted(set(shapes) - set(config_shapes) - {head})
    if extra := [name for name in others if not name.endswith("rotary_emb.inv_freq")]:
        raise UserError(
            f"checkpoint has {extra[0]} and {len(extra) - 1} more tensors that config.json "
            "has no place for: they belong to different models"
        )


def check_tied_head(config: DecoderConfig, files: dict[str, Path]) -> None:
    """Raises `UserError` if the head of a checkpoint is not the embeddings that it is tied to."""
    embed, head = TOP_NAMES["embed"], TOP_NAMES["lm_head"]
    embed = embed if embed in files else embed.removeprefix("model.")
    if not config.tie_embeddings or head not in files:
        return
    for start in range(0, config.vocab_size, 8192):
        rows = (slice(start, min(start + 8192, config.vocab_size)), slice(None))
        one, other = (safetensors_io.read(files[name], name, rows) for name in (embed, head))
        if not np.array_equal(one.astype(np.float32), other.astype(np.float32)):
            raise UserError(
                f"{files[head].name} has a {head} that differs from the embeddings, but "
                "config.json ties them: set tie_word_embeddings to false, or remove the tensor"
            )


def full_name(name: str) -> str:
    """A tensor's name with the prefix `model.`, which a model saved without its head lacks."""
    # `AutoModel` saves without the prefix, `AutoModelForCausalLM` with it.
    is_bare = name.startswith(("embed_tokens.", "layers.", "norm."))
    return f"model.{name}" if is_bare else name


def _load_params(
    config: DecoderConfig, files: dict[str, Path], mesh: Mesh | None, rules: Rules | None
) -> dict:
    whole, per_layer = weights(config), layer_weights(config)
    flat = {name: (w, w) for name, w in whole.items() if name != "layers"}
    flat |= {name: (w, per_layer[name]) for name, w in whole["layers"].items()}

    def load(name: str) -> Array:
        weight, one_layer = flat[name]
        sharding: Sharding = SingleDeviceSharding(jax.local_devices()[0])
        if mesh is not None:
            sharding = to_sharding(weight.axes, weight.shape, mesh, rules)
        return _load_param(name, weight, layout_of(name, one_layer), files, sharding, config)

    # The largest first: the host copy of a tensor adds least to the peak while little is loaded.
    order = sorted(flat, key=lambda name: -math.prod(flat[name][0].shape))
    params: dict[str, Any] = {name: load(name) for name in order}
    layers = {name: params.pop(name) for name in per_layer}
    return params | {"layers": layers}


def _load_param(
    name: str,
    weight: Weight,
    layout: Layout,
    files: dict[str, Path],
    sharding: Sharding,
    config: DecoderConfig,
) -> Array:
    dtype = jnp.dtype(config.param_dtype)

    def read(layer: int | None, index: tuple[slice, ...]) -> np.ndarray:
        stored = stored_name(name, layer)
        stored = stored if stored in files else stored.removeprefix("model.")
        block = safetensors_io.read(files[stored], stored, layout.stored_index(index))
        return layout.from_stored(block, index)

    def shard(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None  # only a scalar has no axis
        if name in TOP_NAMES:
            return read(None, index).astype(dtype)
        layers = range(*index[0].indices(config.num_layers))
        dims = [len(range(*s.indices(n))) for s, n in zip(index, weight.shape, strict=True)]
        out = np.empty(dims, dtype)
        for i, layer in enumerate(layers):
            out[i] = read(layer, index[1:])
        return out

    return jax.make_array_from_callback(weight.shape, sharding, shard)


def save_decoder(
    decoder: Decoder,
    folder: str | Path,
    tokenizer_folder: str | Path | None = None,
    max_shard_bytes: int = 5_000_000_000,
    *,
    dtype: str | None = None,
) -> Path:
    """Writes a folder that Transformers loads without a missing or unexpected key.

    With several hosts all call it and the first one writes. The folder appears only when it is
    complete; it has the files of a tokenizer if `tokenizer_folder` has them.

    Args:
      max_shard_bytes: the largest size of a safetensors file with more than one tensor.
      dtype: of the written tensors; None: the dtype that the parameters are kept in.

    Raises:
      UserError: the decoder has an adapter or is in int8, the folder is not empty, or the tokenizer
        is missing.
    """
    if decoder.adapter is not None:
        raise UserError(
            "this decoder has an adapter: merge_lora it, or write it alone with save_lora"
        )
    if any(hasattr(x, "qvalue") for x in decoder.params()["layers"].values()):
        raise UserError("this decoder's weights are int8: save the decoder that was quantized")
    dtype = dtype or decoder.config.param_dtype
    raw = hf_config.to_hf(decoder.config, dtype)
    if tokenizer_folder is not None:
        raw |= ChatTokenizer.load(tokenizer_folder).special_ids
    return write_checkpoint(
        decoder.config, raw, fetcher(decoder), folder, dtype, tokenizer_folder, max_shard_bytes
    )


def write_checkpoint(
    config: DecoderConfig,
    raw: dict[str, Any],
    parameter: Callable[[str, int | None], np.ndarray],
    folder: str | Path,
    dtype: str,
    tokenizer_folder: str | Path | None,
    max_shard_bytes: int,
) -> Path:
    """Writes the folder of `save_decoder` with the fields `raw` of `config.json`.

    `parameter` returns a parameter by its name and layer, None for one of the model.
    """

    def entry_of(stored: str, name: str, layer: int | None, layout: Layout) -> safetensors_io.Entry:
        return safetensors_io.Entry(
            stored, layout.stored_shape, dtype, lambda: layout.to_stored(parameter(name, layer))
        )

    entries = [entry_of(*row) for row in stored_tensors(config)]
    folder = check_new(folder)
    if jax.process_index() != 0:
        # Fetching is a collective: every host takes part, and only the first one writes.
        for entry in entries:
            entry.fetch()
        return folder
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    safetensors_io.write_shards(partial, entries, max_shard_bytes)
    write_json(partial / "config.json", raw)
    if tokenizer_folder is not None:
        _copy_tokenizer(Path(tokenizer_folder), partial)
    file = partial / "generation_config.json"
    generation = read_object(file, "copy it again") if file.is_file() else {}
    # A server stops at these ids alone, so all ends of a turn are among them.
    write_json(file, generation | {n: raw[n] for n in SPECIAL_IDS if n in raw})
    if folder.exists():
        folder.rmdir()
    # The last step, so that the folder is complete whenever it exists.
    return partial.rename(folder)


def fetcher(decoder: Decoder) -> Callable[[str, int | None], np.ndarray]:
    """A function that fetches a parameter of a layer, or of the model (layer None), to the host."""
    params = decoder.params()

    def parameter(name: str, layer: int | None) -> np.ndarray:
        if layer is None:
            return to_host(params[name])
        stack = params["layers"][name]
        return to_host(_layer_of(stack, replicate_like(np.int32(layer), stack)))

    return parameter


@jax.jit
def _layer_of(stack: Array, layer: Array) -> Array:
    """The index is an argument, so that one compilation serves every layer."""
    return jax.lax.dynamic_index_in_dim(stack, layer, keepdims=False)


def check_new(folder: str | Path) -> Path:
    """`folder` as a path without a link; `UserError` unless it is local, and absent or empty."""
    folder = local(folder)
    # It will be replaced by a complete one, beside which that is written.
    folder = folder.resolve() if folder.is_symlink() else folder
    if os.path.ismount(folder):
        raise UserError(f"{folder} is a mounted disk, which nothing replaces: give a folder on it")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists and is not an empty folder: choose another")
    return folder


def _copy_tokenizer(source: Path, target: Path) -> None:
    present = [name for name in TOKENIZER_FILES if (source / name).is_file()]
    if not any(name in present for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise UserError(f"{source} has no tokenizer.json: give the folder of the tokenizer")
    for name in present:
        shutil.copyfile(source / name, target / name)
