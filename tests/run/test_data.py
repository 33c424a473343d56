"""A run starts only if its questions belong to its corpus."""

import json
import re

import pytest

from jax_ragrl.errors import UserError
from jax_ragrl.run.config import Data, FileData
from jax_ragrl.run.data import load_data


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize(
    ("gold", "said"),
    [
        (["p0", "T1"], ""),
        (["p0", "gone"], "1 of 2 gold passages of data.files.dev are not in .*'gone': no search"),
        (["gone", "away"], "2 of 2 gold passages of data.files.dev are not .*give dev questions"),
        ([], ""),
    ],
)
def test_a_split_of_another_corpus_is_refused_and_a_missing_part_named(
    tmp_path, capsys, gold, said
):
    passages = [{"id": f"p{n}", "title": f"T{n}", "text": "x"} for n in range(3)]
    corpus = write(tmp_path / "corpus.jsonl", passages)
    question = {"id": "1", "question": "q?", "answer": "a", "gold": ["p1"]}
    own = write(tmp_path / "own.jsonl", [question])
    dev = write(
        tmp_path / "other.jsonl",
        [{**question, "gold": [name] if name else []} for name in gold or [""]],
    )
    data = Data(files=FileData(corpus=corpus, train=own, dev=dev, test=own))
    if "give" in said:
        with pytest.raises(UserError, match=said):
            load_data(data)
        return
    assert len(load_data(data).corpus) == 3
    errors = capsys.readouterr().err
    assert bool(errors) == bool(said)
    if said:
        assert re.search(said, errors)
