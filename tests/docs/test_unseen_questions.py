"""`docs/data/unseen_questions.py`: test questions that no choice of a schedule has seen."""

import json
import runpy
from pathlib import Path

from jax_ragrl.corpus.data_path import data_path
from jax_ragrl.corpus.mixture import load_answered
from jax_ragrl.corpus.questions import QuestionStream

SCRIPT = Path(__file__).parents[2] / "docs" / "data" / "unseen_questions.py"


def ids(file: Path) -> list[str]:
    return [json.loads(line)["id"] for line in file.read_text(encoding="utf-8").splitlines()]


def test_the_tested_questions_were_neither_labeled_nor_trained_on(tmp_path):
    runpy.run_path(str(SCRIPT))["main"](tmp_path)
    test, train = ids(tmp_path / "test.jsonl"), ids(tmp_path / "train.jsonl")
    questions = load_answered(data_path("nq:train"))
    assert len(test) == 400 and sorted(test + train) == sorted(q.id for q in questions)
    assert [q.id for q in questions[:300]] == train[:300]  # the labels of the warm start
    trained = {q.id for q in QuestionStream(questions, seed=0).draw(32 * 8)}
    assert len(trained) == 256 and not trained & set(test)
