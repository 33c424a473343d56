"""Laws of a corpus, its fingerprint and its copies of passages."""

import errno
import gzip
from unittest.mock import Mock

import numpy as np
import pytest

from jax_ragrl.corpus import reading, store
from jax_ragrl.corpus.duplicates import duplicates, report_duplicates
from jax_ragrl.corpus.formats import iter_passages
from jax_ragrl.corpus.passages import Corpus, save_corpus
from jax_ragrl.corpus.reading import load_corpus
from jax_ragrl.errors import UserError
from jax_ragrl.run.claims import has_results
from jax_ragrl.types import Passage

PASSAGES = (Passage("a", "T", "x"), Passage("b", "U", "y\u2028\U0001f600"), Passage("c", "", ""))


def test_the_fingerprint_covers_every_field_in_order():
    fingerprints = {
        Corpus(passages).fingerprint
        for passages in (
            PASSAGES,
            PASSAGES[::-1],
            PASSAGES[:2],
            (PASSAGES[0]._replace(id="z"), *PASSAGES[1:]),
            (PASSAGES[0]._replace(title="z"), *PASSAGES[1:]),
            (PASSAGES[0]._replace(text="z"), *PASSAGES[1:]),
        )
    }
    assert len(fingerprints) == 6
    assert all(len(f) == 16 and int(f, 16) >= 0 for f in fingerprints)
    assert Corpus(PASSAGES).fingerprint == "32c439c49ea7486d", "the same in every version"
    left, right = Corpus((Passage("a", "b", "c"),)), Corpus((Passage("a", "bc", ""),))
    assert left.fingerprint != right.fingerprint


def test_saving_and_loading_round_trips_with_equal_bytes(tmp_path):
    corpus = Corpus(PASSAGES)
    save_corpus(corpus, tmp_path / "one")
    loaded = load_corpus(tmp_path / "one")
    assert loaded == corpus and loaded.fingerprint == corpus.fingerprint
    save_corpus(loaded, tmp_path / "two")
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    (tmp_path / "zipped").write_bytes(gzip.compress((tmp_path / "one").read_bytes()))
    assert load_corpus(tmp_path / "zipped") == corpus


def test_repeated_ids_are_refused_but_not_equal_hashes(tmp_path):
    with pytest.raises(UserError, match="'a' occurs 2 times"):
        Corpus((PASSAGES[0], PASSAGES[1], PASSAGES[0]))
    path = tmp_path / "c.jsonl"
    path.write_text('{"id": "a", "title": "T", "text": "x"}\n' * 2)
    with pytest.raises(UserError, match=r"c\.jsonl: passage id 'a'"):
        load_corpus(path)
    store.refuse_repeated(np.zeros(3, np.int64), PASSAGES)
    with pytest.raises(UserError, match="'b' occurs 2 times"):
        store.refuse_repeated(np.zeros(4, np.int64), (*PASSAGES, PASSAGES[1]))


def written(path, *passages):
    save_corpus(Corpus(passages), path)
    return path


def test_stored_passages_equal_the_file(tmp_path):
    path, memory = written(tmp_path / "c.jsonl", *PASSAGES), Corpus(PASSAGES)
    stored = load_corpus(path, folder=tmp_path / "kept")
    assert stored.fingerprint == memory.fingerprint and len(stored) == 3
    assert tuple(stored.passages) == PASSAGES == stored.passages[:]
    assert stored.passages[-1] == PASSAGES[2] and stored.passages[::2] == PASSAGES[::2]
    assert PASSAGES[1] in stored.passages and stored.passages[5:] == ()
    with pytest.raises(IndexError):
        stored.passages[3]


def test_a_changed_file_is_read_again(tmp_path, capsys):
    path, folder = written(tmp_path / "c.jsonl", *PASSAGES), tmp_path / "kept"
    first = load_corpus(path, folder=folder)
    written(path, *PASSAGES[:2])
    second = load_corpus(path, folder=folder)
    assert "c.jsonl is new or has changed: read into" in capsys.readouterr().err
    assert tuple(second.passages) == PASSAGES[:2] and second.fingerprint != first.fingerprint
    assert tuple(first.passages) == PASSAGES
    assert sorted(p.name for p in folder.iterdir()) == ["corpus.json", "offsets.npy", "rows.jsonl"]


def test_copies_on_two_hosts_are_each_read_once(tmp_path, monkeypatch, capsys):
    paths = [written(tmp_path / name, *PASSAGES) for name in ("one.jsonl", "two.jsonl")]
    for path in paths:
        load_corpus(path, folder=tmp_path / "kept")
    capsys.readouterr()
    monkeypatch.setattr(reading, "iter_passages", None)
    for path in paths:
        assert tuple(load_corpus(path, folder=tmp_path / "kept").passages) == PASSAGES
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", ["rows.jsonl", "offsets.npy", "corpus.json"])
def test_a_store_that_was_cut_is_written_again(tmp_path, name):
    path, folder = written(tmp_path / "c.jsonl", *PASSAGES), tmp_path / "kept"
    load_corpus(path, folder=folder)
    (folder / name).write_bytes((folder / name).read_bytes()[:-3])
    assert tuple(load_corpus(path, folder=folder).passages) == PASSAGES


def test_a_half_replaced_store_is_not_opened(tmp_path, monkeypatch):
    path, folder = written(tmp_path / "c.jsonl", *PASSAGES), tmp_path / "kept"
    load_corpus(path, folder=folder)
    source = reading.source_of(path)
    other = (PASSAGES[0]._replace(text=PASSAGES[0].text[::-1]), *PASSAGES[1:])  # as long
    new = written(tmp_path / "d.jsonl", *other)
    monkeypatch.setattr(store.os, "replace", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        load_corpus(new, folder=folder)
    assert store.open_passages(folder, source) is None


def test_what_a_killed_process_left_is_removed_also_beside_complete_passages(tmp_path):
    path, folder = written(tmp_path / "c.jsonl", *PASSAGES), tmp_path / "kept"
    load_corpus(path, folder=folder)
    (folder / "unfinished-abc").mkdir()
    (folder / "unfinished-abc" / "rows.jsonl").write_text("half")
    load_corpus(path, folder=folder)
    assert not [*folder.glob("unfinished-*")]


def test_what_cannot_be_stored_leaves_nothing(tmp_path):
    path, folder = tmp_path / "c.jsonl", tmp_path / "kept"
    path.write_text('{"id": "a", "title": "T", "text": "x"}\n' * 3)
    with pytest.raises(UserError, match=r"c\.jsonl: passage id 'a' occurs 3 times"):
        load_corpus(path, folder=folder)
    path.write_text("\n")
    with pytest.raises(UserError, match="is empty|holds no passages"):
        load_corpus(path, folder=folder)
    with pytest.raises(UserError, match="absent does not exist"):
        load_corpus(tmp_path / "absent", folder=folder)
    assert list(folder.iterdir()) == []


def test_a_folder_that_may_not_be_written_is_done_without(tmp_path, monkeypatch, capsys):
    path = written(tmp_path / "c.jsonl", *PASSAGES)
    refused = PermissionError(errno.EACCES, "no")
    monkeypatch.setattr(store, "write_passages", Mock(side_effect=refused))
    assert load_corpus(path, folder=tmp_path / "kept").passages == PASSAGES
    assert "keeping" in capsys.readouterr().err


@pytest.mark.parametrize(
    "line",
    [
        "id\ttext\ttitle\n1\tx\tT\n",
        '{"id": "1", "contents": "T\\nx"}\n',
        '{"id": "1", "title": "T", "text": "x"}\n',
    ],
)
def test_large_formats_are_read_lazily(tmp_path, line):
    path = tmp_path / "c"
    path.write_text(line + '{"no": "passage"}\n' * 2)
    read = iter_passages(path)
    assert next(read) == Passage("1", "T", "x")
    with pytest.raises(UserError, match="c, line"):
        next(read)


def test_an_unreadable_corpus_leaves_the_work_folder_free(tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"id": 1}\n')
    with pytest.raises(UserError):
        load_corpus(tmp_path / "bad.jsonl", folder=tmp_path / "index" / "passages")
    assert not has_results(tmp_path)
    (tmp_path / "baselines.json").write_text("{}")
    assert has_results(tmp_path)


def passage(n: int, text: str) -> Passage:
    return Passage(f"p{n}", "", text)


def test_copies_ignore_white_space_and_name_the_first():
    passages = [passage(0, "a b"), passage(1, "a c"), passage(2, "a  b\n"), passage(3, "a b")]
    assert duplicates(passages) == [(2, 0), (3, 0)]
    other_title = [passage(0, "a b"), Passage("p1", "a", "b")]
    assert duplicates([*other_title, Passage("p2", "b", "a")]) == [(1, 0)]


def test_a_report_warns_of_copies(capsys):
    passages = [passage(n, "a b" if n else "x") for n in range(6)]
    examples = [["p2", "p1"], ["p3", "p1"], ["p4", "p1"]]
    assert report_duplicates(Corpus(passages)) == {"exact": 4, "examples": examples}
    line = "warning: of 6 passages, 4 are exact copies of earlier ones, such as 'p2' of 'p1': they"
    assert line in capsys.readouterr().err
    assert report_duplicates(Corpus(passages[:2])) == {"exact": 0, "examples": []}
    assert capsys.readouterr().err == ""
