"""FlashRAG's JSONL, which Search-R1 shares: questions and passages.

Jin et al. 2024: questions `{id, question, golden_answers, metadata}`; passages `{id, contents}`
with contents = '"title"\\ntext'. The other fields of `Question` are stored in the metadata under
the names `gold, steps, hops, kind`.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax_ragrl.corpus.fields import NAMES
from jax_ragrl.corpus.formats.files import (
    Record,
    Source,
    answers,
    field,
    optional_text,
    question_text,
    read_records,
    text,
    texts,
    unique,
)
from jax_ragrl.errors import UserError
from jax_ragrl.runtime.caches import draft_file
from jax_ragrl.types import Passage, Question

EXTRA = ("gold", "steps", "hops", "kind")


def split_contents(contents: str, title: str) -> tuple[str, str]:
    """Splits '"title"\\ntext' into (title, text); a single line is the text.

    A `title` that the record has in a field is the title: then the first line is text, unless it
    repeats it.
    """
    first, newline, body = contents.partition("\n")
    first = first.strip()
    # Only a pair of quotation marks is FlashRAG's own; a single one belongs to the title.
    if len(first) >= 2 and first[0] == first[-1] == '"' and first != title:
        first = first[1:-1]
    if not newline or (title and first != title.strip()):
        return title, contents.strip()
    return title or first, body.strip()


def _fact_titles(metadata: Mapping[str, Any]) -> tuple[str, ...]:
    # FlashRAG's HotpotQA and 2WikiMultiHopQA have a supporting fact, of another article, per hop.
    facts = metadata.get("supporting_facts")
    titles: Any = facts.get("title") if isinstance(facts, dict) else None
    # Metadata has no fixed form, so that values of other types are ignored.
    is_list = isinstance(titles, (list, tuple)) and all(isinstance(x, str) for x in titles)
    return unique(titles) if is_list else ()


def own_id(record: Record, default: str) -> str:
    """Returns the id of a record, under any of its usual names; the default if it has none."""
    ids = (optional_text(record, name) for name in NAMES["questions"]["id"])
    return next(filter(None, ids), default)


def id_in_source(record: Record, key: str) -> str:
    """Returns an id with the set of its record, if it names one: a merged file repeats ids."""
    source = optional_text(record, "data_source")
    return f"{source}/{key}" if source else key


def read_question(record: Record, number: int) -> Question:
    """Reads a question; without an id, the id is the position."""
    # The field may be missing, null, or an empty cell.
    metadata = field(record, "metadata", dict) if record.fields.get("metadata") else {}
    own = Record(f"{record.place}, metadata", metadata)
    # Parquet has every field in every row: null where the row has none.
    names = [name for name in ("gold", "gold_titles") if metadata.get(name) is not None]
    hops = len(_fact_titles(metadata)) if metadata.get("hops") is None else metadata["hops"]
    return Question(
        id=id_in_source(record, own_id(record, str(number))),
        text=question_text(record, "question"),
        answers=answers(record, "golden_answers"),
        gold=unique(texts(own, names[0])) if names else _fact_titles(metadata),
        steps=texts(own, "steps") if "steps" in metadata else (),
        hops=hops if isinstance(hops, int) else 0,
        kind=optional_text(own, "kind" if "kind" in metadata else "type"),
        metadata={name: value for name, value in metadata.items() if name not in EXTRA},
    )


def _passage(record: Record) -> Passage:
    title, content = split_contents(text(record, "contents"), optional_text(record, "title"))
    return Passage(text(record, "id"), title, content)


def read_passages(source: Source) -> tuple[list[Question], Iterator[Passage]]:
    """Reads passages lazily; the title is split from the contents."""
    return [], map(_passage, read_records(source))


def _record(question: Question) -> dict[str, Any]:
    conflicts = [name for name in EXTRA if name in question.metadata]
    if conflicts:
        raise UserError(
            f"question {question.id!r}: metadata has the keys {', '.join(conflicts)}, under which "
            "this format stores the question's own fields: rename them"
        )
    # Empty values are written too; otherwise a reader would fall back to FlashRAG's own keys.
    extra = {name: getattr(question, name) for name in EXTRA}
    return {
        "id": question.id,
        "question": question.text,
        "golden_answers": list(question.answers),
        "metadata": {**question.metadata, **extra},
    }


def save_questions(questions: Sequence[Question], path: pathlib.Path | str) -> None:
    """Writes FlashRAG JSON lines; `UserError` if a question's metadata has a name of `EXTRA`."""
    # Parquet has dates among the other fields of a data set.
    lines = [json.dumps(_record(question), default=str) + "\n" for question in questions]
    with draft_file(pathlib.Path(path)) as draft:
        draft.write_bytes("".join(lines).encode("ascii"))
