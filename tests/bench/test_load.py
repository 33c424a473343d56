"""What loading needs beyond the weights themselves."""

import dataclasses

import numpy as np
import pytest

from jax_ragrl.bench import load
from jax_ragrl.models.hf import load_decoder
from jax_ragrl.models.safetensors_io import INDEX
from jax_ragrl.models.shapes import shape


def test_a_random_sharded_checkpoint_of_a_published_family_loads(tmp_path, monkeypatch):
    monkeypatch.setattr(load, "SHARD_BYTES", 50_000)
    config = dataclasses.replace(
        shape("llama-3.1-8b"), hidden_size=64, intermediate_size=96, num_layers=2, vocab_size=128
    )
    folder = load.write_random(config, tmp_path / "model")
    assert (folder / INDEX).is_file()
    decoder = load_decoder(folder, dtype="bfloat16")
    assert decoder.config == dataclasses.replace(config, dtype="bfloat16", param_dtype="bfloat16")
    assert np.std(np.asarray(decoder.embed[...], np.float32)) == pytest.approx(0.02, rel=0.1)


@pytest.mark.slow
def test_loading_half_a_billion_parameters_peaks_below_1_3_checkpoints():
    result = load.bench_load()
    assert result["checkpoint_bytes"] >= 2 * result["parameters"]
    assert result["peak_over_checkpoint"] < 1.3, result
