"""`ragrl data search` prints the hits of the retriever that its options name."""

import json
import pathlib

import pytest

from jax_ragrl.cli.main import main
from jax_ragrl.corpus.data_path import data_path
from jax_ragrl.corpus.formats import load_questions
from jax_ragrl.corpus.reading import load_corpus
from jax_ragrl.retrieval.index import open_index
from jax_ragrl.serve.search import application
from tests.listening import listening


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
    """A generated corpus with its questions, and the index of it."""
    path = tmp_path_factory.mktemp("search")
    assert main(["data", "world", "--size", "60", "--out", str(path)]) == 0
    arguments = ["--corpus", f"{path}/passages.jsonl", "--kind", "exact", "--out", f"{path}/index"]
    assert main(["data", "index", *arguments]) == 0
    return path


def retriever(folder: pathlib.Path):
    return open_index(folder / "index", load_corpus(folder / "passages.jsonl"))


def test_json_has_the_hits_of_the_index(folder, capsys):
    question = load_questions(folder / "test.jsonl")[0].text
    assert main(["data", "search", f"{folder}/index", question, "--k", "3", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    (hits,) = retriever(folder).search([question], 3)
    assert [hit["id"] for hit in row["hits"]] == [p.id for p in hits.passages]
    assert [hit["score"] for hit in row["hits"]] == list(hits.scores)
    assert row["query"] == question and [hit["rank"] for hit in row["hits"]] == [1, 2, 3]


def test_text_has_rank_score_id_title_and_a_marked_snippet(folder, capsys):
    passage = load_corpus(folder / "passages.jsonl").passages[0]
    assert main(["data", "search", f"{folder}/index", passage.title, "--k", "1"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.split()[0] == "1" and first.split()[2] == passage.id
    assert "**" in first and "**" in second


def test_questions_may_have_fields_of_ones_own(folder, tmp_path, capsys):
    file = tmp_path / "ask.csv"
    file.write_text("frage,antwort\nwho,x\n")
    command = ["data", "search", f"{folder}/index", "--questions", str(file), "--json"]
    assert main(command) == 2 and "--fields question=NAME" in capsys.readouterr().err
    assert main([*command, "--fields", "question=frage,answer=antwort"]) == 0
    assert json.loads(capsys.readouterr().out)["query"] == "who"


def test_a_run_file_has_the_hits_of_every_question(folder, tmp_path):
    run = tmp_path / "a.trec"
    options = ["--questions", f"{folder}/test.jsonl", "--run", str(run), "--tag", "mine"]
    assert main(["data", "search", f"{folder}/index", *options, "--k", "4"]) == 0
    questions = load_questions(folder / "test.jsonl")
    rows = [line.split() for line in run.read_text().splitlines()]
    assert {row[0] for row in rows} == {question.id for question in questions}
    hits = retriever(folder).search([question.text for question in questions], 4)
    expected = [(q.id, p.id) for q, h in zip(questions, hits, strict=True) for p in h.passages]
    assert [(row[0], row[2]) for row in rows] == expected and {row[5] for row in rows} == {"mine"}


def test_queries_of_a_file_are_searched_in_order_and_files_may_be_names(folder, tmp_path, capsys):
    (tmp_path / "queries.txt").write_text("who directed it\n\nwhere was she born\n")
    options = ["--queries", f"{tmp_path}/queries.txt", "--json"]
    assert main(["data", "search", f"{folder}/index", *options]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["query"] for row in rows] == ["who directed it", "where was she born"]
    words = ["data", "search", f"{folder}/index", "--questions", "nq:dev", "--k", "1", "--json"]
    assert main(words) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["query"] for row in rows] == [q.text for q in load_questions(data_path("nq:dev"))]
    assert main([*words, "--corpus", "nq:corpus"]) == 2
    assert "does not exist" not in capsys.readouterr().err  # found, but other passages


def test_a_config_and_a_server_are_searched_like_a_folder(folder, tmp_path, capsys):
    config = "--config=configs/tiny/c3po.py"
    files = [f"--config.data.files.{name}={folder}/test.jsonl" for name in ("train", "dev", "test")]
    files += [f"--config.data.files.corpus={folder}/passages.jsonl", "--config.index.kind=exact"]
    outputs = []
    with listening(application(retriever(folder))) as address:
        for source in (
            [f"{folder}/index"],
            ["--retriever", address],
            [config, *files, "--workdir", str(tmp_path)],
        ):
            assert main(["data", "search", *source, "who directed it", "--json"]) == 0
            lines = capsys.readouterr().out.splitlines()
            outputs.append([line for line in lines if line.startswith("{")])
    assert outputs[0] == outputs[1] == outputs[2]


def test_an_index_without_passages_asks_for_its_corpus(folder, tmp_path, capsys):
    copy = tmp_path / "index"
    copy.mkdir()
    for path in (folder / "index").iterdir():
        if path.name != "passages":
            (copy / path.name).symlink_to(path)
    assert main(["data", "search", str(copy), "q"]) == 2
    assert "give the file (--corpus)" in capsys.readouterr().err
    assert main(["data", "search", str(copy), "q", "--corpus", f"{folder}/passages.jsonl"]) == 0
