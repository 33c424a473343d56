"""Locks of folders: of runs that share one with an index, one builds it and the others wait."""

import concurrent.futures
import fcntl
import multiprocessing
import os
import pathlib
import time
from unittest.mock import Mock

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
from jax_ragrl.run.lock import FILE, lock_folder, unlock_folder
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


def test_a_failed_build_releases_the_lock_and_a_command_keeps_it(
    tmp_path: pathlib.Path,
):
    folder = tmp_path / "index"
    lock.lock_folder(folder)
    load_retriever(CORPUS, BM25Index(), tmp_path)
    assert not is_free(folder)
    lock.unlock_folder(folder)
    with pytest.raises(UserError, match="no passage of the corpus has a word"):
        load_retriever(Corpus((Passage("p", "", "?"),)), BM25Index(), tmp_path)
    assert is_free(tmp_path / "index")


def test_a_process_that_may_not_build_reads_the_index_of_the_first_one(tmp_path: pathlib.Path):
    with pytest.raises(UserError, match="holds no complete index"):
        open_or_build_bm25(CORPUS, BM25Index(), tmp_path, may_build=False)
    build("bm25", tmp_path)
    assert open_or_build_bm25(CORPUS, BM25Index(), tmp_path, may_build=False).search(["word1"], 1)
    # The files of an index are mapped into memory: cutting them would end their readers.
    former = build_bm25(CORPUS, BM25Index(), tmp_path)
    before = former.search(["common", "word3"], 4)
    build_bm25(Corpus(CORPUS.passages[:1]), BM25Index(), tmp_path)
    assert former.search(["common", "word3"], 4) == before


def _lock(folder: pathlib.Path) -> str:
    try:
        lock_folder(folder)
    except UserError as error:
        return str(error)
    return ""


def _elsewhere(folder: pathlib.Path) -> str:
    """The outcome of `lock_folder` in another process, which then ends."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_lock, (folder,))


@pytest.mark.slow
def test_one_process_at_a_time_holds_a_folder(tmp_path):
    folder = tmp_path / "run"
    lock_folder(folder)
    lock_folder(folder)  # its own lock is no obstacle
    message = _elsewhere(folder)
    assert f"in use by process {os.getpid()}" in message and "another --workdir" in message
    unlock_folder(folder)
    assert _elsewhere(folder) == "" and (folder / FILE).exists()
    lock_folder(folder)  # that process has ended
    unlock_folder(folder)


def test_a_file_system_without_locks_is_neither_locked_nor_unlocked(tmp_path, monkeypatch):
    refuse = Mock(side_effect=OSError("not supported"))
    monkeypatch.setattr("jax_ragrl.run.lock.fcntl.flock", refuse)
    lock_folder(tmp_path)
    unlock_folder(tmp_path / "other")
    assert not (tmp_path / "other").exists()
