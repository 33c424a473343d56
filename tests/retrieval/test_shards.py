"""Vectors on disk: shards that are whole or absent, resumed, shared by processes and mapped."""

import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from jax_ragrl.corpus import world
from jax_ragrl.corpus.passages import Corpus, save_corpus
from jax_ragrl.errors import UserError
from jax_ragrl.retrieval import embed, shards
from jax_ragrl.retrieval.index import build_index, open_index
from jax_ragrl.run import lock
from jax_ragrl.types import Passage
from tests.flags import flags
from tests.training.test_hosts import environments

PASSAGES = tuple(Passage(f"p{n}", "", f"text {n}" + " word" * (n % 5)) for n in range(11))
REPO = pathlib.Path(__file__).parents[2]
# `ragrl data index` with shards of 40 passages.
PROGRAM = """
import sys
from jax_ragrl.cli.main import main
from jax_ragrl.retrieval import shards
shards.SHARD = 40
sys.exit(main(["data", "index", *sys.argv[1:]]))
"""
ROWS = np.random.default_rng(0).normal(size=(11, 3)).astype(np.float32)


class Numbered:
    """An encoder without words, that fails once if told so."""

    dimension = 3

    def __init__(self, calls=99):
        self.calls, self.texts = calls, []

    def encode_passages(self, passages):
        self.calls -= 1
        if self.calls < 0:
            raise RuntimeError("power cut")
        self.texts += [passage.text for passage in passages]
        return ROWS[[int(passage.id[1:]) for passage in passages]]

    encode_queries = None

    def describe(self):
        return {"kind": "numbered"}

    def save(self, folder):
        pass


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    monkeypatch.setattr(shards, "SHARD", 3)
    monkeypatch.setattr(embed, "BATCH", 2)


def files_of(folder: pathlib.Path) -> dict[str, bytes]:
    """Returns contents by path, without the lock, which names the process that made the folder."""
    paths = (path for path in folder.rglob("*") if path.is_file() and path.name != lock.FILE)
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def opened(folder: pathlib.Path) -> shards.ShardWriter:
    return shards.ShardWriter(folder, shards.create(folder, ROWS.shape, "float32", "of"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("calls", [0, 3, 4, 6])
def test_a_killed_build_ends_with_the_bytes_of_an_undisturbed_one(tmp_path, calls, dtype):
    corpus, resumed = Corpus(PASSAGES), Numbered()
    with pytest.raises(RuntimeError):
        build_index(corpus, Numbered(calls), "exact", tmp_path / "killed", dtype=dtype)
    build_index(corpus, resumed, "exact", tmp_path / "killed", dtype=dtype)
    build_index(corpus, Numbered(), "exact", tmp_path / "whole", dtype=dtype)
    assert files_of(tmp_path / "killed") == files_of(tmp_path / "whole")
    # A whole shard of three passages takes two calls, and is not encoded again.
    assert len(resumed.texts) == 11 - 3 * (calls // 2)


def test_passages_of_a_call_are_of_similar_length_and_vectors_in_order(tmp_path):
    writer, encoder = opened(tmp_path), Numbered()
    embed.embed_share(PASSAGES, encoder, writer, (0, 1))
    assert [len(text) for text in encoder.texts[:6]] == [16, 11, 6, 26, 21, 6]
    np.testing.assert_array_equal(shards.read_array(tmp_path), ROWS)


def test_a_damaged_shard_is_encoded_again(tmp_path):
    writer = opened(tmp_path)
    embed.embed_share(PASSAGES, Numbered(), writer, (0, 1))
    (tmp_path / "c" / "1" / "0").write_bytes(bytes(36))
    again = opened(tmp_path)
    assert again.missing() == [1] and again.missing(0, 2) == [] and again.missing(1, 2) == [1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_mapped_rows_are_the_written_ones(tmp_path, dtype):
    rows = (100 * ROWS).astype(np.int8) if dtype == "int8" else ROWS
    shards.write_array(rows, tmp_path, dtype)
    array = shards.MappedArray(tmp_path)
    assert array.shape == (11, 3) and array.dtype == dtype
    expected = rows.astype(array.dtype)
    for part in (slice(None), slice(2, 7), slice(9, 99), slice(4, 4)):
        np.testing.assert_array_equal(array[part], expected[part])
    index = np.array([[10, 0], [3, 3]])
    np.testing.assert_array_equal(array.take(index), expected[index])


def test_opening_names_what_is_missing(tmp_path):
    shards.write_array(ROWS, tmp_path, "float32")
    file = tmp_path / "c" / "2" / "0"
    file.write_bytes(b"half")
    with pytest.raises(UserError, match="shard 2 has 4 bytes instead of 36.*rerun 'ragrl"):
        shards.MappedArray(tmp_path)
    file.unlink()
    with pytest.raises(UserError, match="shard 2 is missing"):
        shards.MappedArray(tmp_path)
    (tmp_path / "zarr.json").unlink()
    with pytest.raises(UserError, match="no readable vectors"):
        shards.MappedArray(tmp_path)


def overwrite(file: pathlib.Path, value: float = 0.0) -> None:
    file.write_bytes(np.full(file.stat().st_size // 4, value, np.float32).tobytes())


@pytest.mark.parametrize("read", [lambda x: x[:2], lambda x: x.take(np.array([1]))])
@pytest.mark.parametrize("value", [0.0, np.nan, 0.5])
def test_the_first_read_names_a_shard_with_other_bytes(read, value, tmp_path):
    shards.write_array(ROWS, tmp_path, "float32")
    file = tmp_path / "c" / "3" / "0"
    overwrite(file, value)
    array = shards.MappedArray(tmp_path)
    for _ in range(2):
        with pytest.raises(UserError, match="c/3/0 is damaged .*other bytes.*rerun 'ragrl"):
            read(array)


def test_a_large_array_is_sampled(tmp_path, monkeypatch):
    """Shards of zeros are compared in any case, of the others every second one here."""
    monkeypatch.setattr(shards, "CHECKED_BYTES", 72)
    hashed = []
    compare = shards.MappedArray._compare
    monkeypatch.setattr(
        shards.MappedArray, "_compare", lambda x, n: (hashed.append(n), compare(x, n))
    )
    rows = ROWS.copy()
    rows[10] = 0
    shards.write_array(rows, tmp_path, "float32")
    array = shards.MappedArray(tmp_path)
    assert (array[:] == rows).all() and (array.take(np.array([4])) == rows[4:5]).all()
    assert hashed == [0, 2, 3]  # once
    overwrite(tmp_path / "c" / "1" / "0")
    with pytest.raises(UserError, match="c/1/0 is damaged"):
        shards.MappedArray(tmp_path)[:1]


def test_an_array_without_records_is_read_unchecked(tmp_path):
    shards.write_array(ROWS, tmp_path, "float32")
    (tmp_path / shards.RECORDS).unlink()
    overwrite(tmp_path / "c" / "1" / "0")
    assert not shards.MappedArray(tmp_path)[3:6].any()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"shards": []}', '{"shards": [3]}', "\x80"])
def test_damaged_records_are_named(text, tmp_path):
    shards.write_array(ROWS, tmp_path, "float32")
    (tmp_path / shards.RECORDS).write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError, match="shards.json is damaged .*delete the file to leave out"):
        shards.MappedArray(tmp_path)


def test_opening_an_index_reads_no_vector(tmp_path, monkeypatch):
    """However many there are."""
    build_index(Corpus(PASSAGES), Numbered(), "exact", tmp_path)
    reads = []
    for method in ("__getitem__", "take"):
        monkeypatch.setattr(shards.MappedArray, method, lambda *args: reads.append(args))
    retriever = open_index(tmp_path, Corpus(PASSAGES), Numbered())
    assert reads == [] and retriever.searcher._vectors.shape == ROWS.shape


def start(corpus: pathlib.Path, out: pathlib.Path, **environ: str) -> subprocess.Popen:
    options = ["--corpus", str(corpus), "--out", str(out), "--encoder", "hashed", "--kind", "exact"]
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *options],
        cwd=REPO,
        env=os.environ | {"XLA_FLAGS": flags(1)} | environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.slow
def test_two_processes_build_the_index_of_one(tmp_path):
    save_corpus(Corpus(world.generate(0, 60).passages), tmp_path / "corpus.jsonl")
    for folder, settings in (("one", [{}]), ("two", environments(2))):
        running = [start(tmp_path / "corpus.jsonl", tmp_path / folder, **env) for env in settings]
        output = [process.communicate(timeout=300)[0] for process in running]
        assert [process.returncode for process in running] == [0] * len(settings), output
        assert [text.count('"recall') + text.count('"count"') for text in output][0] == 1
    assert sum(text.count('"count"') for text in output) == 1, "only the first process reports"
    assert files_of(tmp_path / "one") == files_of(tmp_path / "two")
    assert len(list((tmp_path / "two" / "vectors" / "c").iterdir())) > 3
