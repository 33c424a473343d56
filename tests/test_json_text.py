"""Files of a run, an index or a model that are damaged give one line with a remedy."""

import csv
import gzip
import json
import struct

import numpy as np
import pytest

from jax_ragrl.config.snapshot import load_saved_config
from jax_ragrl.corpus import store
from jax_ragrl.corpus.formats import detect, files, load_questions
from jax_ragrl.errors import UserError
from jax_ragrl.json_text import MAX_DEPTH, loads, loads_or_none
from jax_ragrl.models import hf_config, safetensors_io
from jax_ragrl.models.hf import read_config
from jax_ragrl.models.peft import _read_peft_config
from jax_ragrl.retrieval.hashed_words import FILE, HashedEncoder
from jax_ragrl.retrieval.index import read_description
from jax_ragrl.runtime.jsonl import append_row, drop_after_step, read_rows
from jax_ragrl.types import Passage

DAMAGED = {
    "empty": b"",
    "cut": b'{"a": {"b": 1',
    "list": b"[1]",
    "number": b"3",
    "null": b"null",
    "nested": b'{"a": ' * 100_000,
    "deep": b'{"a":' + b"[" * 500 + b"]" * 500 + b"}",
    "digits": b'{"a": ' + b"9" * 5000 + b"}",
    "binary": bytes(range(256)),
    "zeros": bytes(4096),
}
EACH = pytest.mark.parametrize("damage", DAMAGED)


def one_line(error: pytest.ExceptionInfo[UserError], file: object) -> bool:
    return str(file) in str(error.value) and "\n" not in str(error.value)


@EACH
def test_a_damaged_object_names_its_file(tmp_path, damage):
    readers = {
        "config.json": (load_saved_config,),
        "model/config.json": (lambda file: read_config(file.parent),),
        "adapter_config.json": (lambda file: _read_peft_config(file.parent),),
        "model.safetensors.index.json": (lambda file: safetensors_io.locate(file.parent),),
        "index.json": (lambda file: read_description(file.parent),),
    }
    for name, functions in readers.items():
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(DAMAGED[damage])
        for function in functions:
            with pytest.raises(UserError) as error:
                function(file)
            assert one_line(error, file.parent)


@EACH
def test_damaged_lines_of_a_run_and_stored_passages_are_left_out(tmp_path, damage):
    store.write_passages([Passage("1", "t", "x")], tmp_path, ["s"], tmp_path)
    (tmp_path / store.FILE).write_bytes(DAMAGED[damage])
    assert store.open_passages(tmp_path, ["s"]) is None
    file = tmp_path / "metrics.jsonl"
    for step in (1, 2):
        append_row(file, {"step": step})
    with file.open("ab") as out:
        out.write(DAMAGED[damage] + b"\n")
    append_row(file, {"step": "x"})
    append_row(file, {"step": 3})
    assert [row for row in read_rows(file) if "step" in row][:2] == [{"step": 1}, {"step": 2}]
    drop_after_step(file, 2)
    assert [json.loads(line) for line in file.read_text().splitlines()] == [
        {"step": 1},
        {"step": 2},
    ]


@EACH
def test_a_damaged_record_names_its_line(tmp_path, damage):
    file = tmp_path / "questions.jsonl"
    file.write_bytes(b'{"question": "q", "golden_answers": ["a"]}\n' + DAMAGED[damage])
    if damage == "empty":
        assert len(load_questions(file)) == 1
        return
    with pytest.raises(UserError) as error:
        load_questions(file)
    assert one_line(error, file)


def test_a_damaged_archive_of_counts_names_its_file(tmp_path):
    HashedEncoder.fit([Passage("1", "t", "some words")], 64).save(tmp_path)
    whole = (tmp_path / FILE).read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 255
    for damaged in (b"", whole[: len(whole) // 2], b"no archive", bytes(flipped)):
        (tmp_path / FILE).write_bytes(damaged)
        with pytest.raises(UserError) as error:
            HashedEncoder.load(tmp_path)
        assert one_line(error, FILE)


def test_a_zipped_line_has_a_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAX_RECORD", 1 << 16)
    file = tmp_path / "bomb.jsonl"
    file.write_bytes(gzip.compress(b'{"a": "' + b"x" * (1 << 24)))
    with pytest.raises(UserError, match="line 1: longer than 65536 characters"):
        list(files.read_records(file))


def test_a_long_cell_is_no_column(tmp_path):
    csv.field_size_limit(131_072)  # of a fresh process
    file = tmp_path / "table.tsv"
    file.write_text("x" * 200_000 + "\ttext\n1\t2\n")
    with pytest.raises(UserError, match="table.tsv"):
        detect(file, "passages")


RAW = {"model_type": "llama", "vocab_size": 8, "hidden_size": 8, "intermediate_size": 8}
RAW |= {"num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.mark.parametrize(
    "change",
    [
        {"num_hidden_layers": 10**9},
        {"num_attention_heads": 0},
        {"hidden_size": True},
        {"vocab_size": -1},
        {"rope_theta": "x"},
        {"rope_scaling": "x"},
        {"rms_norm_eps": "x"},
        {"rms_norm_eps": [1]},
        {"max_position_embeddings": "x"},
        {"max_position_embeddings": float("inf")},
        {"quantization_config": [1]},
        {"layer_types": 3},
        {"head_dim": {}, "sliding_window": "x", "model_type": []},
    ],
)
def test_an_impossible_config_is_refused_at_once(change):
    hf_config.from_hf(RAW)
    with pytest.raises(UserError, match=r"config.json"):
        hf_config.from_hf(RAW | change)


@pytest.mark.parametrize("values", [[1, 2], [np.nan, 1.0], [np.inf, 1.0], [np.inf, -np.inf]])
def test_weights_are_finite_floats(tmp_path, values):
    x = np.array(values, np.float32 if isinstance(values[0], float) else np.int16)
    kind = {"float32": "F32", "int16": "I16"}[str(x.dtype)]
    header = json.dumps({"w": {"dtype": kind, "shape": [2], "data_offsets": [0, x.nbytes]}})
    text = header.encode().ljust(-(-len(header) // 8) * 8)
    file = tmp_path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(text)) + text + x.tobytes())
    with pytest.raises(UserError, match=r"model.safetensors: w holds"):
        safetensors_io.read(file, "w", (slice(None),))


def test_the_depth_that_is_allowed_is_read():
    assert loads("[" * MAX_DEPTH + "]" * MAX_DEPTH) is not None
    assert loads_or_none("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1)) is None
    assert loads(json.dumps([[{}]] * 1000)) == [[{}]] * 1000
    assert loads(b'\xef\xbb\xbf"cut \\ud83d"') == "cut \ufffd"
