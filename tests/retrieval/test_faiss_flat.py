"""A flat Faiss file is read as numbers, and refused where its header contradicts itself."""

import json
import struct

import numpy as np
import pytest

from jax_ragrl.cli.main import main
from jax_ragrl.corpus.passages import Corpus
from jax_ragrl.corpus.reading import load_corpus
from jax_ragrl.errors import UserError
from jax_ragrl.retrieval import index
from jax_ragrl.retrieval.faiss_flat import HEADER, read_faiss_flat
from jax_ragrl.retrieval.hashed_words import HashedEncoder
from jax_ragrl.retrieval.vectors import open_vectors
from jax_ragrl.types import Passage

FILES = {"corpus": "corpus.jsonl", "out": "out", "vectors": "x.index"}

VECTORS = np.arange(6, dtype="<f4").reshape(3, 2)
DATA = VECTORS.tobytes()


def faiss_bytes(code=b"IxFI", dimension=2, count=3, metric=0, floats=6, data=DATA):
    return HEADER.pack(code, dimension, count, 1 << 20, 1 << 20, 1, metric, floats) + data


@pytest.mark.parametrize(
    ("code", "metric", "name"), [(b"IxFI", 0, "inner_product"), (b"IxF2", 1, "squared_l2")]
)
def test_vectors_come_back_as_written(tmp_path, code, metric, name):
    path = tmp_path / "x.index"
    path.write_bytes(faiss_bytes(code=code, metric=metric))
    vectors, read = read_faiss_flat(path)
    assert read == name
    np.testing.assert_array_equal(vectors, VECTORS)


def as_faiss(path, vectors):
    count, dimension = vectors.shape
    head = faiss_bytes(b"IxFI", dimension, count, 0, vectors.size, b"")
    path.write_bytes(head + vectors.tobytes())


def as_numpy(path, vectors):
    with path.open("wb") as file:
        np.save(file, vectors.astype(np.float16))


def as_memmap(path, vectors):
    path.write_bytes(vectors.astype("<f4").tobytes())


@pytest.mark.parametrize(
    ("name", "save"), [("x.index", as_faiss), ("x.bin", as_numpy), ("x.memmap", as_memmap)]
)
def test_imported_vectors_are_probed_not_encoded(name, save, tmp_path, capsys, monkeypatch):
    (tmp_path / "corpus.jsonl").write_text(
        "".join(
            json.dumps({"id": i, "contents": f'"t{i}"\nword{i} here'}) + "\n" for i in range(40)
        )
    )
    corpus = load_corpus(tmp_path / "corpus.jsonl")
    vectors = HashedEncoder.fit(corpus.passages).encode_passages(corpus.passages)
    save(tmp_path / name, vectors)
    monkeypatch.setattr(index, "embed", None)
    files = {k: str(tmp_path / path) for k, path in (FILES | {"vectors": name}).items()}
    assert main(["data", "index", "--kind=exact", *(f"--{k}={v}" for k, v in files.items())]) == 0
    assert json.loads(capsys.readouterr().out)["count"] == 40
    opened = index.open_index(tmp_path / "out", corpus)
    assert opened.search(["word7"], 1)[0].passages[0].id == "7"


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "not with a flat Faiss index"),
        (faiss_bytes(code=b"IwFl"), "IwFl"),
        (faiss_bytes()[:20], "ends within its header"),
        (faiss_bytes()[:-1], "is damaged"),
        (faiss_bytes() + b"x", "is damaged"),
        (faiss_bytes(floats=7), "is damaged"),
        (faiss_bytes(dimension=-2, count=-3), "is damaged"),
        (faiss_bytes(metric=1), "is damaged"),
        (struct.pack("<4sq", b"IxFI", 1), "ends within its header"),
    ],
)
def test_a_header_that_cannot_be_true_is_refused(tmp_path, content, why):
    path = tmp_path / "x.index"
    path.write_bytes(content)
    with pytest.raises(UserError, match=why):
        read_faiss_flat(path)


def test_a_missing_file_is_named(tmp_path):
    for read in (read_faiss_flat, open_vectors):
        with pytest.raises(UserError, match="absent cannot be opened"):
            read(tmp_path / "absent")


def test_a_file_of_numpy_that_holds_no_vectors_is_refused(tmp_path):
    path = tmp_path / "x.npy"
    for array in (np.ones((2, 3), np.int64), np.ones(6, np.float32)):
        np.save(path, array)
        with pytest.raises(UserError, match="give one vector of floats per row"):
            open_vectors(path)
    np.save(path, np.ones((2, 3), np.float32))
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(UserError, match="x.npy is damaged"):
        open_vectors(path)
    np.save(path, np.array([{}]), allow_pickle=True)
    with pytest.raises(UserError, match="x.npy is damaged"):
        open_vectors(path)


def test_a_header_of_numpy_that_breaks_off_is_damaged(tmp_path):
    path = tmp_path / "x.npy"
    np.save(path, VECTORS)
    path.write_bytes(path.read_bytes().replace(b"}", b" "))
    with pytest.raises(UserError, match="x.npy is damaged"):
        open_vectors(path)


def test_raw_vectors_of_another_corpus_are_refused(tmp_path):
    corpus = Corpus(tuple(Passage(str(i), f"t{i}", "x") for i in range(4)))
    encoder = HashedEncoder.fit(corpus.passages, 8)
    as_memmap(tmp_path / "x.memmap", encoder.encode_passages(corpus.passages)[:3])
    as_numpy(tmp_path / "x.npy", VECTORS)
    vectors, others = open_vectors(tmp_path / "x.memmap"), open_vectors(tmp_path / "x.npy")
    assert isinstance(vectors, np.memmap) and isinstance(others, np.memmap)  # nothing is read
    with pytest.raises(UserError, match=r"shape \(24,\) do not fit.*\(4, 8\)"):
        index.build_index(corpus, encoder, "exact", tmp_path, vectors)


def test_the_real_sample_holds_a_thousand_unit_vectors(shared_data):
    vectors, metric = read_faiss_flat(shared_data / "flashrag_sample" / "e5_flat_sample.index")
    assert vectors.shape == (1000, 768) and metric == "inner_product"
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=2e-3)
