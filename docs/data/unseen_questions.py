"""Divides `nq:train`, so that 400 of its questions test a schedule that `nq:test` helped to choose.

    git checkout 64b51a72                # the last commit with configs/smollm2
    python docs/data/unseen_questions.py runs/unseen
    ragrl train --config=configs/smollm2/opera.py --workdir=runs/opera-1 --config.seed=1 \
        --config.policy=runs/warm/checkpoint \
        --config.data.files.train=runs/unseen/train.jsonl \
        --config.data.files.test=runs/unseen/test.jsonl

The 400 are the last ones that the former training, with seed 0, neither had labels of for its warm
start nor trained on: no choice of a schedule has seen them.
"""

from __future__ import annotations

import gzip
import json
import pathlib
import sys

from jax_ragrl.corpus.data_path import data_path
from jax_ragrl.corpus.mixture import load_answered
from jax_ragrl.corpus.questions import QuestionStream

TRAIN = data_path("nq:train")
LABELS, STEPS, QUESTIONS_PER_STEP, TEST = 300, 32, 8, 400


def unseen_ids() -> list[str]:
    """The ids of the 400 questions, in the order of the file."""
    questions = load_answered(TRAIN)
    drawn = QuestionStream(questions, seed=0).draw(STEPS * QUESTIONS_PER_STEP)
    former = [*questions[:LABELS], *drawn]
    former_ids = {question.id for question in former}
    return [question.id for question in questions if question.id not in former_ids][-TEST:]


def main(folder: pathlib.Path) -> None:
    """Writes `train.jsonl` and `test.jsonl` to a folder."""
    ids = frozenset(unseen_ids())
    lines = gzip.decompress(TRAIN.read_bytes()).splitlines(keepends=True)
    parts: dict[str, list[bytes]] = {"train": [], "test": []}
    for line in lines:
        parts["test" if json.loads(line)["id"] in ids else "train"].append(line)
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in parts.items():
        (folder / f"{name}.jsonl").write_bytes(b"".join(part))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
