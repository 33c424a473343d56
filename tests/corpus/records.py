"""Records of published sets in their official form, and a writer of files of records."""

import csv
import io
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import pyarrow
import pyarrow.parquet

HOTPOT = {
    "_id": "h1",
    "question": "Who is older?",
    "answer": "Ann",
    "supporting_facts": [["Ann", 0], ["Bob", 0], ["Ann", 1]],
    "context": [["Ann", ["Ann was born.", " In 1970."]], ["Bob", ["Bob was not."]]],
    "type": "comparison",
    "level": "hard",
}
MUSIQUE = {
    "id": "2hop__1_2",
    "question": "Where was the director born?",
    "answer": "Rome",
    "answer_aliases": ["Roma", "Rome"],
    "answerable": True,
    "paragraphs": [
        {"idx": 0, "title": "Film", "paragraph_text": "By Ann.", "is_supporting": True},
        {"idx": 1, "title": "Tea", "paragraph_text": "A drink.", "is_supporting": False},
    ],
    "question_decomposition": [
        {"question": "Film >> director", "paragraph_support_idx": 0},
        {"question": "#1 >> birthplace", "paragraph_support_idx": 1},
    ],
}
VERL = {
    "data_source": "x",
    "prompt": [{"role": "user", "content": "Answer: q?"}],
    "reward_model": {"ground_truth": {"target": ["a", "b"]}, "style": "rule"},
    "extra_info": {"index": 3},
}
CONTAINERS = ("json", "jsonl", "parquet", "parquet of texts", "csv", "tsv")


def write(path: pathlib.Path, rows: Sequence[dict[str, Any]], container: str) -> pathlib.Path:
    """Writes records in one of `CONTAINERS`; columns of texts hold nested values as JSON."""

    def as_text() -> list[dict[str, Any]]:
        cells = lambda v: json.dumps(v) if isinstance(v, dict | list | bool) else v  # noqa: E731
        return [{name: cells(value) for name, value in row.items()} for row in rows]

    if container == "json":
        path.write_text(json.dumps(rows))
    elif container == "jsonl":
        path.write_text("\n".join(map(json.dumps, rows)))
    elif container.startswith("parquet"):
        columns = as_text() if container == "parquet of texts" else rows
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(columns), path)
    else:
        text = io.StringIO()
        writer = csv.DictWriter(text, rows[0], delimiter={"csv": ",", "tsv": "\t"}[container])
        writer.writeheader()
        writer.writerows(as_text())
        path.write_text(text.getvalue())
    return path
