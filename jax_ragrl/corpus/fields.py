"""The names of fields in files of one's own, see `corpus.formats.own`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from jax_ragrl.errors import UserError

# The names of each field in common use, the most usual first.
NAMES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "questions": {
        "question": ("question", "query", "input"),
        "answer": ("answer", "answers", "golden_answers", "output"),
        "id": ("id", "_id", "qid", "question_id", "query_id"),
        "gold": ("gold", "gold_ids", "gold_titles"),
    },
    "passages": {
        "text": ("text", "contents", "content", "body", "passage"),
        "title": ("title",),
        "id": ("id", "_id", "doc_id", "docid", "passage_id"),
    },
}
FIELDS = tuple(dict.fromkeys(name for names in NAMES.values() for name in names))
NO_FIELDS: Mapping[str, str] = MappingProxyType({})


def parse_fields(text: str) -> dict[str, str]:
    """Parses `question=Q,answer=A`, names of fields in a file; `UserError` for other text."""
    pairs = [part.partition("=") for part in text.split(",") if part.strip()]
    fields = {name.strip(): value.strip() for name, _, value in pairs}
    check_fields(fields)
    return fields


def check_fields(fields: Mapping[str, str]) -> None:
    """Raises `UserError` if a mapping names an unknown field, or a field without a name."""
    for name, value in fields.items():
        if name not in FIELDS or not value:
            raise UserError(
                f"fields has {name}={value}: give FIELD=NAME, for the fields {', '.join(FIELDS)}"
            )
