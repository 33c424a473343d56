"""Low-rank adapters: a policy of its own for a few million parameters beside a shared base.

  y = x W + (alpha / rank) (x A) B,   A: [in, rank],  B: [rank, out]

Hu et al. 2021 (arXiv 2106.09685). An adapter is the attribute `Decoder.adapter`; its variables are
`nnx.LoRAParam`, so `nnx.split(decoder, nnx.LoRAParam, ...)` separates what is trained and saved
from what is frozen. Decoders made from one base share its buffers.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import Mesh

from jax_ragrl.errors import UserError
from jax_ragrl.models import hf, safetensors_io
from jax_ragrl.models.config import DecoderConfig, Weight, layer_weights
from jax_ragrl.models.decoder import Decoder
from jax_ragrl.runtime.sharding import fetch, mesh_of, replicate, tree_shardings

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"


@dataclasses.dataclass(frozen=True)
class LoRAConfig:
    """`targets` are names of projections; the update is scaled by `alpha / rank`."""

    rank: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] = ATTENTION + MLP

    def __post_init__(self) -> None:
        if self.rank < 1 or not self.targets:
            raise UserError(
                f"LoRA of rank {self.rank} on {len(self.targets)} targets trains nothing: give a "
                "rank of at least 1 and at least one target"
            )
        for name in self.targets:
            if name not in ATTENTION + MLP:
                raise UserError(
                    f"LoRA target {name!r} is not a projection: use some of "
                    f"{', '.join(ATTENTION + MLP)}"
                )


def adapter_weights(config: DecoderConfig, lora: LoRAConfig) -> dict[str, Weight]:
    """`<target>_lora_a` and `<target>_lora_b`, stacked over layers; B starts at zero."""
    table = {}
    for name in sorted(lora.targets):
        ins, outs, axes = _sides(config, name)
        fan_in = int(np.prod(ins))
        table[f"{name}_lora_a"] = Weight(
            (config.num_layers, *ins, lora.rank),
            ("layers", *axes[: len(ins)], None),
            std=fan_in**-0.5,
        )
        table[f"{name}_lora_b"] = Weight(
            (config.num_layers, lora.rank, *outs), ("layers", None, *axes[len(ins) :])
        )
    return table


def _sides(config: DecoderConfig, name: str) -> tuple[tuple, tuple, tuple]:
    """Input dimensions, output dimensions and logical axes of a projection."""
    weight = layer_weights(config)[name]
    inputs = hf.layout_of(name, weight).inputs
    return weight.shape[:inputs], weight.shape[inputs:], weight.axes


def add_lora(decoder: Decoder, lora: LoRAConfig, *, rngs: nnx.Rngs) -> Decoder:
    """A decoder that shares the base arrays of `decoder` and adds a fresh float32 adapter.

    It computes what the base computes, until trained. Consumes one `params` key of `rngs`. The
    adapter is laid out over the mesh of the base, if that is on one.
    """
    mesh = mesh_of(decoder.params())
    table = adapter_weights(decoder.config, lora)
    rows, key, scale = tuple(table.items()), rngs.params(), lora.alpha / lora.rank
    if mesh is None:
        return with_adapter(decoder, _draw_here(rows, key), scale)
    shapes = {name: jax.ShapeDtypeStruct(w.shape, jnp.float32) for name, w in rows}
    layout = tree_shardings({name: w.axes for name, w in rows}, shapes, mesh)
    draw = jax.jit(_draw, static_argnums=0, out_shardings=layout)
    return with_adapter(decoder, draw(rows, replicate(key, mesh)), scale)


def _draw(table: tuple[tuple[str, Weight], ...], key: Array) -> dict[str, Array]:
    keys = jax.random.split(key, len(table))
    return {
        name: w.std * jax.random.normal(keys[i], w.shape) if w.std else jnp.zeros(w.shape)
        for i, (name, w) in enumerate(table)
    }


_draw_here = jax.jit(_draw, static_argnums=0)


def with_adapter(decoder: Decoder, arrays: dict[str, Array], scale: float) -> Decoder:
    """A decoder around the base arrays of `decoder` and the given adapter arrays."""
    adapted = nnx.merge(*nnx.split(decoder))
    adapted.adapter = nnx.Dict({name: nnx.LoRAParam(x) for name, x in arrays.items()})
    adapted.adapter_scale = float(scale)
    return adapted


def adapter_arrays(decoder: Decoder) -> dict[str, Array]:
    """The adapter's arrays by name; `UserError` where there is none."""
    if decoder.adapter is None:
        raise UserError(
            "this decoder carries no adapter: train with lora, or export without --adapter"
        )
    return {name: value[...] for name, value in decoder.adapter.items()}


def lora_config(decoder: Decoder) -> LoRAConfig:
    """The config an adapter was made with."""
    arrays = adapter_arrays(decoder)
    targets = tuple(n.removesuffix("_lora_a") for n in arrays if n.endswith("_lora_a"))
    rank = next(x.shape[1] for n, x in arrays.items() if n.endswith("_lora_b"))
    return LoRAConfig(rank, decoder.adapter_scale * rank, targets)


def merge_lora(decoder: Decoder) -> Decoder:
    """A plain decoder that computes the same: `W + scale A B`, in the storage dtype."""
    arrays, params = adapter_arrays(decoder), decoder.params()
    layers = dict(params["layers"])
    for name in lora_config(decoder).targets:
        a, b = arrays[f"{name}_lora_a"], arrays[f"{name}_lora_b"]
        layers[name] = _merge(layers[name], a, b, decoder.adapter_scale)
    return Decoder.from_params(decoder.config, params | {"layers": layers})


@functools.partial(jax.jit, static_argnames="scale")
def _merge(kernel: Array, a: Array, b: Array, scale: float) -> Array:
    layers, rank = a.shape[0], a.shape[-1]
    update = jnp.einsum(
        "nir,nro->nio", a.reshape(layers, -1, rank), b.reshape(layers, rank, -1)
    ).reshape(kernel.shape)
    return (kernel.astype(jnp.float32) + jnp.float32(scale) * update).astype(kernel.dtype)


# PEFT's folder: adapter_config.json and adapter_model.safetensors.

_PREFIX = "base_model.model."
_UNDERSTOOD = {"peft_type", "task_type", "r", "lora_alpha", "target_modules", "use_rslora"}
_UNUSED = {
    "auto_mapping",
    "base_model_name_or_path",
    "inference_mode",
    "lora_dropout",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
}

# Other initialisations (PiSSA, LoftQ, CorDA) also change the base, so their adapter alone is wrong.
_ALLOWED = {"bias": ("none",), "init_lora_weights": (True, "gaussian", "orthogonal")}


def save_lora(decoder: Decoder, folder: str | Path, base_model: str | None = None) -> Path:
    """Write the adapter alone, in PEFT's layout; `base_model` is the base's folder or name."""
    lora, arrays = lora_config(decoder), adapter_arrays(decoder)
    folder = hf.check_new(folder)
    values = fetch(arrays)
    if jax.process_index() != 0:
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    entries = [
        safetensors_io.Entry(name, value.shape, "float32", functools.partial(np.asarray, value))
        for name, value in _to_peft(decoder.config, lora, values).items()
    ]
    safetensors_io.write_file(folder / WEIGHTS_FILE, entries)
    hf.write_json(folder / CONFIG_FILE, _peft_config(lora, base_model))
    return folder


def _peft_config(lora: LoRAConfig, base_model: str | None) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": list(lora.targets),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "inference_mode": True,
    }


def _peft_names(config: DecoderConfig, target: str) -> list[tuple[int, str, str]]:
    """`(layer, name of A, name of B)` of one target."""
    stems = [
        _PREFIX + hf.stored_name(target, i).removesuffix(".weight")
        for i in range(config.num_layers)
    ]
    return [(i, f"{s}.lora_A.weight", f"{s}.lora_B.weight") for i, s in enumerate(stems)]


def _to_peft(
    config: DecoderConfig, lora: LoRAConfig, values: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """PEFT stores A as `[rank, in]` and B as `[out, rank]`, a layer at a time."""
    stored = {}
    for target in lora.targets:
        for layer, name_a, name_b in _peft_names(config, target):
            a, b = values[f"{target}_lora_a"][layer], values[f"{target}_lora_b"][layer]
            stored[name_a] = np.ascontiguousarray(a.reshape(-1, lora.rank).T)
            stored[name_b] = np.ascontiguousarray(b.reshape(lora.rank, -1).T)
    return stored


def load_lora(decoder: Decoder, folder: str | Path, mesh: Mesh | None = None) -> Decoder:
    """`decoder` with the adapter of a PEFT folder.

    Raises `UserError` for options that are not supported and for an adapter of another base.
    """
    folder = Path(folder)
    lora, scale = _read_peft_config(folder)
    values = _from_peft(decoder.config, lora, folder)
    table = adapter_weights(decoder.config, lora)
    layout = jax.local_devices()[0]
    if mesh is not None:
        layout = tree_shardings({n: w.axes for n, w in table.items()}, values, mesh)
    return with_adapter(decoder, jax.device_put(values, layout), scale)


def _read_peft_config(folder: Path) -> tuple[LoRAConfig, float]:
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise UserError(f"{path} does not exist: give the folder of a PEFT adapter")
    raw = json.loads(path.read_text())
    known = _UNDERSTOOD | _UNUSED
    odd = [n for n, v in raw.items() if v and n not in known and v not in _ALLOWED.get(n, ())]
    if raw.get("peft_type") != "LORA" or odd:
        what = f"sets {odd[0]} = {raw[odd[0]]!r}" if odd else f"is a {raw.get('peft_type')}"
        raise UserError(f"the adapter in {folder} {what}, which is not supported: retrain it plain")
    targets = raw["target_modules"]
    if isinstance(targets, str):
        raise UserError(f"target_modules {targets!r} is a pattern: list the projections instead")
    rank, alpha = raw["r"], float(raw["lora_alpha"])
    return LoRAConfig(rank, alpha, tuple(targets)), alpha / rank ** (
        0.5 if raw.get("use_rslora") else 1.0
    )


def _from_peft(config: DecoderConfig, lora: LoRAConfig, folder: Path) -> dict[str, np.ndarray]:
    path = folder / WEIGHTS_FILE
    shapes = safetensors_io.shapes_of(path)
    values = {}
    for target in lora.targets:
        ins, outs, _ = _sides(config, target)
        names = _peft_names(config, target)
        a_shape, b_shape = (lora.rank, int(np.prod(ins))), (int(np.prod(outs)), lora.rank)
        for _, name_a, name_b in names:
            _check(name_a, shapes.pop(name_a, None), a_shape)
            _check(name_b, shapes.pop(name_b, None), b_shape)
        a = np.stack([_read(path, name_a).T for _, name_a, _ in names])
        b = np.stack([_read(path, name_b).T for _, _, name_b in names])
        values[f"{target}_lora_a"] = a.reshape(config.num_layers, *ins, lora.rank)
        values[f"{target}_lora_b"] = b.reshape(config.num_layers, lora.rank, *outs)
    if shapes:
        raise UserError(f"the adapter has {next(iter(shapes))}, for which the base has no place")
    return values


def _check(name: str, shape: tuple[int, ...] | None, wanted: tuple[int, ...]) -> None:
    if shape != wanted:
        has = "is missing" if shape is None else f"has shape {list(shape)}"
        raise UserError(
            f"adapter tensor {name} {has}, but this base needs {list(wanted)}: "
            "the adapter belongs to another base"
        )


def _read(path: Path, name: str) -> np.ndarray:
    whole = (slice(None), slice(None))
    return safetensors_io.read(path, name, whole).astype(np.float32)
