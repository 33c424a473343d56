"""The planned memory of an index is that of its files and of the arrays of its searcher."""

import jax
import pytest

from jax_ragrl.corpus import world
from jax_ragrl.corpus.passages import Corpus, save_corpus
from jax_ragrl.corpus.reading import load_corpus
from jax_ragrl.plan.index_memory import folder_bytes, index_memory
from jax_ragrl.retrieval.bm25 import build_bm25
from jax_ragrl.retrieval.hashed_words import HashedEncoder
from jax_ragrl.retrieval.index import build_index
from jax_ragrl.retrieval.kinds import BM25Index, PipelineIndex, RemoteIndex, VectorIndex


@pytest.fixture
def corpus(tmp_path):
    save_corpus(Corpus(world.generate(0, 60).passages), tmp_path / "corpus.jsonl")
    return load_corpus(tmp_path / "corpus.jsonl", folder=tmp_path / "index" / "passages")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_an_exact_index_is_on_the_devices_and_mapped(corpus, tmp_path, dtype):
    folder = tmp_path / "index"
    encoder = HashedEncoder.fit(corpus.passages, 64)
    built = build_index(corpus, encoder, "exact", folder, dtype=dtype)
    entry = index_memory(VectorIndex(kind="exact", dtype=dtype, folder=str(folder)), 8)[str(folder)]
    searcher = built.searcher._codes if dtype == "int8" else built.searcher
    on_device = sum(x.nbytes for x in jax.tree.leaves(searcher._parts[0][0]))
    assert sum(entry["device_bytes"].values()) == on_device
    assert entry["host_bytes"] == {}
    names = {"passages", "vectors"} | ({"codes", "scales"} if dtype == "int8" else set())
    assert set(entry["mapped_bytes"]) == names
    assert all(size == folder_bytes(folder / n) for n, size in entry["mapped_bytes"].items())


def test_words_are_mapped_and_a_small_scann_index_is_on_the_host(corpus, tmp_path):
    folder = tmp_path / "index"
    build_bm25(corpus, BM25Index(), folder)
    entry = index_memory(BM25Index(folder=str(folder)), 8)[str(folder)]
    arrays = sum(path.stat().st_size for path in (folder / "bm25").glob("*.npy"))
    assert entry["mapped_bytes"]["bm25"] == arrays > entry["host_bytes"]["words"] > 0
    assert entry["device_bytes"] == {} and entry["count"] == len(corpus)
    pytest.importorskip("scann")
    build_index(corpus, HashedEncoder.fit(corpus.passages, 64), "scann", folder)
    entry = index_memory(VectorIndex(folder=str(folder)), 8)[str(folder)]
    assert entry["host_bytes"] == {"vectors": len(corpus) * 64 * 4}


def test_what_is_not_built_is_unknown_and_a_server_has_no_memory(tmp_path):
    assert index_memory(RemoteIndex("http://host:1"), 8) == {}
    assert "not built yet" in index_memory(BM25Index(), 8)["bm25"]["unknown"]
    parts = PipelineIndex(retrievers=("bm25", "hashed", "http://h:1"), folder=str(tmp_path))
    entries = index_memory(parts, 8)
    assert [set(entry) for entry in entries.values()] == [{"unknown"}] * 2
    assert str(tmp_path / "bm25") in entries
