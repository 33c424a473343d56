"""Relevance judgments: TREC's lines, or BEIR's table.

TREC: `query iteration passage relevance` per line, separated by white space, no header. BEIR: a TSV
with the columns `query-id, corpus-id, score`. A passage is relevant if its score is above 0.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Iterator, Sequence

from jax_ragrl.corpus.formats.files import field, read_lines, read_table
from jax_ragrl.errors import UserError
from jax_ragrl.types import Question

# Stricter than `int`, which also accepts underscores; 18 digits always fit 64 bits.
INTEGER = re.compile(r"-?[0-9]{1,18}")


def read_qrels(path: pathlib.Path | str) -> dict[str, list[str]]:
    """Reads the ids of the relevant passages per query id; an error names file and line."""
    _, first = next(read_lines(path), (0, ""))
    if not first:
        raise UserError(f"{path} is empty: give a file with judgments")
    gold: dict[str, dict[str, None]] = {}  # dicts keep the order and remove duplicates
    rows = _rows(path) if "query-id" in first.split() else _lines(path)
    for place, query, passage, score in rows:
        if not INTEGER.fullmatch(score):
            raise UserError(f"{place}: score {score!r} is not an integer: correct it")
        # A score of 0 or below is an explicit judgment that the passage is not relevant.
        if int(score) > 0:
            gold.setdefault(query, {})[passage] = None
    return {query: list(passages) for query, passages in gold.items()}


def _rows(path: pathlib.Path | str) -> Iterator[list[str]]:
    for record in read_table(path, "\t"):
        names = ("query-id", "corpus-id", "score")
        yield [record.place, *(field(record, name, str) for name in names)]


def _lines(path: pathlib.Path | str) -> Iterator[list[str]]:
    for number, line in read_lines(path):
        parts = line.split()
        if len(parts) != 4:
            raise UserError(
                f"{path}, line {number}: {len(parts)} columns, not the four of TREC's judgments "
                "(query, iteration, passage, relevance): correct it, or give BEIR's table with its "
                "header"
            )
        yield [f"{path}, line {number}", parts[0], parts[2], parts[3]]


def questions_with_gold(questions: Sequence[Question], path: pathlib.Path | str) -> list[Question]:
    """Returns the questions for which a file names relevant passages, which become their gold.

    Raises:
      UserError: as `read_qrels`; or no passage is relevant to any of the questions.
    """
    gold = read_qrels(path)
    if not gold:
        raise UserError(f"{path} judges no passage relevant (above 0): give other judgments")
    matches = [
        dataclasses.replace(question, gold=tuple(gold[question.id]))
        for question in questions
        if question.id in gold
    ]
    if not matches:
        raise UserError(
            f"{path} judges passages for {next(iter(gold))!r}, but no question has the id of a "
            f"judged query (the first is {questions[0].id!r}): give the questions it was made for"
        )
    return matches
