"""Measures of rankings equal values computed by hand, and definitions of trec_eval."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_ragrl.corpus.passages import Corpus
from jax_ragrl.errors import EffectError, UserError
from jax_ragrl.retrieval.measures import (
    gains,
    measure,
    missing_gold,
    ndcg_at,
    recall_by_hop,
    reciprocal_rank,
)
from jax_ragrl.retrieval.recall import mean_measures, report_missing_gold, search_quality
from jax_ragrl.retrieval.trec import by_rank, run_lines, write_run
from jax_ragrl.types import Hits, Passage, Question


def ranked(*names: str) -> list[Passage]:
    return [Passage(name, f"title of {name}", "") for name in names]


def test_ndcg_and_reciprocal_rank_equal_values_computed_by_hand():
    """Gold at ranks 2 and 5 of three gold passages: the example of pytrec_eval's documentation
    has this form, binary gains over log2(1 + rank)."""
    passages = ranked("x", "a", "y", "z", "b", "c")
    dcg = 1 / math.log2(3) + 1 / math.log2(6)
    ideal = 1 + 1 / math.log2(3) + 1 / math.log2(4)
    assert ndcg_at(("a", "b", "c"), passages, 5) == pytest.approx(dcg / ideal)
    assert ndcg_at(("a", "b", "c"), passages, 1) == 0.0
    # The ideal ranking has only k places.
    assert ndcg_at(("a", "b", "c"), ranked("a", "b"), 2) == pytest.approx(1.0)
    passages = ranked("x", "y", "a", "b")
    assert reciprocal_rank(("b", "a"), passages, 10) == pytest.approx(1 / 3)
    assert reciprocal_rank(("b", "a"), passages, 2) == 0.0


def test_a_gold_name_counts_once_although_passages_share_a_title():
    passages = [Passage(f"p{n}", "Ulm", "") for n in range(3)]
    assert gains(("Ulm",), passages) == [1, 0, 0]
    assert measure(("Ulm",), passages) == dict.fromkeys(measure(("Ulm",), passages), 1.0)


names = st.lists(st.sampled_from("abcdefgh"), unique=True)


@given(names, names.filter(bool))
def test_measures_lie_between_zero_and_one_and_are_one_for_the_ideal_ranking(order, gold):
    values = measure(gold, ranked(*order)).values()
    assert all(0 <= value <= 1 + 1e-9 for value in values)
    ideal = measure(gold, ranked(*gold, *(set(order) - set(gold))))
    assert ideal["ndcg@10"] == pytest.approx(1.0) and ideal["recall@10"] == ideal["mrr@10"] == 1.0


def test_recall_by_hop_needs_one_gold_passage_per_hop():
    question = Question("q", "?", ("x",), gold=("b", "a"), hops=2)
    assert recall_by_hop(question, ranked("a", "x")) == [0.0, 1.0]
    assert recall_by_hop(Question("q", "?", ("x",), gold=("a",), hops=2), ranked("a")) == []


def test_gold_that_the_corpus_lacks_is_counted_and_named(capsys):
    questions = [
        Question("1", "?", ("x",), gold=("a", "title of b")),
        Question("2", "?", ("x",), gold=("gone", "a")),
    ]
    assert missing_gold(questions, ranked("a", "b")) == ["gone"]
    counts = report_missing_gold(questions, Corpus(tuple(ranked("a", "b"))))
    assert counts == {"gold": 3, "gold_missing": 1}
    line = capsys.readouterr().err
    assert "1 of 3 gold passages are not in the corpus, such as 'gone'" in line
    assert line.endswith("the corpus has ids such as 'a', 'b' or titles such as 'title of a'\n")
    report_missing_gold(questions[:1], Corpus(tuple(ranked("a", "b"))))
    assert capsys.readouterr().err == ""


def test_failed_searches_are_left_out_of_means():
    questions = [Question(n, "?", ("x",), gold=("a",)) for n in "12"]
    hits = Hits(tuple(ranked("a")), (1.0,))
    assert mean_measures(questions, [hits, EffectError("down")])["mrr@10"] == 1.0
    with pytest.raises(EffectError, match="down"):
        mean_measures(questions, [EffectError("down")] * 2)
    with pytest.raises(UserError, match="none of the 1 questions"):
        search_quality(None, [Question("1", "?", ("x",))])


def test_a_run_file_has_six_columns_whatever_the_ids_are(tmp_path):
    hits = by_rank([Passage("New York", "", ""), Passage("b", "", "")])
    write_run(tmp_path / "new" / "a.trec", [("q 1", hits), ("q2", Hits((), ()))], "my run")
    lines = (tmp_path / "new" / "a.trec").read_text().splitlines()
    assert lines == ["q_1 Q0 New_York 1 1.0 my_run", "q_1 Q0 b 2 0.5 my_run"]
    assert all(len(line.split()) == 6 for line in run_lines("", hits, ""))
    for rankings in ([("q 1", hits), ("q_1", hits)], [("q", by_rank(ranked("a b", "a\t b")))]):
        with pytest.raises(UserError, match="would both be '(q_1|a_b)'"):
            write_run(tmp_path / "b.trec", rankings, "run")
    assert not (tmp_path / "b.trec").exists()


def test_passages_with_equal_scores_keep_their_order_in_a_run_file():
    """`trec_eval` sorts by float32 scores, and orders equal ones by the id, the last one first."""
    scores = (0.5, 0.5, 0.5 - 1e-12, 0.25, 0.25, -1.0)
    hits = Hits(tuple(Passage(id, "", "") for id in "cabdfe"), scores)
    written = [line.split() for line in run_lines("q", hits, "run")]
    rows = sorted(((np.float32(row[4]), row[2]) for row in written), reverse=True)
    assert "".join(id for _, id in rows) == "cabdfe"
    np.testing.assert_allclose([float(row[4]) for row in written], scores, rtol=1e-6)
