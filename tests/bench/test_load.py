"""What loading needs beyond the weights themselves."""

import dataclasses

import numpy as np
import pytest

from jax_ragrl.bench import load
from jax_ragrl.cli.main import main
from jax_ragrl.models.hf import load_decoder
from jax_ragrl.models.published import shape
from jax_ragrl.models.safetensors_io import INDEX


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


def test_the_command_prints_one_line_of_json_and_refuses_an_unknown_shape(capsys, monkeypatch):
    monkeypatch.setattr(load, "bench_load", lambda shape: {"shape": shape, "load_s": 1.5})
    assert main(["bench", "load", "--json", "--shape", "qwen3-4b"]) == 0
    assert capsys.readouterr().out == '{"shape": "qwen3-4b", "load_s": 1.5}\n'
    monkeypatch.undo()
    assert main(["bench", "load", "--shape", "qwen9"]) == 2
    assert "no shape named 'qwen9'" in capsys.readouterr().err


@pytest.mark.slow
def test_loading_half_a_billion_parameters_peaks_below_1_3_checkpoints():
    result = load.bench_load()
    assert result["checkpoint_bytes"] >= 2 * result["parameters"]
    assert result["peak_over_checkpoint"] < 1.3, result
