"""Trials: finished ones are read, each is a row, and two arms are compared in pairs."""

import json
import types

import pytest

from jax_ragrl.corpus.questions import fingerprint
from jax_ragrl.errors import UserError
from jax_ragrl.experiments import seeds as trials
from jax_ragrl.run.config import Data, FileData, WorldData
from jax_ragrl.types import Question

SUMMARY = {
    "seed": 0,
    "gains": {"f1": {"trained": 30.25, "mean": 9.75, "ci95": [5.0, 14.5]}},
    "wall_s": 600.0,
}
JOB = types.SimpleNamespace(
    data=Data(WorldData(size=40)), run=types.SimpleNamespace(test_questions=3)
)


def test_a_finished_trial_is_read_and_the_others_run(tmp_path, monkeypatch):
    (tmp_path / "a-0").mkdir()
    (tmp_path / "a-0" / "summary.json").write_text(json.dumps(SUMMARY))
    ran = []

    def quickstart(job, workdir):
        ran.append((job, workdir.name))
        return SUMMARY | {"seed": 1}

    monkeypatch.setattr(trials, "quickstart", quickstart)
    load = lambda system, seed, policy, workdir: (system, seed, policy)  # noqa: E731

    def warm(folder):
        folder.mkdir(parents=True)
        warmed.append(folder.name)
        return {"step": 1}

    warmed = []
    text = trials.run_trials(["a", "b"], [0, 1], load, {"b": warm}, tmp_path)
    start = str(tmp_path / "b-warm" / "checkpoint")
    assert ran == [(("a", 1, ""), "a-1"), (("b", 0, start), "b-0"), (("b", 1, start), "b-1")]
    trials.run_trials(["b"], [0], load, {"b": warm}, tmp_path)
    assert warmed == ["b-warm"]  # a finished warm-up is not repeated
    assert text.splitlines() == [
        "| system | seed | warm start F1 | trained F1 | gain | 95 % | wall s |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| a | 0 | 20.5 | 30.25 | 9.75 | 5.0 to 14.5 | 600.0 |",
        *(f"| {z} | 1 | 20.5 | 30.25 | 9.75 | 5.0 to 14.5 | 600.0 |" for z in "abb"),
    ]


def test_a_trial_of_which_no_question_was_answered_is_a_row_too():
    none = {"trained": None, "mean": None, "ci95": [None, None], "pairs": 0}
    assert trials.row("a", SUMMARY | {"gains": {"f1": none}}) == (
        *("a", 0, None, None, None, "None to None", 600.0),
    )


def keep(folder, *scores, job=JOB):
    """What a finished trial leaves."""
    folder.mkdir(parents=True)
    found = {"asked": trials.held_out(job), "scores": {"f1": scores}}
    (folder / "trained.json").write_text(json.dumps(found))
    (folder / "summary.json").write_text(json.dumps(SUMMARY))


def compared(tmp_path, job=JOB):
    load = lambda system, seed, policy, workdir: job  # noqa: E731
    return trials.run_trials(["a"], [0], load, {}, tmp_path / "line", tmp_path / "tree")


@pytest.mark.parametrize("failed", [None, float("nan")])  # as it is written, and as it was
def test_arms_are_compared_question_by_question(tmp_path, failed):
    """A question whose environment failed in one of them is not compared."""
    keep(tmp_path / "line" / "a-0", 1.0, 0.5, 1.0)
    keep(tmp_path / "tree" / "a-0", 0.5, 0.0, failed)
    text = compared(tmp_path)
    assert text == (tmp_path / "line" / "trials.md").read_text(encoding="utf-8")
    head, _, line = text.splitlines()
    assert head.endswith(f"| wall s | over {tmp_path / 'tree'} |")
    assert line.endswith("| 600.0 | 50.0, 50.0 to 50.0 |")


def test_what_cannot_be_compared_is_refused_before_anything_is_trained(tmp_path, monkeypatch):
    monkeypatch.setattr(trials, "quickstart", None)
    with pytest.raises(UserError, match=r"tree/a-0 holds no finished trial.*--out .*tree"):
        compared(tmp_path)
    fewer = types.SimpleNamespace(data=JOB.data, run=types.SimpleNamespace(test_questions=2))
    keep(tmp_path / "tree" / "a-0", 0.0, 1.0, job=fewer)
    with pytest.raises(UserError, match=r"tree/a-0 was asked other held-out questions than .*line"):
        compared(tmp_path)
    keep(tmp_path / "line" / "a-0", 0.0, 1.0, 1.0)
    with pytest.raises(UserError, match=r"line/a-0 was asked other"):  # finished before
        compared(tmp_path, fewer)
    (tmp_path / "tree" / "a-0" / "trained.json").unlink()
    with pytest.raises(UserError, match=r"kept no scores: delete its summary.json"):
        compared(tmp_path, fewer)


def test_a_fingerprint_is_of_what_is_asked_in_its_order():
    questions = trials.load_data(JOB.data).questions["test"]
    prints = {fingerprint(q) for q in (questions, questions[:-1], questions[::-1])}
    assert len(prints) == 3 and fingerprint(tuple(questions)) in prints


def test_a_corpus_is_not_read_to_tell_what_is_asked(tmp_path):
    file = tmp_path / "test.jsonl"
    row = {"id": "1", "question": "who", "golden_answers": ["x"]}
    file.write_text(json.dumps(row) + "\n")
    data = Data(files=FileData(str(tmp_path / "absent"), *[str(file)] * 3))
    job = types.SimpleNamespace(data=data, run=JOB.run)
    assert trials.held_out(job) == fingerprint([Question("1", "who", ("x",))])
