"""A tuned search reaches its recall at the least cost, and equal vectors give equal searchers."""

import hashlib
import json
import types

import numpy as np
import pytest

from jax_ragrl.cli.main import main
from jax_ragrl.corpus.passages import Corpus, save_corpus
from jax_ragrl.errors import UserError
from jax_ragrl.retrieval import scann
from jax_ragrl.retrieval.dense import DenseRetriever
from jax_ragrl.retrieval.fuse import FusedRetriever
from jax_ragrl.retrieval.hashed_words import HashedEncoder
from jax_ragrl.retrieval.index import build_index, open_index, read_description
from jax_ragrl.retrieval.kinds import VectorIndex
from jax_ragrl.retrieval.rerank import PairReranker, RerankedRetriever
from jax_ragrl.retrieval.scann import ScannSearcher, Setting, build_scann, hash_files
from jax_ragrl.retrieval.tune import (
    K,
    cheapest,
    count_bytes,
    leaf_rungs,
    recall_of_others,
    tenth_scores,
    tune,
)
from jax_ragrl.run.claims import claim_builds, content_of
from jax_ragrl.run.index import open_or_build_index
from jax_ragrl.types import Passage
from tests.retrieval.test_searchers import clustered


@pytest.fixture(autouse=True)
def _small_sample(monkeypatch):
    monkeypatch.setattr("jax_ragrl.retrieval.tune.SAMPLE", 100)


@pytest.fixture(scope="module")
def vectors():
    pytest.importorskip("scann")
    return clustered(scann.BRUTE_FORCE, 16, seed=3)


@pytest.fixture(scope="module")
def searcher(vectors):
    return ScannSearcher.from_vectors(vectors)


def test_equal_vectors_give_equal_searchers(vectors, tmp_path):
    for name in ("first", "second"):
        build_scann(vectors, tmp_path / name)
    assert hash_files(tmp_path / "first") == hash_files(tmp_path / "second") != ""
    file = tmp_path / "second" / "ah_codebook.pb"
    file.write_bytes(file.read_bytes()[:-1])
    assert hash_files(tmp_path / "first") != hash_files(tmp_path / "second")
    assert hash_files(tmp_path / "absent") == ""


@pytest.mark.parametrize("target", [0.0, 0.3, 0.6, 0.9, 0.99, 2.0])
@pytest.mark.parametrize("weight", [0.01, 1, 100])
def test_the_cheapest_setting_is_the_best_of_the_whole_ladder(target, weight):
    def recall(setting):
        return (1 - 0.9**setting.leaves) * (1 - 0.5**setting.candidates)

    def cost(setting):
        return setting.leaves + weight * setting.candidates

    settings = [Setting(n, 2**power) for n in leaf_rungs(141) for power in range(7)]
    reaching = [x for x in settings if recall(x) >= target] or [Setting(141, 64)]
    assert cost(cheapest(recall, cost, target, 141)) == min(map(cost, reaching))


def test_the_tenth_score_leaves_the_passage_itself_out(monkeypatch):
    monkeypatch.setattr("jax_ragrl.retrieval.tune.BLOCK", 64)
    rng = np.random.default_rng(0)
    vectors, own = rng.standard_normal((150, 8), np.float32), np.array([3, 64, 149])
    scores = vectors[own] @ vectors.T
    scores[range(3), own] = -np.inf
    np.testing.assert_allclose(tenth_scores(vectors, own), np.sort(scores)[:, -K], rtol=1e-6)


def test_a_tuned_search_reaches_its_recall_and_costs_less_than_a_higher_one(searcher, vectors):
    results = [tune(searcher, vectors, target) for target in (0.8, 0.98)]
    for result, target in zip(results, (0.8, 0.98), strict=True):
        assert target == result["target"] <= result["recall"] <= 1
        assert result["queries_per_s"] > 0
    settings = [Setting(result["leaves"], result["candidates"]) for result in results]
    low, high = (count_bytes(setting, *vectors.shape) for setting in settings)
    assert low < high
    # Equal inputs give equal settings: no clock decides.
    again = tune(searcher, vectors, 0.98)
    assert {**again, "queries_per_s": 0} == {**results[1], "queries_per_s": 0}


def test_equal_passages_are_equally_good_hits(vectors):
    """Each passage comes twenty times, so that its ten nearest are any of nineteen."""
    repeated = np.repeat(vectors[: len(vectors) // 20], 20, axis=0)
    own = np.arange(0, 2000, 20)
    whole = ScannSearcher.from_vectors(repeated).at(Setting(141, 64))
    assert recall_of_others(whole, repeated, own, tenth_scores(repeated, own)) == 1.0


def test_a_recall_out_of_reach_warns_and_searches_most_thoroughly(searcher, vectors, capsys):
    class Blind(ScannSearcher):
        def at(self, setting):
            return Blind(self._searcher, self._count, setting)

        def search(self, queries, k):
            scores, index = super().search(queries, k)
            return scores - 1, index

    result = tune(Blind(searcher._searcher, len(vectors)), vectors, 0.98)
    assert (result["leaves"], result["candidates"]) == (141, 64)
    error = capsys.readouterr().err
    assert f"reaches {result['recall']:.4f} and is used" in error and "'exact'" in error


def test_few_passages_are_searched_whole():
    assert tune(ScannSearcher(None, 30), np.zeros((30, 4), np.float32), 0.98) == {
        "target": 0.98,
        "recall": 1.0,
    }


@pytest.fixture
def corpus(monkeypatch):
    """A corpus above a limit that is lowered for the test."""
    pytest.importorskip("scann")
    for module in ("scann", "tune", "index"):
        monkeypatch.setattr(f"jax_ragrl.retrieval.{module}.BRUTE_FORCE", 300)
    words = ["river", "harbor", "city", "film", "mayor", "song", "tower", "train"]
    texts = [" ".join(words[(n // 8**i) % 8] for i in range(4)) for n in range(600)]
    return Corpus(tuple(Passage(f"p{n}", f"T{n}", text) for n, text in enumerate(texts)))


def test_an_index_opens_with_the_setting_that_it_was_tuned_for(corpus, tmp_path):
    encoder = HashedEncoder.fit(corpus.passages, 32)
    built = build_index(corpus, encoder, "scann", tmp_path, recall=0.9)
    description = read_description(tmp_path)
    search = description["search"]
    assert search["target"] == 0.9 <= search["recall"]
    assert description["files"] == hash_files(tmp_path / "scann")
    opened = open_index(tmp_path, corpus)
    assert opened.searcher._setting == Setting(search["leaves"], search["candidates"])
    assert opened.build == built.build != ""
    assert opened.search(["harbor city"], 5) == built.search(["harbor city"], 5)


def test_the_command_prints_the_recall_that_it_reached(corpus, tmp_path, capsys):
    save_corpus(corpus, tmp_path / "corpus.jsonl")
    args = ["data", "index", f"--corpus={tmp_path}/corpus.jsonl", f"--out={tmp_path}/out"]
    assert main([*args, "--encoder", "hashed", "--recall", "0.9"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["search"] == read_description(tmp_path / "out")["search"]
    for wrong in (["--kind", "exact"], []):  # an index of words is the default
        assert main([*args, "--recall", "0.9", *wrong]) == 2
        assert "scann" in capsys.readouterr().err
    assert main([*args, "--encoder", "hashed", "--recall", "98"]) == 2
    assert "index.recall is 98.0" in capsys.readouterr().err


def test_a_run_refuses_an_index_of_another_recall(corpus, tmp_path):
    asked = VectorIndex(recall=0.8, folder=str(tmp_path / "index"))
    open_or_build_index(corpus, asked, tmp_path)
    open_or_build_index(corpus, VectorIndex(folder=asked.folder), tmp_path)
    with pytest.raises(UserError, match=r"tuned for the recall 0\.8 .* index\.recall is 0\.9"):
        open_or_build_index(corpus, VectorIndex(recall=0.9, folder=asked.folder), tmp_path)


def test_a_resumed_run_refuses_another_build_of_its_index(tmp_path):
    def retriever(build):
        corpus = Corpus((Passage("p", "t", "x"),))
        return DenseRetriever(corpus, HashedEncoder.fit(corpus.passages), None, build)

    first, second = (retriever(hashlib.sha256(name).hexdigest()) for name in (b"1", b"2"))
    claim_builds(first, tmp_path)
    claim_builds(second, tmp_path)  # nothing was produced with the first one
    (tmp_path / "baselines.json").touch()
    claim_builds(second, tmp_path)
    with pytest.raises(UserError, match="another build of its index"):
        claim_builds(first, tmp_path)
    (tmp_path / "index_builds.json").unlink()
    claim_builds(first, tmp_path)
    claim_builds(retriever(""), tmp_path)  # hits that depend on the vectors alone


def test_a_resumed_run_refuses_another_encoder_or_reranker_of_the_same_path(tmp_path):
    """Such as those of another index, whose folder a resumed run may change."""

    def retriever(encoder="1", reranker="1", source="here"):
        facts = {"kind": "bert", "source": source, "weights": encoder}
        fake = types.SimpleNamespace(describe=lambda: facts)
        fused = FusedRetriever((DenseRetriever(Corpus(()), fake, None),), (1.0,))
        return RerankedRetriever(fused, PairReranker(types.SimpleNamespace(weights=reranker)))

    (tmp_path / "baselines.json").touch()
    claim_builds(retriever(), tmp_path)
    claim_builds(retriever(source="moved"), tmp_path)
    for other in (retriever("2"), retriever("1", "2")):
        with pytest.raises(UserError, match="begun with the encoders and rerankers .* restore"):
            claim_builds(other, tmp_path)
        assert content_of((), other, ())["weights"] != content_of((), retriever(), ())["weights"]
