"""Laws of a corpus and its fingerprint."""

import gzip

import pytest

from jax_ragrl.corpus.passages import Corpus, load_corpus, save_corpus
from jax_ragrl.errors import UserError
from jax_ragrl.types import Passage

PASSAGES = (Passage("a", "T", "x"), Passage("b", "U", "y\u2028\U0001f600"), Passage("c", "", ""))


def test_the_fingerprint_is_16_hex_digits_of_everything_in_order():
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


def test_the_fingerprint_does_not_change_between_versions():
    assert Corpus(PASSAGES).fingerprint == "32c439c49ea7486d"


def test_moving_text_across_a_border_changes_the_fingerprint():
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


def test_repeated_ids_are_refused(tmp_path):
    with pytest.raises(UserError, match="'a' occurs 2 times"):
        Corpus((PASSAGES[0], PASSAGES[1], PASSAGES[0]))
    path = tmp_path / "c.jsonl"
    path.write_text('{"id": "a", "title": "T", "text": "x"}\n' * 2)
    with pytest.raises(UserError, match=r"c\.jsonl: passage id 'a'"):
        load_corpus(path)


@pytest.mark.parametrize("text", ["", "[]", "\n"])
def test_an_empty_corpus_is_refused_by_name(tmp_path, text):
    (tmp_path / "none.json").write_text(text)
    with pytest.raises(UserError, match=r"none\.json.* (is empty|holds no passages)"):
        load_corpus(tmp_path / "none.json")
