"""The evaluation suite: parsing, failures, resumption."""

import json
import pathlib
import re
import shutil
import types

import pytest

from jax_ragrl.cli.main import main
from jax_ragrl.config.snapshot import save_config
from jax_ragrl.errors import UserError
from jax_ragrl.evaluation import suite, table
from jax_ragrl.evaluation.suite import (
    DataSet,
    format_cell,
    load_cells,
    markdown,
    parse_data,
    with_corpora,
)
from jax_ragrl.evaluation.table import TableSettings
from jax_ragrl.models.by_name import local_model
from jax_ragrl.run.checkpoint_name import RunCheckpoint
from jax_ragrl.runtime.jsonl import write_rows
from tests.jobs import config_values
from tests.llm.server import serving
from tests.retrieval.engine import engine, pages

TINY_BERT = pathlib.Path(__file__).parents[1] / "models" / "tiny_bert"
COSTS = dict.fromkeys(
    ("llm_prompt_tokens", "llm_completion_tokens", "policy_tokens", "policy_calls"), 2.0
) | {"retrieval_calls": 1.5, "llm_calls": 3.0}
CELL = {"questions": 4, "f1": 12.34, "em": 0.0, "cover_em": 25.0, "ended": {}, "costs": COSTS}
CELL_TEXT = "12.3 / 0.0 / 25.0; 1.5 / 5 / 6"


def test_a_cell_shows_scores_costs_and_failures_of_a_named_set():
    assert format_cell(CELL) == CELL_TEXT
    assert format_cell(CELL | {"ended": {"failed": 1}}) == f"{CELL_TEXT} (1 failed)"
    unjudged = f"{CELL_TEXT} (2 without a verdict of the judge)"
    assert format_cell(CELL | {"unjudged": 2}) == unjudged
    assert format_cell({"error": "OSError: down"}) == "error" and format_cell(None) == "…"
    path = pathlib.Path("d/e.json.gz")
    assert parse_data("d/e.json.gz") == DataSet("e", path)
    assert parse_data("x=d/e.json.gz@c") == DataSet("x", path, pathlib.Path("c"))
    assert parse_data("d/popqa/test.jsonl").name == "popqa"
    with pytest.raises(UserError, match="'=e.json' names no set: give NAME=QUESTIONS"):
        parse_data("=e.json")


def test_rows_are_compared_with_the_first_one_question_by_question():
    better = {"f1": [1.0, None, 0.5, 1.0, 1.0], "em": [1.0, 1.0, 1.0, 1.0, None]}
    base = {"f1": [0.0, 0.0, 0.5, None, 0.0], "em": [1.0, 1.0, 1.0, 1.0, 1.0]}
    limits = {"f1": [10.0, 90.0], "em": [0.0, 45.93], "cover_em": [0.0, 1.0]}
    cells = {
        ("a", "x"): {**CELL, "by_question": base, "ci95": limits},
        ("a", "y"): {**CELL, "by_question": better},
        ("a", "z"): {"error": "OSError: down"},
        ("b", "y"): {**CELL, "by_question": better},  # without a baseline yet
    }
    page = markdown(["x", "y", "z"], ["a", "b"], cells)
    assert "| x | [10.0, 90.0] / [0.0, 45.9] / [0.0, 1.0] |  |\n" in page
    head, _, rows = page.partition("minus that of x on the same questions")
    # Equal pairs have an interval too: 4 equal ones allow 60 % of others.
    assert "\n| y | +66.7 [+0.0, +100.0] / +0.0 [-60.2, +60.2] |  |\n| z |  |  |\n" in rows
    assert "minus" not in markdown(["x"], ["a"], cells)


def test_failed_and_truncated_cells_are_removed(tmp_path):
    file = tmp_path / "rows.jsonl"
    good, bad = ({"data": "a", "system": name} for name in "xy")
    file.write_text(json.dumps(good) + "\n" + json.dumps(bad | {"error": "e"}) + '\n{"data": "a')
    assert set(load_cells(file)) == {("a", "x")} and file.read_text() == json.dumps(good) + "\n"
    assert load_cells(tmp_path / "none") == {}


@pytest.fixture
def sets(tmp_path):
    corpus = [{"id": str(i), "title": f"t{i}", "text": f"{w} is here"} for i, w in enumerate("xyz")]
    write_rows(tmp_path / "corpus.jsonl", corpus)
    questions = [{"id": w, "question": f"where is {w}", "golden_answers": [w]} for w in "xyz"]
    write_rows(tmp_path / "one.jsonl", questions)
    write_rows(tmp_path / "two.jsonl", questions[:2])
    return tmp_path


def test_a_set_without_passages_needs_a_shared_corpus(sets):
    data, corpus = parse_data(str(sets / "one.jsonl")), sets / "corpus.jsonl"
    settings = TableSettings(corpus, None, None, ("direct",), "tiny", "tiny", "tiny", 2, 0)
    assert with_corpora(settings, [data])[0].corpus == corpus
    own = data._replace(corpus=sets / "own.jsonl")
    assert with_corpora(settings, [own]) == [own]
    with pytest.raises(UserError, match="one.jsonl holds no passages.*@CORPUS.*--corpus"):
        with_corpora(settings._replace(corpus=None), [data])
    with pytest.raises(UserError, match="two sets are called 'one'"):
        with_corpora(settings, [data, data])


def run(sets, address: str, *systems: str, **options: str) -> int:
    """The exit code of `ragrl evaluate` on both sets with a language model at `address`."""
    data = [f"{sets}/one.jsonl", f"{sets}/two.jsonl"]
    args = ["--corpus", f"{sets}/corpus.jsonl", "--llm", f"openai:m@{address}", "--style", "full"]
    args += ["--systems", ",".join(systems), "--top-k", "2", "--workdir", f"{sets}/table"]
    args += ["--no-cache"]  # the tests count requests
    args += [part for name, value in options.items() for part in (f"--{name}", value)]
    return main(["evaluate", *args, "--data", *data])


def test_a_failed_cell_is_retried_and_affects_no_other(sets, capsys, monkeypatch):
    original, is_broken = table.system_result, [True]

    def system_result(name, context, models, questions):
        if name == "standard_rag" and len(questions) == 2 and is_broken[0]:
            raise RuntimeError("down")
        return original(name, context, models, questions)

    monkeypatch.setattr(table, "system_result", system_result)
    with serving(lambda body: "True, x") as (address, requests):
        assert run(sets, address, "direct", "standard_rag", judge=f"openai:m@{address}") == 0
        page = capsys.readouterr().out
        assert "- standard_rag on two: RuntimeError: down" in page
        assert "| standard_rag |" in page and "| error |" in page
        lines = (sets / "table" / "rows.jsonl").read_text().splitlines()
        cells = {(row["data"], row["system"]): row for row in map(json.loads, lines)}
        assert cells["one", "direct"]["judge"] == 100.0
        assert cells["one", "direct"]["cover_em"] == pytest.approx(33.33)
        assert cells["two", "direct"]["ci95"]["judge"] == [15.81, 100.0]  # exact, of two
        is_broken[0], before = False, len(requests)
        assert run(sets, address, "direct", "standard_rag", judge=f"openai:m@{address}") == 0
        page = capsys.readouterr().out
        assert "error" not in page
        assert len(requests) == before + 4  # two answers and their verdicts
        assert (sets / "table" / "table.md").read_text() == page.removesuffix("\n")
        # Another table needs another folder.
        assert run(sets, address, "direct", judge="") == 2


@pytest.fixture
def table_of(sets, monkeypatch):
    """Returns the exit code of `ragrl evaluate --data` with stubs for models and systems."""
    models = types.SimpleNamespace(llm=None, tokenizer=types.SimpleNamespace(count=len))
    monkeypatch.setattr(suite, "load_models", lambda settings: models)
    monkeypatch.setattr(suite, "evaluate_row", lambda *inputs: {**CELL, "ended": {"answered": 3}})
    monkeypatch.chdir(sets)
    write_rows(sets / "other.jsonl", [{"id": "1", "title": "", "text": "nothing"}])
    return lambda *args: main(["evaluate", "--workdir", "table", "--data", *args])


def test_cells_of_another_corpus_are_refused(table_of, sets, capsys):
    assert table_of("s=one.jsonl@corpus.jsonl", "--systems", "direct") == 0
    assert table_of("s=one.jsonl@other.jsonl", "--systems", "direct,ircot") == 2
    message = capsys.readouterr().err
    assert "cells of 's' with another corpus or index than other.jsonl" in message
    assert "--data NAME=FILE" in message and "--workdir" in message
    (row,) = map(json.loads, (sets / "table" / "rows.jsonl").read_text().splitlines())
    assert row["system"] == "direct"
    # A copy has the same passages.
    shutil.copy(sets / "corpus.jsonl", sets / "copy.jsonl")
    assert table_of("s=one.jsonl@copy.jsonl", "--systems", "direct,ircot") == 0
    assert table_of("t=one.jsonl@other.jsonl", "--systems", "direct") == 0


def test_cells_of_another_index_are_refused(table_of, sets, capsys):
    for kind in ("bm25", "exact"):
        assert (
            main(["data", "index", "--corpus", "corpus.jsonl", "--out", kind, "--kind", kind]) == 0
        )
    assert table_of("one.jsonl", "--index", "bm25", "--systems", "direct") == 0
    assert table_of("one.jsonl", "--index", "bm25", "--systems", "direct,ircot") == 0
    assert table_of("one.jsonl", "--index", "exact", "--systems", "direct") == 2
    assert "with another corpus or index than exact" in capsys.readouterr().err


def test_cells_of_other_gold_passages_are_refused(table_of, sets, capsys):
    """Of the questions to answer, whose retrieval is measured, and of those to learn from."""
    args = ["s=one.jsonl@corpus.jsonl", "--systems", "direct,skr_knn", "--train", "train.jsonl"]
    rows = list(map(json.loads, (sets / "one.jsonl").open()))
    write_rows(sets / "train.jsonl", rows)
    assert table_of(*args) == 0
    for name in ("train", "one"):
        write_rows(sets / f"{name}.jsonl", [row | {"metadata": {"gold": ["0"]}} for row in rows])
        assert table_of(*args) == 2
        assert re.search(f"other .*questions than .*{name}.jsonl", capsys.readouterr().err)
        write_rows(sets / f"{name}.jsonl", rows)


def test_cells_of_other_questions_are_refused(table_of, sets, capsys):
    """To train on or to answer; without --train nothing is known of the former."""
    args = ["s=one.jsonl@corpus.jsonl", "--systems", "direct,skr_knn"]
    assert table_of(*args, "--train", "one.jsonl") == 0
    assert table_of(*args) == 0 and table_of(*args, "--train", "one.jsonl") == 0
    assert table_of(*args, "--train", "two.jsonl") == 2
    assert "other training questions than --train two.jsonl" in capsys.readouterr().err
    row = {"id": "z", "question": "where is z", "golden_answers": ["z"]}
    write_rows(sets / "one.jsonl", [row])
    assert table_of(*args) == 2
    message = capsys.readouterr().err
    assert "cells of 's' with other questions than one.jsonl" in message and "NAME=FILE" in message


def test_a_run_with_another_checkpoint_is_evaluated_again(table_of, sets, capsys, monkeypatch):
    save_config(sets / "run" / "config.json", config_values("tiny/c3po"))
    sums = {1: 7}  # by step

    def open_run(run):
        step = int(run.name) if run.name.isdecimal() else max(sums)
        if step not in sums:
            raise UserError("a run in training deletes older checkpoints")
        return types.SimpleNamespace(meta=lambda step: {"checksums": {"w": sums[step]}}), step

    monkeypatch.setattr(RunCheckpoint, "open", open_run)
    args = ["s=one.jsonl@corpus.jsonl", "--systems", "direct", "--run", "run", "run@1"]
    assert table_of(*args) == 0
    # Trained further, and then once more from the start in the same folder.
    for step_sums, now in (({2: 8}, "that of step 2"), ({2: 9}, "another one of that step")):
        sums = step_sums
        capsys.readouterr()
        assert table_of(*args) == 0
        (line,) = [x for x in capsys.readouterr().err.splitlines() if "evaluated on s again" in x]
        assert line.startswith("ragrl: run:run is") and line.endswith(now)
    rows = map(json.loads, (sets / "table" / "rows.jsonl").read_text().splitlines())
    checkpoints = {row["system"]: row.get("checkpoint") for row in rows}
    assert checkpoints == {"direct": None, "run:run@1": 1, "run:run": 2}


def test_cells_of_other_weights_under_the_same_name_are_refused(table_of, sets, capsys):
    shutil.copytree(local_model("tiny"), sets / "mine")
    (weights,) = (sets / "mine").glob("*.safetensors")
    weights.chmod(0o644)
    args = ["s=one.jsonl@corpus.jsonl", "--llm", "mine", "--systems"]
    assert table_of(*args, "direct") == 0 and table_of(*args, "direct,ircot") == 0
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert table_of(*args, "direct,self_rag") == 2
    assert "weights" in capsys.readouterr().err


def test_cells_of_a_pipeline_of_other_weights_under_the_same_name_are_refused(
    table_of, sets, capsys
):
    shutil.copytree(TINY_BERT, sets / "encoder")
    build = ["data", "index", "--corpus=corpus.jsonl", "--retrievers=bm25,encoder", "--out=index"]
    args = ["s=one.jsonl@corpus.jsonl", "--corpus=corpus.jsonl", "--index=index", "--systems"]
    assert main(build) == table_of(*args, "direct") == table_of(*args, "direct,ircot") == 0
    weights = sets / "encoder" / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    shutil.rmtree(sets / "index")
    assert main(build) == 0
    assert table_of(*args, "direct,self_rag") == 2
    assert "another corpus or index than index" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "file"),
    [
        (["--llm=world:w"], "w/world.json"),
        (["--policy=openai:m@http://x", "--examples=demos.jsonl"], "demos.jsonl"),
    ],
)
def test_cells_of_other_files_under_the_same_name_are_refused(args, file, table_of, sets, capsys):
    (sets / file).parent.mkdir(exist_ok=True)
    call = ["s=one.jsonl@corpus.jsonl", *args, "--systems"]
    for text, names, code in (("1", "direct", 0), ("1", "direct,ircot", 0), ("2", "self_rag", 2)):
        (sets / file).write_text(text)
        assert table_of(*call, names) == code
    assert "files" in capsys.readouterr().err


def test_two_systems_do_not_write_one_file(table_of, sets, capsys):
    for folder in ("a/b", "a_b"):
        save_config(sets / folder / "config.json", config_values("tiny/c3po"))
    args = ["s=one.jsonl@corpus.jsonl", "--systems=direct", "--run", "a/b", "a_b"]
    assert table_of(*args, "--predictions=out") == 2
    assert "run:a/b and run:a_b would have one name" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    "option, broken, code",
    [
        ("--questions", "one question", 0),
        ("--questions", "every question of one system", 0),
        ("--questions", "one system", 0),
        ("--questions", "every question", 2),
        ("--data", "one question", 0),
        ("--data", "every system", 2),
    ],
)
def test_failures_leave_the_rest_of_a_table(option, broken, code, sets, capsys, monkeypatch):
    monkeypatch.chdir(sets)
    original, current = table.build_system, []

    def build_system(name, context, models):
        current.append(name)
        if broken == "every system" or (broken == "one system" and name == "direct"):
            raise UserError("the folder is missing")
        return original(name, context, models)

    def reply(body):
        is_direct, text = current[-1] == "direct", str(body["messages"])
        fails = {
            "one question": is_direct and "where is x" in text,
            "every question of one system": is_direct,
            "every question": True,
        }
        return 401 if fails.get(broken) else "x"

    monkeypatch.setattr(table, "build_system", build_system)
    assert main(["data", "index", "--corpus", "corpus.jsonl", "--out", "index"]) == 0
    args = ["--systems", "direct,standard_rag", "--index", "index", "--style", "full"]
    args += [option, "one.jsonl", *(["--out", "t.json"] if option == "--questions" else [])]
    capsys.readouterr()
    with serving(reply) as (address, _):
        assert main(["evaluate", *args, "--llm", f"openai:m@{address}", "--no-cache"]) == code
    page, message = capsys.readouterr()
    reason = "status 401" if "question" in broken else "the folder is missing"
    expected = {
        "one question": ("1 of 3 questions failed and are left out", "(1 failed)"),
        "every question of one system": ("every question failed", "| direct | error |"),
        "one system": ("- direct on one: UserError", "| direct | error |"),
        "every question": ("every question failed", "| standard_rag | error |"),
        "every system": ("UserError", "| standard_rag | error |"),
    }
    assert all(text in page for text in (*expected[broken], reason))
    assert ("run the same command again" in message) == (code == 2)
    assert [line for line in message.splitlines() if "Traceback" in line] == []
    if option == "--questions":
        rows = json.loads((sets / "t.json").read_text())
        assert reason in (rows["direct"].get("error") or rows["direct"]["failed_with"])
        assert ("error" in rows["standard_rag"]) == (code == 2)
        assert not any("by_question" in row for row in (rows["direct"], rows["standard_rag"]))
        assert ("difference" in rows["standard_rag"]) == (broken == "one question")
    assert ("minus that of direct" in page) == (broken == "one question")


def test_finished_rows_survive_an_interruption(sets, capsys, monkeypatch):
    monkeypatch.chdir(sets)
    original = table.system_result

    def system_result(name, *arguments):
        if name == "standard_rag":
            raise KeyboardInterrupt
        return original(name, *arguments)

    monkeypatch.setattr(table, "system_result", system_result)
    assert main(["data", "index", "--corpus", "corpus.jsonl", "--out", "index"]) == 0
    args = ["--systems", "direct,standard_rag", "--index", "index", "--out", "t.json"]
    with serving(lambda body: "x") as (address, _):
        args += ["--questions", "one.jsonl", "--llm", f"openai:m@{address}", "--style", "full"]
        assert main(["evaluate", *args]) == 130
    assert "direct" in json.loads((sets / "t.json").read_text())


def test_a_table_without_cells_accepts_other_settings(sets, capsys):
    with serving(lambda body: "x") as (address, _):
        assert run(sets, address, "direct", encoder="nowhere") == 2
        assert "give the folder of a text encoder" in capsys.readouterr().out
        assert run(sets, address, "direct") == 0
        assert "error" not in capsys.readouterr().out
        assert run(sets, address, "direct", encoder="nowhere") == 2


def test_web_searches_serve_all_sets_and_are_cached(sets, capsys):
    reader = serving(lambda body: body["messages"][-1]["content"].partition("Question:")[0])
    with reader as (address, _), engine(pages) as (web, requests):
        args = ["--llm", f"openai:m@{address}", "--style", "full", "--workdir", f"{sets}/table"]
        args += ["--systems", "standard_rag", "--retriever", f"searxng@{web}", "--data"]
        assert main(["evaluate", *args, f"{sets}/one.jsonl", f"{sets}/two.jsonl"]) == 0
        assert len({(request["q"], request["pageno"]) for request in requests}) == len(requests) > 0
    (cache,) = (sets / "table" / "searches").iterdir()
    assert cache.name == "searxng-0.jsonl" and "error" not in capsys.readouterr().out
    row = json.loads((sets / "table" / "rows.jsonl").read_text().splitlines()[0])
    assert row["costs"]["passages"] == 5.0 and row["cover_em"] == 100.0  # the query is in its hits


def test_replies_from_the_cache_are_named_so_that_they_hide_no_server_that_is_away(sets, capsys):
    with serving(lambda body: "x") as (address, requests):
        shared = ["--llm", f"openai:m@{address}", "--retriever", "http://127.0.0.1:1"]
        args = ["evaluate", "--systems", "direct", "--questions", f"{sets}/one.jsonl", *shared]
        assert main([*args, "--out", f"{sets}/t.json", "--json"]) == 0
        assert "from llm_cache.sqlite" not in capsys.readouterr().err
    # The server has stopped.
    assert main([*args, "--out", f"{sets}/t.json", "--json"]) == 0
    output = capsys.readouterr()
    assert f"{len(requests)} replies of language models came from llm_cache.sqlite" in output.err
    assert json.loads(output.out)["direct"]["cover_em"] == pytest.approx(33.33)


def test_the_shared_index_is_recognized_by_its_resolved_path(sets, monkeypatch):
    monkeypatch.chdir(sets)
    monkeypatch.setattr(suite, "open_retriever", lambda settings: "the given index")
    monkeypatch.setattr(suite, "build_context", lambda settings, models, retriever: retriever)
    description = {"corpus": "its passages", "kind": "exact"}
    monkeypatch.setattr(suite, "read_description", lambda folder: description)
    corpus, index = pathlib.Path("corpus.jsonl"), pathlib.Path("index")
    settings = TableSettings(corpus, None, index, ("direct",), "tiny", "tiny", "tiny", 2, 0)
    data = DataSet("one", sets / "one.jsonl", sets / "corpus.jsonl")
    open_set_retriever = suite._retriever_opener(settings, sets / "table", "hashed")
    open_set = suite._open_set(settings, data, None, open_set_retriever, sets / "table")
    assert open_set.context == "the given index" and set(open_set.passages) == {"index"}
