"""Adapters in the folder format of PEFT: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import functools
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from jax_ragrl.errors import UserError
from jax_ragrl.json_text import read_object
from jax_ragrl.models import hf, safetensors_io
from jax_ragrl.models.config import DecoderConfig
from jax_ragrl.models.decoder import Decoder
from jax_ragrl.models.lora import (
    LoRAConfig,
    adapter_arrays,
    adapter_sides,
    adapter_weights,
    lora_config,
    with_adapter,
)
from jax_ragrl.runtime.jsonl import write_json
from jax_ragrl.runtime.sharding import to_host, tree_shardings

WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"
_PREFIX = "base_model.model."
# Fields that `_read_peft_config` uses, and fields without effect on the outputs of an adapter. Any
# other field with a true value is refused.
_VALID = set(
    "peft_type task_type r lora_alpha target_modules use_rslora "
    "auto_mapping base_model_name_or_path inference_mode lora_dropout megatron_core peft_version "
    "qalora_group_size revision runtime_config".split()
)
# Harmless values of other fields. Other initializations (PiSSA, LoftQ, CorDA) change the base too,
# so their adapter alone is wrong.
_ALLOWED = {"bias": ("none",), "init_lora_weights": (True, "gaussian", "orthogonal")}


def save_lora(
    decoder: Decoder, folder: str | Path, base_model: str | None = None, revision: str | None = None
) -> Path:
    """Writes the adapter in PEFT's layout, without the base, and returns the folder.

    Args:
      decoder: has the adapter. On several hosts all processes call this.
      base_model: the folder or the name of the base, for the config file.
      revision: the branch, tag or commit of a base on the Hub; None: the main branch.
    """
    lora, arrays = lora_config(decoder), adapter_arrays(decoder)
    folder = hf.check_new(folder)
    # All processes gather; only the first one writes.
    values = to_host(arrays)
    if jax.process_index() != 0:
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    entries = [
        safetensors_io.Entry(name, value.shape, "float32", functools.partial(np.asarray, value))
        for name, value in _to_peft(decoder.config, lora, values).items()
    ]
    safetensors_io.write_file(folder / WEIGHTS_FILE, entries)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "revision": revision,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": list(lora.targets),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "inference_mode": True,
    }
    write_json(folder / CONFIG_FILE, config)
    return folder


def _peft_names(config: DecoderConfig, target: str) -> list[tuple[int, str, str]]:
    """Returns `(layer, name of A, name of B)` for each layer of a target."""
    stems = [
        _PREFIX + hf.stored_name(target, i).removesuffix(".weight")
        for i in range(config.num_layers)
    ]
    return [(i, f"{s}.lora_A.weight", f"{s}.lora_B.weight") for i, s in enumerate(stems)]


def _to_peft(
    config: DecoderConfig, lora: LoRAConfig, values: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Returns the tensors in PEFT's layout: per layer A as `[rank, in]`, B as `[out, rank]`."""
    tensors = {}
    for target in lora.targets:
        for layer, name_a, name_b in _peft_names(config, target):
            a, b = values[f"{target}_lora_a"][layer], values[f"{target}_lora_b"][layer]
            tensors[name_a] = np.ascontiguousarray(a.reshape(-1, lora.rank).T)
            tensors[name_b] = np.ascontiguousarray(b.reshape(lora.rank, -1).T)
    return tensors


def load_lora(decoder: Decoder, folder: str | Path, mesh: Mesh | None = None) -> Decoder:
    """Returns a decoder around the base `decoder` with the adapter of a PEFT folder.

    Args:
      mesh: the mesh to place the adapter on; None takes the first local device.

    Raises:
      UserError: an option that is not supported, or an adapter of another base.
    """
    folder = Path(folder)
    lora, scale = _read_peft_config(folder)
    values = _from_peft(decoder.config, lora, folder)
    table = adapter_weights(decoder.config, lora)
    # Without a mesh the arrays are committed to a device, as `load_decoder` commits the base.
    layout = jax.local_devices()[0]
    if mesh is not None:
        layout = tree_shardings({n: w.axes for n, w in table.items()}, values, mesh)
    return with_adapter(decoder, jax.device_put(values, layout), scale)


def _read_peft_config(folder: Path) -> tuple[LoRAConfig, float]:
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise UserError(f"{path} does not exist: give the folder of a PEFT adapter")
    raw = read_object(path, "copy it again")
    odd = [n for n, v in raw.items() if v and n not in _VALID and v not in _ALLOWED.get(n, ())]
    if raw.get("peft_type") != "LORA" or odd:
        problem = f"sets {odd[0]} = {raw[odd[0]]!r}" if odd else f"is a {raw.get('peft_type')}"
        raise UserError(
            f"the adapter in {folder} {problem}, which is not supported: retrain it as plain LoRA"
        )
    if missing := sorted({"target_modules", "r", "lora_alpha"} - raw.keys()):
        raise UserError(f"{path} lacks {missing[0]}: copy it again")
    targets = raw["target_modules"]
    if isinstance(targets, str):
        raise UserError(
            f"target_modules {targets!r} is a pattern, not a list: list the projections instead"
        )
    rank, alpha = raw["r"], float(raw["lora_alpha"])
    # Rank-stabilized LoRA (Kalajdzievski 2023) scales by alpha / sqrt(rank).
    power = 0.5 if raw.get("use_rslora") else 1.0
    return LoRAConfig(rank, alpha, tuple(targets)), alpha / rank**power


def _from_peft(config: DecoderConfig, lora: LoRAConfig, folder: Path) -> dict[str, np.ndarray]:
    path = folder / WEIGHTS_FILE
    shapes = safetensors_io.shapes_of(path)
    values = {}
    for target in lora.targets:
        ins, outs, _ = adapter_sides(config, target)
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
        raise UserError(
            f"the adapter has {next(iter(shapes))}, for which the base has no place: "
            "the adapter belongs to another base"
        )
    return values


def _check(name: str, shape: tuple[int, ...] | None, wanted_shape: tuple[int, ...]) -> None:
    if shape != wanted_shape:
        has = "is missing" if shape is None else f"has shape {list(shape)}"
        raise UserError(
            f"adapter tensor {name} {has}, but this base needs {list(wanted_shape)}: "
            "the adapter belongs to another base"
        )


def _read(path: Path, name: str) -> np.ndarray:
    everything = (slice(None), slice(None))
    return safetensors_io.read(path, name, everything).astype(np.float32)
