"""A policy as a GGUF file: read back, refused, and run by llama.cpp itself."""

import json
import pathlib
import sys

import decoding
import httpx2
import numpy as np
import pytest

gguf_models = pytest.importorskip("gguf_models", exc_type=ImportError)

from jax_ragrl.cli.main import main  # noqa: E402
from jax_ragrl.errors import EffectError, UserError  # noqa: E402
from jax_ragrl.export import export  # noqa: E402
from jax_ragrl.llm.kinds import LocalLLMConfig  # noqa: E402
from jax_ragrl.llm.openai import OpenAILLM  # noqa: E402
from jax_ragrl.models import gguf_export, gguf_file, safetensors_io  # noqa: E402
from jax_ragrl.models.by_name import resolve_model  # noqa: E402
from jax_ragrl.models.hf import load_decoder  # noqa: E402
from jax_ragrl.models.hf_config import from_hf, scaling_to_hf  # noqa: E402
from jax_ragrl.models.rope import RopeScaling, frequencies  # noqa: E402
from jax_ragrl.run.models import load_llm  # noqa: E402
from jax_ragrl.sampling.sampler import Shapes  # noqa: E402
from jax_ragrl.types import LLMRequest, Message, Sampling  # noqa: E402
from tests.llm.llama_server import MISSING  # noqa: E402
from tests.llm.llama_server import llama_cpp as served  # noqa: E402

CONFIG = gguf_models.CONFIG | {"intermediate_size": 64}
LLAMA3 = RopeScaling("llama3", factor=32.0)
# A family, the rule by which its tokenizer splits text, and whether texts begin with a token.
FAMILIES = {
    "llama": (CONFIG, "smollm", False),
    "llama3": (CONFIG | {"rope_scaling": scaling_to_hf(LLAMA3)}, "llama-bpe", True),
    "qwen2": (CONFIG | {"model_type": "qwen2", "tie_word_embeddings": False}, "qwen2", False),
    "qwen3": (CONFIG | {"model_type": "qwen3", "head_dim": 128}, "qwen2", False),
}
needs_llama_cpp = pytest.mark.skipif("xllamacpp" in MISSING, reason="not installed: xllamacpp")


@pytest.fixture
def folder_of(tmp_path, monkeypatch):
    """A function from a family and a type to a Hugging Face folder with random weights."""
    monkeypatch.setenv("RAGRL_CACHE", str(tmp_path / "cache"))

    def make(name: str, kind: gguf_models.Type) -> pathlib.Path:
        raw, pre, begins = FAMILIES[name]
        plain, _ = frequencies(raw["head_dim"], raw["rope_theta"], None)
        scaled, _ = frequencies(raw["head_dim"], raw["rope_theta"], from_hf(raw).rope_scaling)
        extra = {gguf_file.ROPE_FACTORS: plain / scaled} if name == "llama3" else {}
        path = tmp_path / f"{name}.gguf"
        # The export names no unknown token: byte-level BPE has none.
        fields = {"tokenizer.ggml.add_bos_token": begins, "tokenizer.ggml.unknown_token_id": None}
        gguf_models.write_gguf(path, kind, raw, pre=pre, extra=extra, fields=fields)
        return gguf_file.convert(path)

    return make


@pytest.mark.parametrize(
    ("name", "kind"), [*((name, "F32") for name in FAMILIES), ("llama", "F16"), ("qwen2", "BF16")]
)
def test_a_folder_and_its_file_convert_to_each_other(name, kind, folder_of):
    """Weights, config, tokenizer, chat template and the tokens that end a turn."""
    folder = folder_of(name, gguf_models.Type[kind])
    dtype = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}[kind]
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"torch_dtype": dtype}))
    back = gguf_file.convert(gguf_export.write_gguf(folder))
    assert back != folder and from_hf(gguf_file.read_config(folder / "model.gguf")) == from_hf(raw)
    for file in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (back / file).read_text() == (folder / file).read_text(), file
    files = [safetensors_io.locate(x) for x in (folder, back)]
    assert [*files[0]] == [*files[1]]
    for stored in files[0]:
        one, other = (safetensors_io.read(x[stored], stored, (slice(None),)) for x in files)
        np.testing.assert_array_equal(np.asarray(one, np.float32), np.asarray(other, np.float32))
        assert other.dtype.name == (dtype if other.ndim > 1 else "float32")


@pytest.mark.slow
@needs_llama_cpp
@pytest.mark.parametrize("name", FAMILIES)
def test_llama_cpp_continues_tokens_as_the_decoder_does(name, folder_of):
    folder = folder_of(name, gguf_models.Type.F32)
    file = gguf_export.write_gguf(folder)
    ids_BL = np.random.default_rng(0).integers(3, 280, (4, 48), np.int32)
    ours = decoding.greedy(load_decoder(folder), ids_BL, np.ones(ids_BL.shape, bool), 16)
    count = 0
    with served(file) as (address, _):
        for ids_L, expected in zip(ids_BL.tolist(), ours.tolist(), strict=True):
            body = {"prompt": ids_L, "n_predict": 16, "temperature": 0, "return_tokens": True}
            reply = httpx2.post(f"{address}/../completion", json=body, timeout=100).json()
            tokens = reply["tokens"]
            assert tokens == expected[: len(tokens)]
            assert len(tokens) == 16 or tokens[-1] in (0, 2)  # the tokens that end a turn
            count += len(tokens)
    assert count > 24


@pytest.mark.slow
@needs_llama_cpp
def test_llama_cpp_answers_chats_as_the_shipped_policy_does(tmp_path):
    """Its own chat template and tokens that end a turn, and weights rounded to bfloat16."""
    tiny = resolve_model("tiny")
    folder = export(load_decoder(tiny), tmp_path / "out", tiny).folder
    file = gguf_export.write_gguf(folder)
    texts = ("Who directed the film?", "Where was Ann born in 1987?", "caf\u00e9  \n\n123")
    requests = [
        LLMRequest("answer", (Message("user", text),), Sampling(0.0, max_tokens=32))
        for text in texts
    ]
    shapes = Shapes((64,), (4,), max_new_tokens=32)
    ours = load_llm(LocalLLMConfig(str(folder)), None, "", shapes).complete(requests)
    long = requests[0]._replace(messages=(Message("user", "word " * 3000),))
    with served(file) as (address, _):
        theirs = OpenAILLM("tiny", address, timeout=100, concurrency=1).complete(requests)
        (too_long,) = OpenAILLM("tiny", address, timeout=100).complete([long])
        stream = OpenAILLM("tiny", address, timeout=100, retries=0, extra={"stream": True})
        (streamed,) = stream.complete(requests[:1])
    assert isinstance(too_long, EffectError) and "exceeds the available context" in str(too_long)
    assert isinstance(streamed, EffectError) and "the reply 'data: {" in str(streamed)
    assert theirs == ours and [x.prompt_tokens for x in theirs] == [x.prompt_tokens for x in ours]
    assert len(set(ours)) > 1 and min(x.completion_tokens for x in ours) < 32  # one turn ended


def test_what_a_file_cannot_hold_is_refused(folder_of, tmp_path, monkeypatch):
    """Sliding layers, other scalings, four ends of a turn, other rules of the tokenizer; a file
    that reads back otherwise."""
    folder = folder_of("qwen2", gguf_models.Type.F32)
    config, tokenizer = folder / "config.json", folder / "tokenizer.json"
    raw, text = json.loads(config.read_text()), tokenizer.read_text()
    window = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}
    linear, other = RopeScaling("linear", 2.0), RopeScaling("llama3", 8.0, low_freq=0.5)
    scalings = [{"rope_scaling": scaling_to_hf(scaling)} for scaling in (linear, other)]
    for change in (window, *scalings, {"eos_token_id": [0, 1, 2, 3]}):
        config.write_text(json.dumps(raw | change))
        with pytest.raises(UserError, match=r"positions, cannot be .* convert_hf|any of 4 tokens"):
            gguf_export.write_gguf(folder)
    config.write_text(json.dumps(raw))
    for old, new in (("p{N}|", "p{N}{1,2}|"), ('"rstrip": false', '"rstrip": true')):
        tokenizer.write_text(text.replace(old, new))
        assert text != tokenizer.read_text()
        with pytest.raises(UserError, match="its tokenizer cannot be written"):
            gguf_export.write_gguf(folder)
    tokenizer.write_text(text)
    monkeypatch.setattr(gguf_file.GGUF, "value", lambda *_: np.zeros(3, np.float32))
    with pytest.raises(UserError, match="reads back with other values"):
        gguf_export.write_gguf(folder)
    assert not (folder / gguf_export.FILE).exists()


def test_the_command_needs_the_package_and_whole_weights(tmp_path, capsys, monkeypatch):
    command = ["export", str(tmp_path), "--out", str(tmp_path / "o"), "--gguf"]
    assert main([*command, "--adapter"]) == 2
    assert "--adapter or --gguf" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert main(command) == 2
    assert 'pip install "jax_ragrl[gguf]"' in capsys.readouterr().err
