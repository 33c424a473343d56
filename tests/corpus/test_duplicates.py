"""Copies are counted, and the first one of each is named."""

from __future__ import annotations

from jax_ragrl.corpus.duplicates import duplicates, report_duplicates
from jax_ragrl.corpus.passages import Corpus
from jax_ragrl.types import Passage


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
