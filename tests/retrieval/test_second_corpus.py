"""A second corpus has a separate index folder, and a run keeps the corpus that it began with."""

import json
import types

import pytest

from jax_ragrl.corpus.chunks import WORDS, Chunks
from jax_ragrl.corpus.passages import Corpus
from jax_ragrl.corpus.reading import Reading
from jax_ragrl.errors import UserError
from jax_ragrl.retrieval.index import load_indexed, read_description
from jax_ragrl.retrieval.kinds import BM25Index
from jax_ragrl.retrieval.lengths import describe_long
from jax_ragrl.run.claims import claim_corpus
from jax_ragrl.run.index import load_retriever
from jax_ragrl.runtime import multihost
from jax_ragrl.types import Passage


def written(path, *texts):
    rows = ({"id": f"p{n}", "text": text} for n, text in enumerate(texts))
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


def opened(path, folder, reading=None):
    """The corpus of a file and its retriever, as a run with `index.folder` opens them."""
    corpus = load_indexed(path, folder, reading, own_folder=True)
    return corpus, load_retriever(corpus, BM25Index(folder=str(folder)), folder.parent)


def test_a_second_corpus_has_a_folder_of_its_own(tmp_path, monkeypatch):
    folder = tmp_path / "index"
    paths = [written(tmp_path / name, name, "common") for name in ("one", "two", "three")]
    corpora = [opened(path, folder)[0] for path in paths]
    owners = {path.name: read_description(path)["corpus"] for path in tmp_path.glob("index*")}
    expected = {f"index-{corpus.fingerprint}": corpus.fingerprint for corpus in corpora[1:]}
    assert owners == {"index": corpora[0].fingerprint, **expected}
    monkeypatch.setattr(Reading, "passages", None)  # what was read is not read again
    for path, corpus in zip(paths, corpora, strict=True):
        again, retriever = opened(path, folder)
        assert again.fingerprint == corpus.fingerprint == retriever.fingerprint
        assert retriever.search([path.name], 1)[0].passages[0].text == path.name


def test_other_chunks_are_another_corpus(tmp_path):
    path, folder = written(tmp_path / "one", "One two. Three four. Five six."), tmp_path / "index"
    readings = [None, Reading(chunks=Chunks(4, 0)), Reading(chunks=Chunks(2, 0))]
    counts = [len(opened(path, folder, reading)[0]) for reading in readings]
    assert counts == [1, 2, 3] and len(list(tmp_path.glob("index*"))) == 3


def test_an_index_is_opened_with_the_chunks_it_was_built_with(tmp_path, capsys):
    path, folder = written(tmp_path / "one", "One two. Three four."), tmp_path / "index"
    corpus, _ = opened(path, folder, Reading({"text": "text"}, Chunks(2, 0)))
    capsys.readouterr()
    again = load_indexed(path, folder)
    assert again.fingerprint == corpus.fingerprint and len(again) == 2
    assert "is read as for the index" in (line := capsys.readouterr().err) and '"size": 2' in line


def searcher(*passages):
    corpus = Corpus(tuple(passages))
    return types.SimpleNamespace(corpus=corpus, fingerprint=corpus.fingerprint)


def test_a_run_that_has_results_keeps_its_corpus(tmp_path):
    first, second = searcher(Passage("a", "", "x")), searcher(Passage("b", "", "y"))
    assert claim_corpus(first, tmp_path) and claim_corpus(second, tmp_path)
    (tmp_path / "checkpoints" / "5").mkdir(parents=True)
    assert not claim_corpus(second, tmp_path)
    with pytest.raises(UserError, match=r"was begun with the corpus .* another folder"):
        claim_corpus(first, tmp_path)


def test_hosts_agree_whether_a_corpus_is_recorded_already(tmp_path, monkeypatch):
    """The file of the first process is visible to this one before it looks itself."""
    (tmp_path / "checkpoints" / "5").mkdir(parents=True)
    corpus = searcher(Passage("a", "", "x"))
    (tmp_path / "corpus.json").write_text(json.dumps([corpus.fingerprint]))
    collectives = []
    monkeypatch.setattr(multihost, "is_process_zero", lambda: False)
    monkeypatch.setattr(
        multihost, "all_gather_object", lambda work: collectives.append(work()) or [None, None]
    )
    assert claim_corpus(corpus, tmp_path) and collectives == [None, None]


@pytest.mark.parametrize("text", ["", "[", "3", "[1]", "null", '{"a": 1}'])
def test_a_damaged_record_of_the_corpus_is_named_with_its_remedy(tmp_path, text):
    (tmp_path / "checkpoints" / "5").mkdir(parents=True)
    (tmp_path / "corpus.json").write_text(text)
    with pytest.raises(UserError, match=r"corpus.json is damaged .* delete it"):
        claim_corpus(searcher(Passage("a", "", "x")), tmp_path)


def test_passages_that_an_encoder_cuts_are_counted_with_the_remedy():
    passages = [Passage("a", "T", "x " * n) for n in (3, 7, 8, 20)]
    units = WORDS._replace(name="mine", reserved_units=2, limit=10)
    line = describe_long(passages, units)
    assert line.startswith("2 of 4 passages are longer than 10 tokens (the longest 23), and the")
    assert "encoder mine cuts the rest" in line and "--chunk SIZE" in line
    assert describe_long(passages, WORDS) == ""
