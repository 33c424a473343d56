"""The table of retrievers has a row per set and retriever, and resumes."""

import dataclasses
import json
import pathlib
import shutil
import types

import pytest

from jax_ragrl.bench import retrieval
from jax_ragrl.bench.retrieval import SECTIONS, parse_set, sets_in
from jax_ragrl.cli.main import main
from jax_ragrl.corpus.formats import load_questions
from jax_ragrl.corpus.reading import load_corpus
from jax_ragrl.errors import UserError
from jax_ragrl.llm.listwise import TOKENS_PER_PASSAGE
from jax_ragrl.models.by_name import local_model
from jax_ragrl.retrieval.recall import search_quality
from jax_ragrl.types import Hits, Question
from tests.warmstart.test_expert_pool import ScriptedLLM


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
    """A folder with one set in a subfolder: `world/corpus.jsonl` and questions."""
    path = tmp_path_factory.mktemp("sets") / "world"
    assert main(["data", "world", "--size", "60", "--out", str(path)]) == 0
    (path / "passages.jsonl").rename(path / "corpus.jsonl")
    return path.parent


class Reversed:
    """Returns the corpus in reverse order for every query, and counts its searches."""

    fingerprint, calls = "fake", 0

    def __init__(self, corpus) -> None:
        self.corpus = corpus

    def search(self, queries, k):
        Reversed.calls += 1
        passages = tuple(self.corpus.passages[n] for n in range(-1, -k - 1, -1))
        return [Hits(passages, tuple(range(k, 0, -1))) for _ in queries]


@pytest.fixture
def fake(monkeypatch):
    """A second retriever, `fake`, in place of one that this package cannot build yet."""
    original = retrieval.retriever_from

    def open_retriever(corpus, section, workdir, llm):
        if section["retrievers"][0] == SECTIONS["fake"]:
            return Reversed(corpus)
        return original(corpus, section, workdir, llm)

    monkeypatch.setitem(SECTIONS, "fake", {"kind": "fake", "parts": ("a", "b")})
    monkeypatch.setattr(retrieval, "retriever_from", open_retriever)


def bench(folder, tmp_path, *options: str) -> int:
    workdir = ["--workdir", f"{tmp_path}/work"]
    return main(["bench", "retrieval", "--data", str(folder), *workdir, *options])


def test_the_table_has_the_measures_of_each_retriever(folder, tmp_path, fake, capsys):
    options = ["--retrievers", "hashed,fake", "--out", f"{tmp_path}/out/table", "--json"]
    assert bench(folder, tmp_path, *options) == 0
    table = json.loads(capsys.readouterr().out)
    assert json.loads((tmp_path / "out" / "table.json").read_text()) == table
    names = [row["cells"]["Retriever"] for row in table["rows"]]
    assert names == ["hashed", "fake"] and table["errors"] == []
    corpus = load_corpus(folder / "world" / "corpus.jsonl")
    questions = load_questions(folder / "world" / "dev.jsonl")
    expected = search_quality(Reversed(corpus), questions)
    cells = table["rows"][1]["cells"]
    assert cells["nDCG@10"] == round(expected["ndcg@10"], 4)
    assert cells["Recall@5"] == round(expected["recall@5"], 4)
    assert table["rows"][0]["cells"]["MRR@10"] > cells["MRR@10"]
    page = (tmp_path / "out" / "table.md").read_text()
    assert page.count("\n") == 4 and "| world |" in page
    assert str(folder.parent) not in table["rows"][0]["command"]


def test_finished_cells_are_measured_again_if_the_questions_change(folder, tmp_path, fake, capsys):
    options = ["--retrievers", "fake"]
    assert bench(folder, tmp_path, *options) == 0
    first, calls = capsys.readouterr().out, Reversed.calls
    assert bench(folder, tmp_path, *options) == 0
    assert capsys.readouterr().out == first and Reversed.calls == calls
    assert bench(folder, tmp_path, *options, "--limit", "3") == 0
    assert Reversed.calls > calls and capsys.readouterr().out != first


def test_a_corpus_is_embedded_once_for_all_retrievers(folder, tmp_path, monkeypatch):
    parts = ("bm25", SECTIONS["hashed"])
    monkeypatch.setitem(SECTIONS, "hybrid", SECTIONS["hybrid"] | {"retrievers": parts})
    assert bench(folder, tmp_path, "--retrievers", "hashed,hybrid") == 0
    (corpus,) = (tmp_path / "work" / "indexes").iterdir()
    assert {path.parent.name for path in corpus.rglob("index.json")} == {"exact-hashed", "bm25"}


def test_other_gold_passages_are_another_set(folder, tmp_path):
    (data,) = sets_in(folder)
    gold_set = retrieval.open_set(data, tmp_path)
    first, *rest = gold_set.questions
    edited = [dataclasses.replace(first, gold=("another",)), *rest]
    assert gold_set._replace(questions=edited).identity != gold_set.identity


def test_a_reranker_of_other_weights_is_another_cell(folder, tmp_path):
    (data,) = sets_in(folder)
    gold_set, keys = retrieval.open_set(data, tmp_path), []
    weights = tmp_path / "model.safetensors"
    shutil.copyfile(local_model("tiny") / weights.name, weights)
    for end in (b"a", b"b"):
        weights.write_bytes(weights.read_bytes()[:-1] + end)
        section = retrieval.sections(["hybrid+rerank"], str(tmp_path))["hybrid+rerank"]
        keys.append(retrieval._key(gold_set, "hybrid+rerank", section, ""))
    assert keys[0] != keys[1]


def test_a_cell_that_fails_affects_no_other(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(SECTIONS, "broken", {"kind": "broken"})
    assert bench(folder, tmp_path, "--retrievers", "broken,hashed") == 0
    output = capsys.readouterr()
    assert "- broken on world: UserError: " in output.out and "| hashed |" in output.out
    assert bench(folder, tmp_path, "--retrievers", "broken") == 2
    assert "every cell failed" in capsys.readouterr().err


def test_sets_are_recognized_in_folders(folder, tmp_path):
    (data,) = sets_in(folder)
    assert (data.name, data.corpus.name, data.questions.name) == (
        "world",
        "corpus.jsonl",
        "dev.jsonl",
    )
    with pytest.raises(UserError, match="has no subfolder"):
        sets_in(tmp_path)
    beir = tmp_path / "scifact"
    beir.mkdir()
    (beir / "queries.jsonl").touch()
    assert [(d.name, d.corpus) for d in sets_in(tmp_path)] == [("scifact", beir)]


def test_names_of_fields_are_taken_and_faulty_questions_are_no_missing_ones(tmp_path, capsys):
    (tmp_path / "s").mkdir()
    rows = [{"ask": f"where is {x}?", "gold": [x], "id": "same"} for x in "ab"]
    corpus = [{"id": x, "text": f"{x} is here"} for x in "ab"]
    for name, lines in {"corpus": corpus, "test": rows}.items():
        text = "".join(f"{json.dumps(line)}\n" for line in lines)
        (tmp_path / "s" / f"{name}.jsonl").write_text(text)
    options = ["--retrievers", "bm25", "--fields", "question=ask"]
    assert bench(tmp_path, tmp_path, *options) == 2
    assert "two questions have the id 'same'" in capsys.readouterr().err
    (tmp_path / "s" / "test.jsonl").write_text(f"{json.dumps(rows[0])}\n")
    assert bench(tmp_path, tmp_path, *options, "--json") == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["cells"]["Questions"] == 1 and "--fields question=ask" in row["command"]


def test_wrong_names_no_corpus_and_unnamed_rerankers_are_refused(folder, tmp_path, capsys):
    assert bench(folder, tmp_path, "--retrievers", "bm26") == 2
    assert "--retrievers is 'bm26'" in capsys.readouterr().err
    with pytest.raises(UserError, match="names no corpus"):
        parse_set(str(folder / "world" / "dev.jsonl"))
    with pytest.raises(UserError, match="needs a reranker"):
        retrieval.sections(["hybrid+rerank"])
    section = retrieval.sections(["hybrid+rerank"], "some/folder")["hybrid+rerank"]
    assert section["rerank"] == "some/folder" and section["kind"] == "pipeline"


def test_a_language_model_orders_the_candidates_of_a_hybrid(folder, tmp_path, monkeypatch, capsys):
    """The fused hits in reverse, of two candidates per retriever and no others."""

    def last_first(request):
        count = request.sampling.max_tokens // TOKENS_PER_PASSAGE
        return " > ".join(map(str, range(count, 0, -1)))

    parts = {**retrieval.HYBRID, "retrievers": ("bm25", "hashed")}  # MiniLM may be absent
    monkeypatch.setattr(retrieval, "HYBRID", parts)
    monkeypatch.setitem(SECTIONS, "hybrid", {**parts, "rerank": ""})
    monkeypatch.setattr(retrieval, "load_llm", lambda *args: ScriptedLLM(last_first))
    options = ("--retrievers", "hybrid,hybrid+rerank", "--candidates", "2", "--reranker", "llm")
    assert bench(folder, tmp_path, *options) == 2
    assert "name it with --llm" in capsys.readouterr().err
    assert bench(folder, tmp_path, *options, "--llm", "tiny", "--json") == 0
    before, after = json.loads(capsys.readouterr().out)["rows"]
    # Both read the same two passages, in opposite orders.
    assert before["cells"]["Recall@5"] == after["cells"]["Recall@5"] > 0
    assert before["cells"]["MRR@10"] > after["cells"]["MRR@10"]
    words = "--reranker llm --llm tiny --candidates 2"
    assert after["command"].endswith(words)


class Compiling:
    """Compiles a program for each number of words of the longest query, as an encoder does."""

    def __init__(self) -> None:
        self.now, self.programs = 0.0, set()

    def search(self, queries, k):
        words = max(len(query.split()) for query in queries)
        self.now += 1.0 if words in self.programs else 100.0
        self.programs.add(words)
        return [Hits((), ()) for _ in queries]


def test_the_speed_is_that_of_searches_that_compile_nothing(monkeypatch):
    """Three batches of equal size, whose queries have other lengths."""
    retriever = Compiling()
    clock = types.SimpleNamespace(perf_counter=lambda: retriever.now)
    monkeypatch.setattr(retrieval, "time", clock)
    monkeypatch.setattr(retrieval, "compiled_programs", lambda: len(retriever.programs))
    questions = [
        Question(f"{length} {n}", "who " * length, ("ann",), gold=("1",))
        for length in (2, 9, 5)
        for n in range(retrieval.BATCH)
    ]
    assert retrieval.measure(retriever, questions)["queries_per_s"] == retrieval.BATCH
