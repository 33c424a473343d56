"""Laws of predictions on disk and of the explorer that shows them."""

import base64
import hashlib
import json
import pathlib
import re
import shutil
import subprocess
import warnings

import pytest

from jax_ragrl.cli.main import main
from jax_ragrl.errors import EffectError, UserError
from jax_ragrl.report import explorer
from jax_ragrl.report.explorer import build_explorer, explorer_page, merge, prediction_files, render
from jax_ragrl.report.trees import stored_trees
from jax_ragrl.run.evaluate import evaluate
from jax_ragrl.run.predictions import prediction_rows, write_predictions
from jax_ragrl.systems.baselines.standard import StandardRAG
from jax_ragrl.systems.c3po import C3PO
from tests.rollout.tape import ANN, BOB, Tape

ATTACK = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"


def rows(reply: str = "Ulm") -> list[dict]:
    """Predictions for two questions; the environment fails on the second one."""
    down = EffectError("down")
    tape = Tape({}, replies={"answer": lambda r: down if "Bob" in str(r.messages) else reply})
    result = evaluate(StandardRAG("c3po_tiny", 2), [ANN, BOB], tape.environment())
    return list(prediction_rows([ANN, BOB], result))


def test_a_prediction_has_answer_scores_passages_and_trace():
    ann, bob = rows()
    assert (ann["id"], ann["question"], ann["gold"]) == (ANN.id, ANN.text, list(ANN.answers))
    assert ann["answer"] == "Ulm" and ann["finish_reason"] == "answered" and not ann["faults"]
    assert set(ann["scores"]) >= {"em", "f1", "cover_em"}
    assert len(ann["passages"]) == 2 and ann["passages"][0]["text"]
    assert [step["role"] for step in ann["steps"]] == ["search", "answer"]
    assert bob["finish_reason"] == "failed" and bob["faults"] == ["down"] and not bob["steps"]


def test_predictions_are_json_without_nan(tmp_path: pathlib.Path):
    tape = Tape({}, replies={"answer": EffectError("down")})
    result = evaluate(StandardRAG("c3po_tiny", 2), [ANN], tape.environment())
    write_predictions(tmp_path, "run:a/b c", [ANN], result)
    (file,) = (tmp_path / "predictions").iterdir()
    assert file.name == "run_a_b_c.jsonl"
    assert json.loads(file.read_text())["scores"]["f1"] is None  # json.loads would accept NaN too
    assert "NaN" not in file.read_text()


def test_predictions_of_equal_questions_are_merged_and_passages_are_stored_once():
    data = merge({"before": rows("Rome"), "after": rows("Ulm")})
    assert data["sources"] == ["before", "after"] and len(data["questions"]) == 2
    ann = data["questions"][0]
    assert [(n, row["answer"]) for n, row in ann["rows"]] == [(0, "Rome"), (1, "Ulm")]
    assert len(data["passages"]) == 2
    assert [row["mistake"] for _, row in ann["rows"]] == ["wrong", ""]
    assert ann["rows"][0][1]["passages"] == ann["rows"][1][1]["passages"] == [0, 1]
    apart = merge({"a": rows()[:1], "b": rows()[1:]})
    assert [[n for n, _ in question["rows"]] for question in apart["questions"]] == [[0], [1]]


def test_texts_of_models_cannot_end_the_data_or_run_as_script():
    page = render(merge({ATTACK: rows(ATTACK)}))
    scripts = re.findall(r"<script[^>]*>(.*?)</script>", page, re.DOTALL)
    assert len(scripts) == 2 and page.count("<script") == 2 and "<img" not in page
    assert json.loads(scripts[0])["sources"] == [ATTACK]
    # The policy of the page names the hash of its only script.
    digest = base64.b64encode(hashlib.sha256(scripts[1].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in page and "default-src 'none'" in page
    assert "innerHTML" not in scripts[1] and not re.search(r"https?://", page)


def write_rows(*files: pathlib.Path) -> None:
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(json.dumps(row) + "\n" for row in rows()))


def labels_of(page: str) -> list[str]:
    return json.loads(page.partition('"sources":')[2].partition("]")[0] + "]")


def test_sources_of_equal_names_are_distinguished_by_their_parents(tmp_path, monkeypatch):
    """Labels are keys: of two sources with one label, the page would show the second alone."""
    runs = [tmp_path / name for name in ("base/c3po-0", "new/c3po-0", "opera-0")]
    files = [tmp_path / name for name in ("base/eval.jsonl", "new/eval.jsonl")]
    write_rows(*(run / "predictions" / "trained.jsonl" for run in runs), *files)
    ends = ["base/c3po-0/trained", "new/c3po-0/trained", "opera-0/trained"]
    assert labels_of(explorer_page(runs)) == ends
    assert labels_of(explorer_page(files)) == ["base/eval", "new/eval"]
    monkeypatch.chdir(runs[0])  # the folder of the shell has a name, too
    assert labels_of(explorer_page([pathlib.Path(), runs[1]])) == ends[:2]
    write_rows(runs[2] / "nq" / "predictions" / "direct.jsonl")
    assert [x for x, _ in prediction_files(runs[2])] == ["nq/direct", "trained"]


@pytest.mark.parametrize("text", ["", '{"id": "a", "question": "Who?"}\n', "{\n}\n", None])
def test_a_place_without_predictions_names_the_commands_that_write_them(
    text: str | None, tmp_path: pathlib.Path
):
    place = tmp_path if text is None else tmp_path / "questions.jsonl"
    if text is not None:
        place.write_text(text)
    with pytest.raises(UserError, match=r"holds no predictions.*'ragrl evaluate --predictions"):
        build_explorer([place], tmp_path / "explorer.html")


ROOT = {"parent": None, "role": "router", "prompt": "P"}
NODES = [
    ROOT | {"id": 3, "text": "[Planning]", "credit": 0.75},
    ROOT | {"id": 4, "text": "?", "why": "Invalid Format"},
    {"id": 5, "parent": 3, "role": "leaf", "answer": "Ulm", "reward": 1.0, "why": "answered"},
    {"id": 6, "parent": 4, "role": "leaf", "reward": 0.0, "why": "Invalid Format"},
]
PASSAGE = {"title": "T", "text": "text", "kept": True}


def tree_rows() -> list[dict]:
    """Two stored trees; the leaves of the first differ."""
    agree = [{**NODES[0], "credit": 0.25, "passages": [PASSAGE]}, {**NODES[2], "answer": ATTACK}]
    first, second = ({"answers": ["Ulm"], "hops": 1, "nodes": nodes} for nodes in (NODES, agree))
    return [{"step": 1, "trees": [{**second, "question": "Where?"}]},
            {"step": 2, "trees": [{**first, "question": "Who?"}]}]  # fmt: skip


def test_a_page_has_every_stored_tree_and_the_sentence_of_each_fault():
    data = merge({"a": rows()}, {"run": stored_trees(tree_rows())})
    assert [(t["question"], t["spread"], t["credit"]) for t in data["trees"]] == [
        ("Who?", 1.0, 0.75),
        ("Where?", 0.0, 0.25),
    ]
    # Siblings share their prompt, and trees and predictions their passages.
    prompts = [n.get("prompt") for n in data["trees"][0]["nodes"]]
    assert data["texts"] == ["P"] and prompts == [0, 0, None, None]
    (number,) = data["trees"][1]["nodes"][0]["passages"]
    assert data["passages"][number] == ["", "T", "text"]
    assert data["faults"] == {"Invalid Format": C3PO.FAULTS["Invalid Format"]}


def test_a_run_without_an_evaluation_has_an_explorer_of_its_trees_and_lost_metrics_are_named(
    tmp_path, capsys
):
    (tmp_path / "trees.jsonl").write_text("".join(json.dumps(row) + "\n" for row in tree_rows()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a table has no metrics, and no checkpoints
        assert main(["report", str(tmp_path)]) == 0
    assert "explorer.html" in capsys.readouterr().out
    assert '"question":"Who?"' in (tmp_path / "explorer.html").read_text()
    (tmp_path / "checkpoints").mkdir()
    with pytest.warns(UserWarning, match="metrics.jsonl is missing, so that there is no report"):
        assert main(["report", str(tmp_path)]) == 0
    assert "report.html" not in capsys.readouterr().out
    run, out = tmp_path / "run", tmp_path / "pages" / "of-run"  # of a run that may only be read
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 1.0}\n')
    (run / "trees.jsonl").write_bytes((tmp_path / "trees.jsonl").read_bytes())
    assert main(["report", str(run), f"--out={out}"]) == 0
    assert {x.name for x in out.iterdir()} == {"report.html", "explorer.html"}
    assert {x.name for x in run.iterdir()} == {"metrics.jsonl", "trees.jsonl"}


def test_texts_are_cut_until_the_page_is_small_enough(tmp_path, monkeypatch):
    file = tmp_path / "predictions" / "a.jsonl"
    file.parent.mkdir()
    file.write_text(json.dumps(rows("word " * 700)[0]) + "\n")
    whole = explorer_page([tmp_path])
    assert '"limit":null' in whole and "word " * 700 in whole
    monkeypatch.setattr(explorer, "MAX_BYTES", len(whole) - 1)
    page = explorer_page([tmp_path])
    assert '"limit":1500' in page and len(page) < len(whole) and "word " * 100 in page


CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)


def visible(page: pathlib.Path, filters: str) -> str:
    """The document that a browser shows, with the filters of an address."""
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    address = f"file://{page}#{filters}"
    done = subprocess.run([*command, address], capture_output=True, text=True, timeout=120)
    return done.stdout.split('<script type="application/json"')[0]


@pytest.mark.slow
@pytest.mark.skipif(not CHROMIUM, reason="no Chromium is installed")
@pytest.mark.parametrize(
    ("filters", "count"),
    [
        ("first=1", "2 of 2 questions, mean F1 100.0"),  # the failed question has no score
        ("first=1&second=0", "2 of 2 questions, mean F1 100.0 against 0.0"),
        ("first=1&second=0&outcome=better", "1 of 2 questions"),
        ("first=1&second=0&outcome=worse", "0 of 2 questions"),
        ("first=0&outcome=wrong", "1 of 2 questions, mean F1 0.0"),
        ("first=0&outcome=failed", "1 of 2 questions, mean F1 –"),
        ("first=0&outcome=mistake: wrong", "1 of 2 questions, mean F1 0.0"),
        ("first=1&outcome=mistake: wrong", "0 of 2 questions"),
        ("first=0&search=rome", "1 of 2 questions"),
        ("first=0&search=title 1", "1 of 2 questions"),
        ("first=0&search=nothing", "0 of 2 questions"),
        ("view=trees", "2 of 2 trees, rewards differ in 1"),
        ("view=trees&leaves=differ", "1 of 2 trees, rewards differ in 1"),
        ("view=trees&leaves=malformed", "1 of 2 trees"),
        ("view=trees&credit=0.3", "1 of 2 trees, rewards differ in 1"),
        ("view=trees&credit=0.8", "0 of 2 trees"),
        ("view=trees&step=1", "1 of 2 trees, rewards differ in 0"),
        ("view=trees&search=planning", "2 of 2 trees"),
    ],
)
def test_a_browser_shows_the_questions_that_match(filters: str, count: str, tmp_path: pathlib.Path):
    page = tmp_path / "explorer.html"
    trees = {ATTACK: stored_trees(tree_rows())}
    page.write_text(render(merge({ATTACK: rows("Rome"), "after": rows("Ulm")}, trees)))
    text = visible(page, filters)
    assert count in text
    # Texts of models are shown as text: no element and no script came from them.
    assert "<img" not in text and "<script>alert" not in text


@pytest.mark.slow
@pytest.mark.skipif(not CHROMIUM, reason="no Chromium is installed")
def test_a_browser_builds_only_what_it_shows(tmp_path: pathlib.Path):
    """Thousands of questions stay fast: entries come in pages, and folded texts once opened."""
    first, _ = rows()
    steps = [{"role": "answer", "prompt": "a long prompt", "reply": "Ulm"}]
    many = [{**first, "id": f"{i}", "question": f"{i}?", "steps": steps} for i in range(5000)]
    page = tmp_path / "explorer.html"
    page.write_text(render(merge({"run": many})))
    text = visible(page, "first=0")
    assert "5000 of 5000 questions" in text and "4970 more" in text
    assert text.count("<li><button>") <= 31 and "Ulm" in text
    assert "<summary>prompt</summary>" in text and "a long prompt" not in text


def test_gold_passages_are_found_by_id_title_or_file():
    passages = [
        {"id": "a.md#one", "title": "A - One", "text": "x"},
        {"id": "b.md#two", "title": "B - Two", "text": "y"},
        {"id": "c", "title": "C", "text": "z"},
    ]
    for gold, marked in ((["a.md"], [0]), (["b.md#two"], [1]), (["C", "a.md#one"], [0, 2])):
        row = {**rows()[0], "passages": passages, "gold_passages": gold}
        ((_, prediction),) = merge({"run": [row]})["questions"][0]["rows"]
        assert prediction["gold_passages"] == marked


def test_a_node_without_credit_has_a_color():
    """A missing value of a custom property makes a fill invalid, which browsers draw black."""
    page = render(merge({"run": rows()}))
    assert "var(--tone, #b9bcc4) var(--w)" in page and "var(--tone) " not in page
