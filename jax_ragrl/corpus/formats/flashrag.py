"""FlashRAG's JSONL, which Search-R1 shares: questions and passages.

Jin et al. 2024: questions `{id, question, golden_answers, metadata}`; passages `{id, contents}`
with contents = '"title"\\ntext'. What `Question` knows beyond that travels in the metadata under
the names `gold, steps, hops, kind`.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax_ragrl.corpus.formats.files import Record, field, read_records, strings, unique
from jax_ragrl.errors import UserError
from jax_ragrl.types import Passage, Question

EXTRA = ("gold", "steps", "hops", "kind")


def split_contents(contents: str) -> tuple[str, str]:
    """(title, text) of '"title"\\ntext'; one line alone is all text."""
    title, newline, text = contents.partition("\n")
    if not newline:
        return "", contents.strip()
    title = title.strip()
    if len(title) >= 2 and title[0] == title[-1] == '"':
        title = title[1:-1]
    return title, text.strip()


def _texts(value: Any) -> tuple[str, ...]:
    """A list of strings as a tuple; anything else is nothing."""
    listed = isinstance(value, (list, tuple)) and all(isinstance(x, str) for x in value)
    return tuple(value) if listed else ()


def _fact_titles(metadata: Mapping[str, Any]) -> tuple[str, ...]:
    """The articles of the supporting facts, as FlashRAG's HotpotQA and 2WikiMultiHopQA have them.

    Each is a hop (see `hotpotqa.py`).
    """
    facts = metadata.get("supporting_facts")
    return unique(_texts(facts.get("title"))) if isinstance(facts, dict) else ()


def _gold(metadata: Mapping[str, Any]) -> tuple[str, ...]:
    """Gold names as this library, other samples or FlashRAG store them."""
    stored = metadata.get("gold", metadata.get("gold_titles", _fact_titles(metadata)))
    return unique(_texts(stored))


def _question(record: Record, number: int) -> Question:
    metadata = record.fields.get("metadata") or {}
    if not isinstance(metadata, dict):
        raise UserError(f"{record.place}: field 'metadata' is not an object: rewrite it as one")
    hops = metadata.get("hops", len(_fact_titles(metadata)))
    return Question(
        id=str(record.fields.get("id", number)),
        text=field(record, "question", str),
        answers=strings(record, "golden_answers"),
        gold=_gold(metadata),
        steps=_texts(metadata.get("steps")),
        hops=hops if isinstance(hops, int) else 0,
        kind=str(metadata.get("kind", metadata.get("type", ""))),
        metadata={name: value for name, value in metadata.items() if name not in EXTRA},
    )


def read_flashrag_questions(path: pathlib.Path | str) -> tuple[list[Question], list[Passage]]:
    """Questions; one without an id is named by its position."""
    return [_question(record, n) for n, record in enumerate(read_records(path))], []


def _passage(record: Record) -> Passage:
    title, text = split_contents(field(record, "contents", str))
    return Passage(str(field(record, "id", object)), title, text)


def read_flashrag_passages(path: pathlib.Path | str) -> tuple[list[Question], Iterator[Passage]]:
    """Passages one by one, their title split off the contents."""
    return [], map(_passage, read_records(path))


def _record(question: Question) -> dict[str, Any]:
    taken = [name for name in EXTRA if name in question.metadata]
    if taken:
        raise UserError(
            f"question {question.id!r}: metadata already has {', '.join(taken)}, the names under "
            "which FlashRAG files carry the question's own fields: rename them"
        )
    # Empty ones are written too: without them a reader would fall back on foreign names.
    extra = {name: getattr(question, name) for name in EXTRA}
    return {
        "id": question.id,
        "question": question.text,
        "golden_answers": list(question.answers),
        "metadata": {**question.metadata, **extra},
    }


def save_questions(questions: Sequence[Question], path: pathlib.Path | str) -> None:
    """Writes FlashRAG JSONL that `read_flashrag_questions` reads back equal.

    Raises:
      UserError: a question's metadata uses one of the names `gold, steps, hops, kind`.
    """
    lines = [json.dumps(_record(question)) + "\n" for question in questions]
    pathlib.Path(path).write_bytes("".join(lines).encode("ascii"))
