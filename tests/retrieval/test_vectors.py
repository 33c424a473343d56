"""Vectors of a file are read as numbers, and refused where the file contradicts itself."""

import json
import struct

import numpy as np
import pytest

from jax_ragrl.cli.main import main
from jax_ragrl.corpus.passages import Corpus
from jax_ragrl.corpus.reading import load_corpus
from jax_ragrl.errors import UserError
from jax_ragrl.retrieval import index
from jax_ragrl.retrieval.hashed_words import HashedEncoder
from jax_ragrl.retrieval.vectors import HEADER, open_vectors
from jax_ragrl.types import Passage

VECTORS = np.arange(6, dtype="<f4").reshape(3, 2)


def faiss_bytes(code=b"IxFI", metric=0, vectors=VECTORS, **other):
    (count, dimension), floats = vectors.shape, vectors.size
    facts = {"dimension": dimension, "count": count, "floats": floats} | other
    head = (code, facts["dimension"], facts["count"], 1 << 20, 1 << 20, 1, metric, facts["floats"])
    return HEADER.pack(*head) + vectors.tobytes()


def as_faiss(path, vectors):
    path.write_bytes(faiss_bytes(vectors=vectors))


def as_faiss_of_distances(path, vectors):
    path.write_bytes(faiss_bytes(b"IxF2", 1, vectors))


def as_numpy(path, vectors):
    with path.open("wb") as file:
        np.save(file, vectors.astype(np.float16))


def as_memmap(path, vectors):
    path.write_bytes(vectors.astype("<f4").tobytes())


RAW = ("x.memmap", as_memmap)


@pytest.mark.parametrize(
    ("name", "save"),
    [("x.index", as_faiss), ("x.index", as_faiss_of_distances), ("x.bin", as_numpy), RAW],
)
def test_imported_vectors_are_probed_not_encoded(name, save, tmp_path, capsys, monkeypatch):
    rows = ({"id": i, "contents": f'"t{i}"\nword{i} here'} for i in range(40))
    (tmp_path / "corpus.jsonl").write_text("\n".join(map(json.dumps, rows)))
    corpus = load_corpus(tmp_path / "corpus.jsonl")
    save(tmp_path / name, HashedEncoder.fit(corpus.passages).encode_passages(corpus.passages))
    assert isinstance(open_vectors(tmp_path / name), np.memmap), "nothing is read"
    monkeypatch.setattr(index, "embed", None)
    files = {"corpus": "corpus.jsonl", "out": "out", "vectors": name}
    options = [f"--{option}={tmp_path / file}" for option, file in files.items()]
    assert main(["data", "index", "--kind=exact", *options]) == 0
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
    (tmp_path / "x.index").write_bytes(content)
    with pytest.raises(UserError, match=why):
        open_vectors(tmp_path / "x.index")


def test_a_file_of_numpy_without_vectors_and_a_missing_file_are_refused(tmp_path):
    path = tmp_path / "x.npy"
    for array in (np.ones((2, 3), np.int64), np.ones(6, np.float32)):
        np.save(path, array)
        with pytest.raises(UserError, match="give one vector of floats per row"):
            open_vectors(path)
    np.save(path, VECTORS)
    whole = path.read_bytes()
    np.save(path, np.array([{}]), allow_pickle=True)
    for damaged in (path.read_bytes(), whole[:-5], whole.replace(b"}", b" ")):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match="x.npy is damaged, or no array .*: copy .* one vector"):
            open_vectors(path)
    with pytest.raises(UserError, match="absent cannot be opened"):
        open_vectors(tmp_path / "absent")


def test_raw_vectors_of_another_corpus_are_refused(tmp_path):
    corpus = Corpus(tuple(Passage(str(i), f"t{i}", "x") for i in range(4)))
    encoder = HashedEncoder.fit(corpus.passages, 8)
    as_memmap(tmp_path / "x.memmap", encoder.encode_passages(corpus.passages)[:3])
    with pytest.raises(UserError, match=r"shape \(24,\) do not fit.*\(4, 8\)"):
        vectors = open_vectors(tmp_path / "x.memmap")
        index.build_index(corpus, encoder, "exact", tmp_path, vectors)


def test_the_real_sample_holds_a_thousand_unit_vectors(shared_data):
    vectors = open_vectors(shared_data / "flashrag_sample" / "e5_flat_sample.index")
    assert vectors.shape == (1000, 768)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=2e-3)
