"""An index opens over its own corpus and encoder, and over nothing else."""

import dataclasses
import json
import pathlib
import sys
from unittest.mock import Mock

import numpy as np
import pytest

from jax_ragrl.corpus import world
from jax_ragrl.corpus.formats import save_questions
from jax_ragrl.corpus.passages import Corpus, save_corpus
from jax_ragrl.errors import UserError
from jax_ragrl.retrieval import embed, shards
from jax_ragrl.retrieval.dense import DenseRetriever
from jax_ragrl.retrieval.hashed_words import HashedEncoder
from jax_ragrl.retrieval.index import (
    build_index,
    load_indexed,
    open_index,
    read_description,
)
from jax_ragrl.retrieval.kinds import BM25Index, VectorIndex
from jax_ragrl.run.index import open_or_build_index
from jax_ragrl.run.index_folder import build_folder
from jax_ragrl.types import Hits, Passage, Question

PASSAGES = (
    Passage("p0", "Silent Harbor", "Silent Harbor was directed by Adela Brandt in 1971."),
    Passage("p1", "Adela Brandt", "Adela Brandt was born in Thornby."),
    Passage("p2", "Thornby", "Thornby is a city in Estoria run by mayor Otto Novak."),
    Passage("p3", "Golden River", "Golden River starred Bruno Castell."),
    Passage("p4", "Bruno Castell", "Bruno Castell works for Harbor Motors."),
    Passage("p5", "Untitled", "Nothing much."),
)
QUESTIONS = [
    Question("1", "Who directed Silent Harbor?", ("Adela Brandt",), gold=("Silent Harbor",)),
    Question("2", "Where was Adela Brandt born?", ("Thornby",), gold=("p1", "Thornby")),
    Question("3", "Who is it?", ("nobody",)),
]
KINDS = ["exact", "scann"]


@pytest.fixture
def corpus():
    return Corpus(PASSAGES)


def build(corpus, kind, folder):
    return build_index(corpus, HashedEncoder.fit(corpus.passages, 512), kind, folder)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_opened_index_finds_what_the_built_one_found(corpus, kind, dtype, tmp_path):
    encoder = HashedEncoder.fit(corpus.passages, 512)
    built = build_index(corpus, encoder, kind, tmp_path / "index", dtype=dtype)
    assert read_description(tmp_path / "index")["dtype"] == dtype
    opened = open_index(tmp_path / "index", corpus)
    queries = [question.text for question in QUESTIONS]
    assert opened.search(queries, 4) == built.search(queries, 4)
    assert opened.fingerprint == corpus.fingerprint
    (first,) = opened.search(queries[:1], 1)
    assert first.passages == PASSAGES[:1] and isinstance(first.scores[0], float)


def test_a_search_is_as_deep_as_the_corpus_and_leaves_out_what_was_not_found(corpus):
    asked = []

    class Short:
        def search(self, queries, k):
            asked.append(k)
            return np.array([[0.5, -np.inf]], np.float32), np.array([[3, 0]], np.int32)

    retriever = DenseRetriever(corpus, HashedEncoder.fit(corpus.passages), Short())
    for k in (5, 6, 7, 100):
        assert retriever.search(["q"], k) == [Hits((PASSAGES[3],), (0.5,))]
    assert asked == [5, 6, 6, 6]


def exact_index(folder: pathlib.Path) -> VectorIndex:
    return VectorIndex(kind="exact", folder=str(folder))


def test_an_index_keeps_its_passages_whatever_corpus_is_tried(corpus, tmp_path):
    folder, path = tmp_path / "index", tmp_path / "corpus.jsonl"
    save_corpus(corpus, path)
    build_folder(exact_index(folder), path)
    save_corpus(Corpus(PASSAGES[::-1]), tmp_path / "other.jsonl")
    with pytest.raises(UserError, match="built for corpus.*but .*other.jsonl holds"):
        load_indexed(tmp_path / "other.jsonl", folder)
    cached = load_indexed(path, folder)
    assert cached.stored_fingerprint and tuple(cached.passages) == PASSAGES
    assert open_index(folder, cached).search(["Silent Harbor"], 1)[0].passages == PASSAGES[:1]


def test_only_a_whole_index_of_the_same_corpus_opens(corpus, tmp_path):
    with pytest.raises(UserError, match="run 'ragrl data index' first"):
        open_index(tmp_path, corpus)
    build(corpus, "exact", tmp_path)

    class Failing(HashedEncoder):
        def encode_passages(self, passages):
            raise RuntimeError("power cut")

    with pytest.raises(RuntimeError):
        build_index(corpus, Failing({}, 0), "exact", tmp_path)
    with pytest.raises(UserError, match="run 'ragrl data index' first"):
        open_index(tmp_path, corpus)
    build(corpus, "exact", tmp_path)
    other = Corpus(PASSAGES[::-1])
    with pytest.raises(UserError, match="ragrl data index") as caught:
        open_index(tmp_path, other)
    assert corpus.fingerprint in str(caught.value) and other.fingerprint in str(caught.value)


@pytest.mark.parametrize("name", ["corpus", "kind", "count", "encoder", "dimension"])
@pytest.mark.parametrize("value", [None, [1], {}])
def test_a_description_without_a_fact_is_no_index(corpus, tmp_path, name, value):
    build(corpus, "exact", tmp_path)
    file = tmp_path / "index.json"
    whole = json.loads(file.read_text())
    file.write_text(json.dumps({**whole, name: value}))
    with pytest.raises(UserError, match="run 'ragrl data index' first"):
        open_index(tmp_path, corpus)
    del whole[name]
    file.write_text(json.dumps(whole))
    with pytest.raises(UserError, match="run 'ragrl data index' first"):
        open_index(tmp_path, corpus)


@pytest.mark.parametrize(
    ("kind", "dtype", "name"),
    [
        ("exact", "float32", "vectors"),
        ("exact", "bfloat16", "vectors"),
        ("exact", "int8", "vectors"),
        ("exact", "int8", "codes"),
        ("exact", "int8", "scales"),
        ("scann", "float32", "vectors"),
    ],
)
def test_overwritten_vectors_are_named_by_the_first_search(corpus, kind, dtype, name, tmp_path):
    build_index(corpus, HashedEncoder.fit(corpus.passages, 32), kind, tmp_path, dtype=dtype)
    file = tmp_path / name / "c" / "0" / "0"
    file.write_bytes(bytes(file.stat().st_size))
    # The searcher of ScaNN reads its vectors when it is opened.
    with pytest.raises(UserError, match=f"{name}/c/0/0 is damaged .*rerun 'ragrl data index'"):
        open_index(tmp_path, corpus).search(["Silent Harbor"], 1)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_an_index_of_zero_vectors_is_searched(dtype, tmp_path):
    """Each word of a single passage is in every passage, so that all weights are 0."""
    single = Corpus(PASSAGES[:1])
    encoder = HashedEncoder.fit(single.passages, 32)
    assert not encoder.encode_passages(single.passages).any()
    build_index(single, encoder, "exact", tmp_path, dtype=dtype)
    (hits,) = open_index(tmp_path, single).search(["Silent Harbor"], 1)
    assert hits == Hits(PASSAGES[:1], (0.0,))


def test_deleted_shards_do_not_count_as_progress(corpus, tmp_path, monkeypatch):
    embed.embed(corpus.passages, HashedEncoder.fit(corpus.passages, 32), tmp_path, "of")
    monkeypatch.setattr(shards.tensorstore, "open", Mock(side_effect=RuntimeError("power cut")))
    with pytest.raises(RuntimeError):
        shards.write_array(np.ones((6, 32), np.float32), tmp_path, "float32")
    assert not (tmp_path / shards.PROGRESS).exists()


def test_vectors_made_elsewhere_are_taken_if_they_fit(corpus, tmp_path):
    encoder = HashedEncoder.fit(corpus.passages, 64)
    vectors = encoder.encode_passages(corpus.passages)
    values = build_index(corpus, encoder, "exact", tmp_path / "given", vectors=vectors)
    made = build_index(corpus, encoder, "exact", tmp_path / "made")
    assert values.search(["Harbor"], 6) == made.search(["Harbor"], 6)
    with pytest.raises(UserError, match=r"\(5, 64\) do not fit"):
        build_index(corpus, encoder, "exact", tmp_path / "wrong", vectors=vectors[:5])
    with pytest.raises(UserError, match="differ from this encoder"):
        build_index(corpus, encoder, "exact", tmp_path / "wrong", vectors=vectors[::-1])
    with pytest.raises(UserError, match="nan of their length"):
        build_index(corpus, encoder, "exact", tmp_path / "wrong", vectors=vectors * np.nan)
    half = build_index(corpus, encoder, "exact", tmp_path / "half", vectors, "bfloat16")
    assert half.searcher._parts[0][0].dtype == "bfloat16"


def test_unknown_kinds_and_a_missing_scann_are_named(corpus, tmp_path, monkeypatch):
    with pytest.raises(UserError, match="use one of exact, scann"):
        build(corpus, "faiss", tmp_path)
    monkeypatch.setitem(sys.modules, "scann.scann_ops.py", None)
    with pytest.raises(UserError, match="'exact'"):
        build(corpus, "scann", tmp_path)


def test_shards_of_other_vectors_are_not_resumed(corpus, tmp_path, monkeypatch):
    """Those of another dtype, corpus or encoder, and those of a whole index."""
    monkeypatch.setattr(embed, "BATCH", 1)
    monkeypatch.setattr(shards, "SHARD", 2)

    class Failing(HashedEncoder):
        calls = 0

        def encode_passages(self, passages):
            self.calls += 1
            if self.calls > 5:
                raise RuntimeError("power cut")
            return super().encode_passages(passages)

    other = Corpus(PASSAGES[::-1])
    cases = [(corpus, PASSAGES, "bfloat16"), (other, PASSAGES, "float32")]
    for made, fitted, dtype in [*cases, (corpus, PASSAGES[:2], "float32")]:
        encoder = HashedEncoder.fit(fitted, 32)
        with pytest.raises(RuntimeError):
            build_index(corpus, Failing.fit(PASSAGES, 32), "exact", tmp_path)
        for _ in range(2):  # the second build finds a whole index
            build_index(made, encoder, "exact", tmp_path, dtype=dtype)
            expected = encoder.encode_passages(made.passages)
            found = shards.read_array(tmp_path / "vectors")
            np.testing.assert_allclose(found, expected, atol=0 if dtype == "float32" else 2**-8)


def test_bfloat16_vectors_halve_the_bytes_at_equal_recall(tmp_path):
    made = Corpus(world.generate(0, 60).passages)
    encoder, queries = HashedEncoder.fit(made.passages), [p.title for p in made.passages[:40]]
    whole, half = (
        build_index(made, encoder, "exact", tmp_path / dtype, dtype=dtype)
        for dtype in ("float32", "bfloat16")
    )
    assert half.searcher._parts[0][0].nbytes * 2 == whole.searcher._parts[0][0].nbytes
    assert shards.read_array(tmp_path / "bfloat16" / "vectors").dtype == np.float32
    hits, expected = half.search(queries, 5), whole.search(queries, 5)
    for x, y in zip(hits, expected, strict=True):
        np.testing.assert_allclose(x.scores, y.scores, atol=2**-8)
    assert [x.scores for x in hits] != [y.scores for y in expected]
    with pytest.raises(UserError, match="index dtype is 'int4': use one of float32, bfloat16"):
        build_index(made, encoder, "exact", tmp_path / "int4", dtype="int4")


def test_an_index_of_a_file_reports_what_it_is(corpus, tmp_path):
    save_corpus(corpus, tmp_path / "corpus.jsonl")
    save_questions(QUESTIONS, tmp_path / "questions.jsonl")
    path, index = tmp_path / "corpus.jsonl", exact_index(tmp_path / "out")
    report = build_folder(index, path, tmp_path / "questions.jsonl")
    assert json.loads(json.dumps(report)) == report
    assert (report["count"], report["dimension"], report["recall@10"]) == (6, 1024, 1.0)
    assert report["questions"] == 2  # those that name gold passages
    assert (report["gold"], report["gold_missing"]) == (3, 0)
    assert report["mrr@10"] == 1.0 and 0 < report["ndcg@10"] <= 1
    assert report["duplicates"] == {"exact": 0, "examples": []}
    open_index(tmp_path / "out", corpus)
    assert (tmp_path / "out" / "passages").is_dir()
    build_folder(dataclasses.replace(index, dtype="bfloat16"), path)
    assert read_description(tmp_path / "out")["dtype"] == "bfloat16"
    with pytest.raises(UserError, match="does not exist"):
        build_folder(exact_index(tmp_path / "new"), path, tmp_path / "absent")
    assert not (tmp_path / "new").exists()
    # Nor is a corpus encoded first whose questions then measure nothing.
    save_questions([dataclasses.replace(QUESTIONS[2], answers=())], tmp_path / "plain.jsonl")
    with pytest.raises(UserError, match="plain.jsonl names neither gold passages nor answers"):
        build_folder(exact_index(tmp_path / "new"), path, tmp_path / "plain.jsonl")
    assert not (tmp_path / "new").exists()


def test_questions_without_gold_measure_whether_an_answer_is_retrieved(corpus, tmp_path):
    save_corpus(corpus, tmp_path / "corpus.jsonl")
    questions = [
        Question("1", "Who directed Silent Harbor?", ("adela BRANDT",)),
        Question("2", "Who is the mayor of Thornby?", ("Otto",)),  # whole tokens of "Otto Novak"
        Question("3", "Who starred in Golden River?", ("Brun",)),  # only a part of "Bruno"
        Question("4", "Where?", ()),
    ]
    save_questions(questions, tmp_path / "questions.jsonl")
    paths = (tmp_path / "corpus.jsonl", tmp_path / "questions.jsonl")
    report = build_folder(exact_index(tmp_path / "out"), *paths)
    assert report["questions"] == 3 and report["answer_recall@2"] == pytest.approx(2 / 3)
    assert "recall@2" not in report and "gold" not in report
    words = build_folder(BM25Index(folder=str(tmp_path / "words")), *paths)
    assert words["answer_recall@10"] == pytest.approx(2 / 3)


def test_recall_is_of_the_questions_that_a_file_judges(corpus, tmp_path):
    paths = [tmp_path / name for name in ("corpus.jsonl", "questions.jsonl", "qrels")]
    index = exact_index(tmp_path / "out")
    save_corpus(corpus, paths[0])
    save_questions(QUESTIONS, paths[1])
    for passage, expected in (("p0", 1.0), ("p5", 0.0)):  # found first, and last
        paths[2].write_text(f"1 0 {passage} 1\n3 0 p0 0\n")
        report = build_folder(index, *paths)
        assert (report["questions"], report["recall@2"]) == (1, expected)
    with pytest.raises(UserError, match="give --questions"):
        build_folder(index, paths[0], None, paths[2])


def test_a_run_refuses_an_index_of_another_kind(corpus, tmp_path):
    asked = VectorIndex(kind="exact", folder=str(tmp_path / "index"))
    assert open_or_build_index(corpus, asked, tmp_path).search(["x"], 1) is not None
    assert open_or_build_index(corpus, asked, tmp_path).fingerprint == corpus.fingerprint
    others = ({"kind": "scann"}, {"encoder": "minilm"}, {"encoder": "folder"})
    for other in (*others, {"dtype": "bfloat16"}):
        with pytest.raises(UserError, match="is of kind exact, in float32, .*encoder hashed"):
            open_or_build_index(corpus, dataclasses.replace(asked, **other), tmp_path)
