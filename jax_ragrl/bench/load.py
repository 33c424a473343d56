"""How much host memory loading a checkpoint takes.

Writes a random checkpoint of a published shape into a temporary folder, loads it in a process of
its own onto eight virtual devices, and tells that process's peak of resident memory beyond
what it held before loading, as a multiple of the checkpoint's size. The loaded weights themselves
are 1: virtual devices keep them in host memory.
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
from jax_ragrl.models.published import shape as shape_of
from jax_ragrl.runtime.sharding import make_mesh

DEVICES = 8
SHARD_BYTES = 300_000_000


def bench_load(shape: str = "qwen2.5-0.5b") -> dict[str, Any]:
    """Write, load and measure one checkpoint; needs twice its size of disk for a moment.

    Returns `shape`, `parameters`, `checkpoint_bytes`, `devices`, `write_s`, `load_s`,
    `rss_before_bytes`, `rss_peak_bytes` and `peak_over_checkpoint`.
    """
    config = shape_of(shape)
    with tempfile.TemporaryDirectory() as temporary:
        started = time.perf_counter()
        folder = write_random(config, Path(temporary) / "model")
        written = time.perf_counter() - started
        size = sum(f.stat().st_size for f in folder.glob("*.safetensors"))
        measured = _in_a_process_of_its_own(folder)
    beyond = measured["rss_peak_bytes"] - measured["rss_before_bytes"]
    return {
        "shape": shape,
        "parameters": param_count(config),
        "checkpoint_bytes": size,
        "devices": DEVICES,
        "write_s": round(written, 2),
        **measured,
        "peak_over_checkpoint": round(beyond / size, 3),
    }


def write_random(config: DecoderConfig, folder: Path) -> Path:
    """A bfloat16 checkpoint of random weights, one tensor in memory at a time."""
    block = np.random.default_rng(0).normal(0, 0.02, 1 << 20).astype(jnp.bfloat16)
    top, layer_shapes = weights(config), layer_weights(config)

    def fetch(name: str, layer: int | None) -> np.ndarray:
        shape = (top if layer is None else layer_shapes)[name].shape
        repeats = -(-math.prod(shape) // block.size)
        return np.tile(block, repeats)[: math.prod(shape)].reshape(shape)

    raw = to_hf(config, "bfloat16")
    return write_checkpoint(config, raw, fetch, folder, "bfloat16", None, SHARD_BYTES)


def _in_a_process_of_its_own(folder: Path) -> dict[str, Any]:
    flags = f"--xla_force_host_platform_device_count={DEVICES}"
    done = subprocess.run(
        [sys.executable, "-m", "jax_ragrl.bench.load", str(folder)],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise UserError(f"loading {folder} failed: {done.stderr.strip().splitlines()[-1:]}")
    return json.loads(done.stdout.splitlines()[-1])


def measure(folder: Path) -> dict[str, Any]:
    """Load onto all devices of this process; resident bytes before and at the peak."""
    mesh = make_mesh((1, -1, 1))
    before, started = _resident("VmRSS"), time.perf_counter()
    decoder = load_decoder(folder, mesh, dtype="bfloat16")
    decoder.embed[...].block_until_ready()
    return {
        "load_s": round(time.perf_counter() - started, 2),
        "rss_before_bytes": before,
        "rss_peak_bytes": _resident("VmHWM"),
    }


def _resident(field: str) -> int:
    """`VmRSS` is resident now, `VmHWM` at its highest. (`ru_maxrss` outlives exec: no use here.)"""
    status = Path("/proc/self/status")
    if not status.is_file():
        raise UserError("peak memory is read from /proc, which this system lacks: use Linux")
    line = next(x for x in status.read_text().splitlines() if x.startswith(field))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    print(json.dumps(measure(Path(sys.argv[1]))))
