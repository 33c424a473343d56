"""Loads a Flax NNX module from the safetensors of a Hugging Face folder, one tensor at a time."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from flax import nnx

from jax_ragrl.errors import UserError
from jax_ragrl.models import safetensors_io

Path = tuple[Any, ...]  # of a parameter within a module: ('layers', 0, 'up', 'kernel')
Module = TypeVar("Module", bound=nnx.Module)


def leaf_name(path: Path) -> str:
    """Returns PyTorch's name of a parameter of a layer: `bias` or `weight`."""
    return "bias" if path[-1] == "bias" else "weight"


def load_module(
    make: Callable[[], Module],
    folder: pathlib.Path,
    stored_name: Callable[[Path], str],
    canonical: Callable[[str], str] = str,
) -> Module:
    """Returns a module with the float32 weights of a folder; the host holds no second copy.

    Args:
      make: constructs the module; it is only traced, because its initial weights are not needed.
      stored_name: the canonical name, in the checkpoint, of a parameter.
      canonical: the canonical form of a name in the checkpoint, which may have a prefix.

    Raises:
      UserError: there are no safetensors, or a weight is missing or has a wrong shape.
    """
    graph, state = nnx.split(nnx.eval_shape(make))
    flat = dict(nnx.to_flat_state(state))
    paths = {stored_name(path): path for path in flat}
    arrays = {}
    for name, file in safetensors_io.locate(folder).items():
        if path := paths.get(canonical(name)):
            tensor = safetensors_io.read(file, name, (slice(None),)).astype(np.float32)
            # PyTorch multiplies by the transposed kernel, `[out, in]`.
            tensor = tensor.T if path[-1] == "kernel" else tensor
            if tensor.shape != flat[path].shape:
                raise UserError(
                    f"weight {name} has shape {tensor.shape}, the config asks for "
                    f"{flat[path].shape}: take config.json and model.safetensors from one model"
                )
            arrays[path] = flat[path].replace(jax.device_put(np.ascontiguousarray(tensor)))
    missing = [name for name, path in paths.items() if path not in arrays]
    if missing:
        raise UserError(f"{folder} lacks {len(missing)} weights, e.g. {missing[0]}: copy it again")
    return nnx.merge(graph, nnx.from_flat_state(arrays))
