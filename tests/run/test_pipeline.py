"""A pipeline in the config searches as its parts do, in every command."""

import json
import math
import pathlib
import shutil
import threading

import numpy as np
import pytest

from jax_ragrl.cli.main import CONFIGS, load_config, main
from jax_ragrl.config.schema import convert
from jax_ragrl.corpus import world
from jax_ragrl.corpus.formats import save_questions
from jax_ragrl.corpus.passages import Corpus, save_corpus
from jax_ragrl.errors import UserError
from jax_ragrl.retrieval.bm25 import BM25Retriever
from jax_ragrl.retrieval.fuse import FusedRetriever
from jax_ragrl.retrieval.kinds import (
    BM25Index,
    Index,
    PipelineIndex,
    RemoteIndex,
    SearxngIndex,
    SerperIndex,
    VectorIndex,
    parse_retriever,
)
from jax_ragrl.retrieval.rerank import RerankedRetriever
from jax_ragrl.rollout.collect import Environment, collect
from jax_ragrl.rollout.expand import single_chain
from jax_ragrl.run import pipeline, retrievers
from jax_ragrl.run.data import load_data
from jax_ragrl.run.index import index_folder, load_retriever
from jax_ragrl.run.index_folder import build_section, open_folder
from jax_ragrl.run.load import load_job, with_default_index
from jax_ragrl.systems.baselines.standard import StandardRAG
from jax_ragrl.types import Hits
from tests.rollout.tape import Tape

MADE = world.generate(0, 40)
TINY_BERT = pathlib.Path(__file__).parents[1] / "models" / "tiny_bert"


@pytest.fixture
def corpus():
    return Corpus(MADE.passages)


class Alphabetic:
    def scores_of(self, pairs):
        return [np.array([ord(p.title[0]) for p in passages], np.float32) for _, passages in pairs]


@pytest.mark.parametrize(
    ("word", "section"),
    [
        ("bm25", BM25Index()),
        ("hashed", VectorIndex("hashed")),
        ("models/e5", VectorIndex("models/e5")),
        ("http://h:1", RemoteIndex("http://h:1")),
        ("searxng@http://h:1", SearxngIndex("http://h:1")),
        ("serper", SerperIndex()),
    ],
)
def test_a_word_is_short_for_a_section(word, section):
    assert parse_retriever(word) == section
    values = {"kind": "pipeline", "retrievers": [word, {"kind": "bm25", "k1": 1}]}
    index = convert(Index, values, "config.index")
    assert index.sections == (section, BM25Index(k1=1.0))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"retrievers": ()}, "give at least one retriever"),
        ({"retrievers": ("",)}, "a retriever is empty"),
        ({"retrievers": ("searxng",)}, "index.url is empty"),
        ({"retrievers": ({"kind": "pipeline"},)}, r"retrievers\[0\].kind is 'pipeline': use one"),
        ({"retrievers": (3,)}, r"retrievers\[0\] is 3: it must be"),
        ({"weights": (1.0, 2.0)}, "one weight for each of the 1 retrievers"),
        ({"weights": (0.0,)}, r"weights\[0\] is 0.0: use a finite number, above 0"),
        ({"candidates": 0}, "candidates is 0: use a finite number, at least 1"),
        ({"fuse": "sum"}, "index.fuse is 'sum': use one of rrf, weighted"),
        ({"kind": "bing"}, "'bing': use one of scann, exact, bm25, remote, searxng, serper"),
        *(({"kind": kind, "url": ""}, "index.url is empty") for kind in ("searxng", "remote")),
        ({"kind": "remote", "url": "localhost:1"}, "index.url is 'localhost:1', without http"),
        ({"kind": "exact", "url": "http://h:1"}, "'http://h:1'.*only kind remote or searxng or s"),
        ({"kind": "exact", "dtype": "int4"}, "index.dtype is 'int4'"),
        ({"kind": "scann", "dtype": "int8"}, "index dtype is int8, but the index kind is scann"),
        ({"kind": "exact", "recall": 0.9}, "only scann is tuned"),
        *(
            ({"kind": "bm25", k: x}, "a finite number, at least 0")
            for k, x in (("k1", -1), ("b", 2))
        ),
        ({"kind": "bm25", "k1": math.nan}, "a finite number, at least 0"),
        ({"kind": "bm25", "language": "latin"}, "language is 'latin': use one of english"),
    ],
)
def test_an_index_that_cannot_be_built_is_refused_with_the_config(values, message):
    with pytest.raises(UserError, match=message):
        convert(Index, {"kind": "pipeline", **values}, "config.index")


def test_parts_are_built_once_in_their_own_folders(corpus, tmp_path, monkeypatch):
    words = ("bm25", "hashed", BM25Index(language="none"))
    index = PipelineIndex(retrievers=words, folder=str(tmp_path), candidates=5)
    built = load_retriever(corpus, index, tmp_path)
    assert isinstance(built, FusedRetriever) and built.candidates == 5
    folders = {"bm25", "scann-hashed", "bm25-2"}
    assert {path.name for path in tmp_path.iterdir()} == folders
    monkeypatch.setattr("jax_ragrl.retrieval.bm25.build_bm25", None)  # a second build would fail
    monkeypatch.setattr("jax_ragrl.run.index.build_index", None)
    opened = load_retriever(corpus, index, tmp_path)
    queries = [question.text for question in MADE.questions["dev"][:5]]
    assert opened.search(queries, 4) == built.search(queries, 4)


def test_one_retriever_is_not_fused_and_a_reranker_follows(corpus, tmp_path, monkeypatch):
    index = PipelineIndex(folder=str(tmp_path))
    assert isinstance(load_retriever(corpus, index, tmp_path), BM25Retriever)
    monkeypatch.setattr(pipeline, "load_cross_encoder", {"model": Alphabetic()}.__getitem__)
    index = PipelineIndex(folder=str(tmp_path), rerank="model", candidates=4)
    reranked = load_retriever(corpus, index, tmp_path)
    assert isinstance(reranked, RerankedRetriever)
    (hits,) = reranked.search([MADE.questions["dev"][0].text], 4)
    titles = [p.title[0] for p in hits.passages]
    assert titles == sorted(titles, reverse=True)


class Last:
    """Writes the numbers of a prompt in reverse, in the thread of its caller."""

    name, on_device = "last", True

    def __init__(self):
        self.threads = set()

    def complete(self, requests):
        self.threads |= {threading.current_thread() for _ in requests}
        return ["20 > " + " > ".join(map(str, range(19, 0, -1))) for _ in requests]


def test_the_frozen_model_of_the_run_orders_the_hits_in_the_thread_of_the_sampler(corpus, tmp_path):
    index = PipelineIndex(rerank="llm", candidates=20, folder=str(tmp_path))
    with pytest.raises(UserError, match="this command has no frozen language model"):
        load_retriever(corpus, index, tmp_path)
    llm = Last()
    retriever = load_retriever(corpus, index, tmp_path, lambda: llm)
    plain = load_retriever(corpus, PipelineIndex(folder=str(tmp_path)), tmp_path)
    question = MADE.questions["dev"][0]
    (hits,), (before,) = retriever.search([question.text], 20), plain.search([question.text], 20)
    assert hits.passages == before.passages[::-1]
    llm.threads.clear()
    system = StandardRAG("baselines_tiny", 3)

    collect(system, single_chain, [question], Environment(Tape({}), retriever, llm))
    assert llm.threads == {threading.current_thread()}


def test_the_parts_of_a_pipeline_are_opened_with_the_encoder_of_its_config(tmp_path, monkeypatch):
    """Two encoders have one name, by which the folders of their indexes are named."""
    small = Corpus(MADE.passages[:4])
    for place in ("a", "b"):
        shutil.copytree(TINY_BERT, tmp_path / place / "encoder")
    pooling = {"word_embedding_dimension": 16, "pooling_mode_cls_token": True}
    (tmp_path / "b" / "encoder" / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    monkeypatch.chdir(tmp_path)
    parts = [VectorIndex(f"{place}/encoder", kind="exact") for place in ("a", "b")]
    indexes = [PipelineIndex(retrievers=(part,), folder=str(tmp_path / "out")) for part in parts]
    build_section(small, indexes[0], tmp_path / "out")
    with pytest.raises(UserError, match="was built with the encoder"):
        load_retriever(small, indexes[1], tmp_path)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")  # the encoder has a relative path
    opened = open_folder(tmp_path / "out", small)
    assert opened.encoder.describe()["source"] == str(tmp_path / "a" / "encoder")


@pytest.fixture
def files(tmp_path):
    save_corpus(Corpus(MADE.passages), tmp_path / "corpus.jsonl")
    save_questions(MADE.questions["dev"][:20], tmp_path / "questions.jsonl")
    return tmp_path


def index(files, *options, code=0):
    args = ["--corpus", f"{files}/corpus.jsonl", "--out", f"{files}/index", *options]
    assert main(["data", "index", *args]) == code


def test_the_command_builds_words_unless_there_is_an_encoder(files, capsys, corpus):
    index(files, "--questions", f"{files}/questions.jsonl")
    report = json.loads(capsys.readouterr().out)
    assert report["kind"] == "bm25" and report["recall@10"] > 0.5 and report["questions"] > 0
    index(files, "--encoder", "hashed")
    assert json.loads(capsys.readouterr().out)["kind"] == "scann"
    index(files, "--kind", "exact", "--language", "german", code=2)
    assert "only bm25 reads this option" in capsys.readouterr().err
    index(files, "--encoder", "minilm", "--kind", "bm25", code=2)
    assert "--encoder is minilm, but --kind is bm25" in capsys.readouterr().err
    for options in (("--kind", "bm25"), ("--retrievers", "bm25,hashed")):
        index(files, *options, "--dtype", "bfloat16", code=2)
        assert "only exact or scann reads this option" in capsys.readouterr().err
    index(files, "--kind", "flat", code=2)
    assert "use one of bm25, exact, scann, pipeline" in capsys.readouterr().err


def test_the_command_builds_a_pipeline_that_other_commands_open(files, capsys, corpus):
    options = ("--retrievers", "bm25,hashed", "--fuse", "weighted", "--candidates", "7")
    index(files, *options, "--questions", f"{files}/questions.jsonl")
    report = json.loads(capsys.readouterr().out)
    assert (report["kind"], report["fuse"], report["candidates"]) == ("pipeline", "weighted", 7)
    assert [part["kind"] for part in report["retrievers"]] == ["bm25", "scann"]
    opened = open_folder(files / "index", corpus)
    assert isinstance(opened, FusedRetriever) and opened.candidates == 7
    assert opened.fingerprint == corpus.fingerprint
    args = ["--questions", f"{files}/questions.jsonl", "--corpus", f"{files}/corpus.jsonl"]
    args += ["--index", f"{files}/index", "--systems", "standard_rag", "--limit", "2", "--json"]
    assert main(["evaluate", *args]) == 0
    assert json.loads(capsys.readouterr().out)["standard_rag"]["ended"] == {"answered": 2}


def test_recall_after_a_language_model_needs_a_run(files, capsys):
    options = ("--rerank", "llm", "--questions", f"{files}/questions.jsonl")
    index(files, *options, code=2)
    assert "needs the language model of a run" in capsys.readouterr().err
    index(files, "--rerank", "llm")
    assert json.loads(capsys.readouterr().out)["rerank"] == "llm"
    index(files, "--retrievers", "http://h:1", code=2)
    assert "there is no index to build" in capsys.readouterr().err


class Reversed:
    def __init__(self, corpus: Corpus):
        self.passages, self.fingerprint = corpus.passages[::-1], corpus.fingerprint

    def search(self, queries, k):
        return [Hits(self.passages[:k], (0.0,) * k) for _ in queries]


def test_a_config_names_a_retriever_of_ones_own_or_has_that_of_words(corpus, tmp_path):
    section = {"kind": "own", "retriever": f"{__name__}:Reversed"}
    found = retrievers.retriever_from(corpus, section, tmp_path)
    assert found.search(["q"], 2)[0].passages == corpus.passages[:-3:-1]
    for wrong in ("Reversed", "nowhere:Reversed", f"{__name__}:Forward"):
        with pytest.raises(UserError, match="index.retriever is '.*: give module:name"):
            retrievers.retriever_from(corpus, section | {"retriever": wrong}, tmp_path)
    files = {"data": {"files": {"corpus": "c"}}}
    assert with_default_index(files)["index"] == {"kind": "bm25"}
    assert with_default_index({**files, "index": {}})["index"] == {}
    assert "index" not in with_default_index({"data": {"world": {}}})


def test_a_config_without_a_section_opens_the_retriever_of_its_run(files):
    values = load_config(CONFIGS / "tiny" / "c3po.py", [])
    del values["index"]
    questions = dict.fromkeys(("train", "dev", "test"), f"{files}/questions.jsonl")
    values["data"] = {"files": {"corpus": f"{files}/corpus.jsonl", **questions}}
    job, folder = load_job(values), files / "run"
    corpus = load_data(job.data, index_folder(job.index, folder), job.index).corpus
    of_run = load_retriever(corpus, job.index, folder)
    opened = retrievers.open_config(values, files / "search")
    assert isinstance(opened, BM25Retriever) and isinstance(of_run, BM25Retriever)
    assert opened.fingerprint == of_run.fingerprint
    queries = [question.text for question in MADE.questions["dev"][:5]]
    assert opened.search(queries, 4) == of_run.search(queries, 4)
