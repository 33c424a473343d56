"""The table over several sets: what is asked of a user, what a failure costs, what is kept."""

from __future__ import annotations

import json
import pathlib

import pytest

from jax_ragrl.cli.main import main
from jax_ragrl.errors import UserError
from jax_ragrl.evaluation import suite as surveys
from jax_ragrl.evaluation.suite import DataSet, kept, markdown, parse_data, shown, with_corpora
from jax_ragrl.evaluation.table import Setting
from tests.llm.server import serving
from tests.retrieval.engine import engine, pages

COSTS = dict.fromkeys(
    ("llm_prompt_tokens", "llm_completion_tokens", "policy_tokens", "policy_calls"), 2.0
) | {"retrieval_calls": 1.5, "llm_calls": 3.0}
CELL = {"questions": 4, "f1": 12.34, "em": 0.0, "cover_em": 25.0, "ended": {}, "costs": COSTS}
SHOWN = "12.3 / 0.0 / 25.0; 1.5 / 5 / 6"


def test_a_set_is_named_by_its_user_its_file_or_its_folder():
    path = pathlib.Path("d/e.json.gz")
    assert parse_data("d/e.json.gz") == DataSet("e", path)
    assert parse_data("x=d/e.json.gz@c") == DataSet("x", path, pathlib.Path("c"))
    assert parse_data("d/popqa/test.jsonl").name == "popqa"


def test_a_cell_shows_scores_costs_and_failures():
    assert shown(CELL) == SHOWN
    assert shown(CELL | {"ended": {"failed": 1}}) == f"{SHOWN} (1 failed)"
    assert shown({"error": "OSError: down"}) == "error" and shown(None) == "…"


def test_a_table_names_its_faults_below():
    cells = {("a", "x"): CELL, ("a", "y"): {"error": "OSError: down"}}
    page = markdown(["x", "y"], ["a", "b"], cells)
    assert f"| x | {SHOWN} | … |\n| y | error | … |\n" in page
    assert page.endswith("- y on a: OSError: down\n")


def test_failed_cells_are_tried_again_and_a_torn_line_is_dropped(tmp_path):
    file = tmp_path / "rows.jsonl"
    good, bad = ({"data": "a", "system": name} for name in "xy")
    file.write_text(json.dumps(good) + "\n" + json.dumps(bad | {"error": "e"}) + '\n{"data": "a')
    assert set(kept(file)) == {("a", "x")} and file.read_text() == json.dumps(good) + "\n"
    assert kept(tmp_path / "none") == {}


def rows(path: pathlib.Path, *values: dict) -> pathlib.Path:
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path


@pytest.fixture
def sets(tmp_path):
    corpus = [{"id": str(i), "title": f"t{i}", "text": f"{w} is here"} for i, w in enumerate("xyz")]
    rows(tmp_path / "corpus.jsonl", *corpus)
    asked = [{"id": w, "question": f"where is {w}", "golden_answers": [w]} for w in "xyz"]
    rows(tmp_path / "one.jsonl", *asked)
    rows(tmp_path / "two.jsonl", *asked[:2])
    return tmp_path


def test_a_set_without_passages_takes_the_common_ones_or_is_refused(sets):
    data, corpus = parse_data(str(sets / "one.jsonl")), sets / "corpus.jsonl"
    setting = Setting(corpus, None, None, ("direct",), "tiny", "tiny", "tiny", 2, 0)
    assert with_corpora(setting, [data])[0].corpus == corpus
    own = data._replace(corpus=sets / "own.jsonl")
    assert with_corpora(setting, [own]) == [own]
    with pytest.raises(UserError, match="one.jsonl holds no passages.*@CORPUS.*--corpus"):
        with_corpora(setting._replace(corpus=None), [data])
    with pytest.raises(UserError, match="two sets are called 'one'"):
        with_corpora(setting, [data, data])


def run(sets, address: str, *systems: str, **more: str) -> int:
    data = [f"{sets}/one.jsonl", f"{sets}/two.jsonl"]
    given = ["--corpus", f"{sets}/corpus.jsonl", "--llm", f"openai:m@{address}", "--style", "full"]
    given += ["--systems", ",".join(systems), "--top-k", "2", "--workdir", f"{sets}/table"]
    given += [part for name, value in more.items() for part in (f"--{name}", value)]
    return main(["evaluate", *given, "--data", *data])


def test_a_failing_cell_loses_no_other_and_is_made_good_by_the_next_run(sets, capsys, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    known, broken = surveys.measured, [True]

    def measured(name, bench, actors, questions):
        if name == "standard_rag" and len(questions) == 2 and broken[0]:
            raise RuntimeError("down")
        return known(name, bench, actors, questions)

    monkeypatch.setattr(surveys, "measured", measured)
    with serving(lambda body: "True, x") as (address, seen):
        assert run(sets, address, "direct", "standard_rag", judge=f"openai:m@{address}") == 0
        page = capsys.readouterr().out
        assert "- standard_rag on two: RuntimeError: down" in page
        assert "| standard_rag |" in page and "| error |" in page
        lines = (sets / "table" / "rows.jsonl").read_text().splitlines()
        made = {(row["data"], row["system"]): row for row in map(json.loads, lines)}
        assert made["one", "direct"]["judge"] == 100.0
        assert made["one", "direct"]["cover_em"] == pytest.approx(33.33)
        assert made["two", "direct"]["ci95"]["judge"] == [100.0, 100.0]
        broken[0], before = False, len(seen)
        assert run(sets, address, "direct", "standard_rag", judge=f"openai:m@{address}") == 0
        page = capsys.readouterr().out
        assert "error" not in page and len(seen) == before + 4  # two answers and their verdicts
        assert (sets / "table" / "table.md").read_text() == page.removesuffix("\n")
        # Another table needs another folder.
        assert run(sets, address, "direct", judge="") == 2


def test_cells_of_other_questions_are_not_taken_for_those_of_a_set(sets, capsys, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    with serving(lambda body: "x") as (address, seen):
        assert run(sets, address, "direct") == 0
        rows(sets / "two.jsonl", {"id": "z", "question": "where is z", "golden_answers": ["z"]})
        before = len(seen)
        assert run(sets, address, "direct") == 2 and len(seen) == before
    told = capsys.readouterr().err
    assert "other questions called 'two'" in told and "--data NAME=FILE" in told


def test_a_server_that_refused_everything_is_told_of_and_asked_again(sets, capsys, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    states = iter([401] * 5 + ["x"] * 4 + [401])
    with serving(lambda body: next(states)) as (address, _):
        assert run(sets, address, "direct") == 2
        page, told = capsys.readouterr()
        assert "every cell failed" in told
        assert "| direct | error | error |" in page and "- direct on one: every question" in page
        assert page.count("401 - refused") == 2
        assert run(sets, address, "direct") == 0
    page = capsys.readouterr().out
    assert "error" not in page and "(1 failed)" in page
    assert "- direct on two: 1 of 2 questions failed and are left out" in page


def test_a_table_without_a_cell_yet_takes_other_options(sets, capsys, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    with serving(lambda body: "x") as (address, _):
        assert run(sets, address, "direct", encoder="nowhere") == 2
        assert "'nowhere' is no folder" in capsys.readouterr().out
        assert run(sets, address, "direct") == 0
        assert "error" not in capsys.readouterr().out
        assert run(sets, address, "direct", encoder="nowhere") == 2


def test_a_search_engine_stands_for_all_corpora_and_its_hits_are_kept(sets, capsys, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    reading = serving(lambda body: body["messages"][-1]["content"].partition("Question:")[0])
    with reading as (address, _), engine(pages) as (web, seen):
        given = ["--llm", f"openai:m@{address}", "--style", "full", "--workdir", f"{sets}/table"]
        given += ["--systems", "standard_rag", "--retriever", f"searxng@{web}", "--data"]
        assert main(["evaluate", *given, f"{sets}/one.jsonl", f"{sets}/two.jsonl"]) == 0
        assert len({(asked["q"], asked["pageno"]) for asked in seen}) == len(seen) > 0
    (kept,) = (sets / "table" / "searches").iterdir()
    assert kept.name == "searxng-0.jsonl" and "error" not in capsys.readouterr().out
    row = json.loads((sets / "table" / "rows.jsonl").read_text().splitlines()[0])
    assert row["costs"]["passages"] == 5.0 and row["cover_em"] == 100.0  # the query is in its hits


def test_the_index_of_the_common_corpus_is_taken_however_its_path_is_written(sets, monkeypatch):
    monkeypatch.chdir(sets)
    monkeypatch.setattr(surveys, "retriever_of", lambda setting: "the index that was given")
    monkeypatch.setattr(surveys, "open_bench", lambda setting, actors, retriever: retriever)
    corpus, index = pathlib.Path("corpus.jsonl"), pathlib.Path("index")
    setting = Setting(corpus, None, index, ("direct",), "tiny", "tiny", "tiny", 2, 0)
    data = DataSet("one", sets / "one.jsonl", sets / "corpus.jsonl")
    searched = surveys._searching(setting, sets / "table", "lexical")
    opened = surveys._opened(setting, data, None, searched)
    assert opened.bench == "the index that was given"


def test_one_set_needs_its_corpus_and_index(capsys):
    assert main(["evaluate", "--questions", "x", "--systems", "direct"]) == 2
    assert "--corpus and --index" in capsys.readouterr().err
