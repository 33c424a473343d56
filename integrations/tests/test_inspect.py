"""Inspect AI scores a served system, and an agent that searches with the tool of a retriever."""

from __future__ import annotations

import json
import pathlib

from inspect_ai.log import list_eval_logs, read_eval_log

from jax_ragrl.types import Question
from ragrl_envs.questions import load
from serving import MIXTURE, answer, example, findable, searching_model


def write(questions: list[Question], folder: pathlib.Path) -> pathlib.Path:
    """Writes questions as `ragrl data world` does."""
    rows = [{"id": q.id, "question": q.text, "golden_answers": q.answers} for q in questions]
    file = folder / "questions.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return file


def test_a_task_scores_a_served_system(tmp_path):
    questions = load("world", "test")[:5]
    file, logs = write(questions, tmp_path), str(tmp_path)
    lines = example("inspect_task.py", file, INSPECT_LOG_DIR=logs)[-5:]
    expected = [f"{q.text} | {answer(q.text)} | {list(q.answers)} | " for q in questions]
    assert [line.rpartition("| ")[0] + "| " for line in lines] == expected
    (log,) = (read_eval_log(info) for info in list_eval_logs(logs))
    assert log.status == "success"
    assert [x.output.completion for x in log.samples] == [answer(q.text) for q in questions]


def test_an_agent_searches_with_the_tool_of_a_retriever(tmp_path):
    questions = load("mixture", "dev")[:2]
    golds = {q.text: q.answers[0] for q in questions}
    with searching_model(golds) as model:
        example(
            "inspect_agent.py",
            write(questions, tmp_path),
            RAGRL_URL=MIXTURE,
            INSPECT_LOG_DIR=str(tmp_path),
            INSPECT_EVAL_MODEL="openai-api/scripted/searching",
            SCRIPTED_BASE_URL=model,
            SCRIPTED_API_KEY="none",
        )
    (log,) = (read_eval_log(info) for info in list_eval_logs(str(tmp_path)))
    found = findable(golds, MIXTURE)
    assert sorted(found) == [0.0, 1.0]
    scores = {sample.input: sample.scores["f1"].value for sample in log.samples}
    assert [scores[text] for text in golds] == found
