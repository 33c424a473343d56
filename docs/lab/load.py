"""Measures the host memory for loading a checkpoint.

    python docs/lab/load.py [SHAPE]

Writes a checkpoint with random weights into a temporary folder and loads it in a separate process
onto eight virtual devices. The result is the growth of that process's resident memory until its
peak, as a multiple of the checkpoint size. The loaded weights account for 1, because virtual
devices keep them in host memory.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_ragrl.errors import UserError
from jax_ragrl.models.config import DecoderConfig, layer_weights, param_count, weights
from jax_ragrl.models.hf import load_decoder, write_checkpoint
from jax_ragrl.models.hf_config import to_hf
from jax_ragrl.models.published import published_config
from jax_ragrl.runtime.sharding import make_mesh

DEVICES = 8
SHARD_BYTES = 300_000_000  # small enough for several files, as large checkpoints have


def bench_load(shape: str = "qwen2.5-0.5b") -> dict[str, Any]:
    """Writes, loads and measures one checkpoint of a published model.

    Needs up to twice the size of the checkpoint on disk.

    Returns:
      `shape`, `parameters`, `checkpoint_bytes`, `devices`, `write_s`, `load_s`, `rss_before_bytes`,
      `rss_peak_bytes` and `peak_over_checkpoint`.
    """
    config = published_config(shape)
    with tempfile.TemporaryDirectory() as temporary:
        start = time.perf_counter()
        folder = write_random(config, Path(temporary) / "model")
        write_s = time.perf_counter() - start
        size = sum(f.stat().st_size for f in folder.glob("*.safetensors"))
        # While the folder exists: its files are deleted at the end of this block.
        loading = _measure_in_new_process(folder)
    # Only the growth counts: libraries occupy memory before the weights are loaded.
    growth = loading["rss_peak_bytes"] - loading["rss_before_bytes"]
    return {
        "shape": shape,
        "parameters": param_count(config),
        "checkpoint_bytes": size,
        "devices": DEVICES,
        "write_s": round(write_s, 2),
        **loading,
        "peak_over_checkpoint": round(growth / size, 3),
    }


def write_random(config: DecoderConfig, folder: Path) -> Path:
    """Writes a bfloat16 checkpoint of random weights, with one tensor in memory at a time."""
    # Repeating one block is much faster than sampling billions of numbers.
    block = np.random.default_rng(0).normal(0, 0.02, 1 << 20).astype(jnp.bfloat16)
    top, layer_shapes = weights(config), layer_weights(config)

    def fetch(name: str, layer: int | None) -> np.ndarray:
        shape = (top if layer is None else layer_shapes)[name].shape
        repeats = -(-math.prod(shape) // block.size)
        return np.tile(block, repeats)[: math.prod(shape)].reshape(shape)

    raw = to_hf(config, "bfloat16")
    return write_checkpoint(config, raw, fetch, folder, "bfloat16", None, SHARD_BYTES)


def _measure_in_new_process(folder: Path) -> dict[str, Any]:
    # A fresh process: the peak of this one includes writing the checkpoint.
    # Virtual devices need the CPU platform, and must be requested before JAX starts.
    flags = f"--xla_force_host_platform_device_count={DEVICES}"
    process = subprocess.run(
        [sys.executable, __file__, str(folder)],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
    )
    if process.returncode:
        last_line = process.stderr.strip().splitlines()[-1:]
        raise UserError(f"loading {folder} failed: {last_line}")
    # Libraries may print lines before the result.
    return json.loads(process.stdout.splitlines()[-1])


def measure(folder: Path) -> dict[str, Any]:
    """Loads a checkpoint; resident bytes of this process before and at the peak."""
    mesh = make_mesh((1, -1, 1))
    before, start = _resident("VmRSS"), time.perf_counter()
    decoder = load_decoder(folder, mesh, dtype="bfloat16")
    # Copies to devices are asynchronous.
    decoder.embed[...].block_until_ready()
    return {
        "load_s": round(time.perf_counter() - start, 2),
        "rss_before_bytes": before,
        "rss_peak_bytes": _resident("VmHWM"),
    }


def _resident(field: str) -> int:
    """Resident memory in bytes: `VmRSS` is the current size, `VmHWM` the peak."""
    # `ru_maxrss` is unusable here: it includes the peak of the parent before exec.
    status = Path("/proc/self/status")
    if not status.is_file():
        raise UserError("this system has no /proc, from which peak memory is read: use Linux")
    line = next(x for x in status.read_text().splitlines() if x.startswith(field))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    name = sys.argv[1] if len(sys.argv) > 1 else "qwen2.5-0.5b"
    # The second process gets the folder.
    print(json.dumps(measure(Path(name)) if Path(name).is_dir() else bench_load(name)))
