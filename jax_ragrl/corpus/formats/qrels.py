"""Which passages are relevant to a query: TREC's lines, or BEIR's table.

`query iteration passage relevance` in each line, white space between and no header; or a TSV with
the columns `query-id, corpus-id, score`. What is above 0 is relevant.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jax_ragrl.corpus.formats.files import field, read_lines, read_table
from jax_ragrl.errors import UserError
from jax_ragrl.types import Question

WHOLE = re.compile(r"-?[0-9]{1,18}")


class Judgement(NamedTuple):
    """One line, and where it was found."""

    place: str
    query: str
    passage: str
    relevance: str


def read_qrels(path: pathlib.Path | str) -> dict[str, list[str]]:
    """Query id -> ids of the passages judged relevant.

    Raises:
      UserError: the file is missing or empty, or a line is not a judgement; names file and line.
    """
    _, first = next(read_lines(path), (0, ""))
    if not first:
        raise UserError(f"{path} is empty: give a file with judgements")
    gold: dict[str, dict[str, None]] = {}  # in their order, each passage once
    for found in _table(path) if "query-id" in first.split() else _lines(path):
        if not WHOLE.fullmatch(found.relevance):
            raise UserError(
                f"{found.place}: score {found.relevance!r} is not a whole number: correct it"
            )
        if int(found.relevance) > 0:
            gold.setdefault(found.query, {})[found.passage] = None
    return {query: list(passages) for query, passages in gold.items()}


def _table(path: pathlib.Path | str) -> Iterator[Judgement]:
    names = ("query-id", "corpus-id", "score")
    for record in read_table(path, "\t"):
        yield Judgement(record.place, *(field(record, name, str) for name in names))


def _lines(path: pathlib.Path | str) -> Iterator[Judgement]:
    for number, line in read_lines(path):
        parts = line.split()
        if len(parts) != 4:
            raise UserError(
                f"{path}, line {number}: {len(parts)} columns, not the four of TREC's judgements "
                "(query, iteration, passage, relevance): correct it, or give BEIR's table with its "
                "header"
            )
        yield Judgement(f"{path}, line {number}", parts[0], parts[2], parts[3])


def judged(questions: Sequence[Question], path: pathlib.Path | str) -> list[Question]:
    """Those questions for which a file of judgements has relevant passages, with these as gold.

    Raises:
      UserError: as `read_qrels`; nothing is relevant, or nothing to any of the questions.
    """
    gold = read_qrels(path)
    if not gold:
        raise UserError(f"{path} judges no passage relevant (above 0): give other judgements")
    found = [
        dataclasses.replace(question, gold=tuple(gold[question.id]))
        for question in questions
        if question.id in gold
    ]
    if not found:
        raise UserError(
            f"{path} judges passages for {next(iter(gold))!r}, but no question has the id of a "
            f"judged query (the first is {questions[0].id!r}): give the questions it was made for"
        )
    return found
