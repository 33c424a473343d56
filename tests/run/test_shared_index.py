"""Runs that share the folder of an index: one of them builds it, the others wait and open it."""

from __future__ import annotations

import concurrent.futures
import fcntl
import pathlib
import time

import pytest

from jax_ragrl.corpus.passages import Corpus
from jax_ragrl.errors import UserError
from jax_ragrl.retrieval import bm25
from jax_ragrl.retrieval.bm25 import build_bm25, open_or_build_bm25
from jax_ragrl.retrieval.hashed_words import HashedEncoder
from jax_ragrl.retrieval.index import build_index
from jax_ragrl.retrieval.kinds import BM25Index, VectorIndex
from jax_ragrl.run import index, lock
from jax_ragrl.run.index import load_retriever
from jax_ragrl.types import Passage

CORPUS = Corpus(tuple(Passage(f"p{n}", f"T{n}", f"word{n} common") for n in range(4)))
INDEXES = {"bm25": BM25Index(), "exact": VectorIndex(kind="exact", encoder="hashed")}


def build(kind: str, folder: pathlib.Path) -> None:
    if kind == "bm25":
        build_bm25(CORPUS, BM25Index(), folder)
    else:
        build_index(CORPUS, HashedEncoder.fit(CORPUS.passages), kind, folder)


def is_free(folder: pathlib.Path) -> bool:
    """Whether another process could lock a folder: a second open file conflicts as it would."""
    with (folder / lock.FILE).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


@pytest.mark.parametrize("kind", INDEXES)
def test_a_run_waits_for_the_index_that_another_one_builds(kind, tmp_path, monkeypatch):
    """The other run is this thread: it holds the lock by a file that the library does not know."""
    folder = tmp_path / "index"
    folder.mkdir()

    def build_again(*_, **__):
        pytest.fail("the index is built twice")

    monkeypatch.setattr(lock, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(bm25, "build_bm25", build_again)
    monkeypatch.setattr(index, "build_index", build_again)
    with concurrent.futures.ThreadPoolExecutor() as pool, (folder / lock.FILE).open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        waiting = pool.submit(load_retriever, CORPUS, INDEXES[kind], tmp_path)
        time.sleep(0.3)
        assert not waiting.done()
        build(kind, folder)
        (hits,) = waiting.result(timeout=30).search(["word2"], 1)
    assert hits.passages[0].id == "p2"


@pytest.mark.parametrize("kind", INDEXES)
def test_the_lock_of_an_index_ends_with_its_build(kind: str, tmp_path: pathlib.Path):
    folder = tmp_path / "index"
    load_retriever(CORPUS, INDEXES[kind], tmp_path)
    assert is_free(folder)
    # An index that exists is opened without writing: its folder may be read-only.
    (folder / lock.FILE).unlink()
    load_retriever(CORPUS, INDEXES[kind], tmp_path)
    assert not (folder / lock.FILE).exists()


def test_a_command_that_holds_the_lock_of_the_folder_keeps_it(tmp_path: pathlib.Path):
    folder = tmp_path / "index"
    lock.lock_folder(folder)
    load_retriever(CORPUS, BM25Index(), tmp_path)
    assert not is_free(folder)
    lock.unlock_folder(folder)


def test_a_failed_build_releases_the_lock(tmp_path: pathlib.Path):
    with pytest.raises(UserError, match="no passage of the corpus has a word"):
        load_retriever(Corpus((Passage("p", "", "?"),)), BM25Index(), tmp_path)
    assert is_free(tmp_path / "index")


def test_a_process_that_may_not_build_reads_the_index_of_the_first_one(tmp_path: pathlib.Path):
    with pytest.raises(UserError, match="holds no complete index"):
        open_or_build_bm25(CORPUS, BM25Index(), tmp_path, may_build=False)
    build("bm25", tmp_path)
    assert open_or_build_bm25(CORPUS, BM25Index(), tmp_path, may_build=False).search(["word1"], 1)


def test_a_rebuilt_index_leaves_the_searches_of_the_former_one_alone(tmp_path: pathlib.Path):
    """The files of an index are mapped into memory: cutting them would end their readers."""
    former = build_bm25(CORPUS, BM25Index(), tmp_path)
    before = former.search(["common", "word3"], 4)
    build_bm25(Corpus(CORPUS.passages[:1]), BM25Index(), tmp_path)
    assert former.search(["common", "word3"], 4) == before
