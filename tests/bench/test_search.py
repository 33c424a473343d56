"""The vectors and the recall of the search benchmark; no test asserts a duration."""

import json

import numpy as np
import pytest

from jax_ragrl.bench import search
from jax_ragrl.bench.search import SearchWork, recall_of
from jax_ragrl.cli.main import main

SMALL = "--count 3000 --dimension 16 --queries 8 --k 5 --repeats 1".split()


def test_vectors_have_unit_length_in_blocks_of_any_size(monkeypatch):
    monkeypatch.setattr(search, "BLOCK", 64)
    queries_QD, passages_XD = SearchWork(count=150, dimension=32, queries=4).vectors()
    assert queries_QD.shape == (4, 32) and passages_XD.shape == (150, 32)
    np.testing.assert_allclose(np.linalg.norm(passages_XD, axis=1), 1.0, rtol=1e-5)
    assert len(np.unique(passages_XD[:, 0])) == 150
    spread = passages_XD.std(axis=0)
    assert spread[0] > 2 * spread[31]


def test_recall_counts_expected_passages():
    expected = np.array([[1, 2], [3, 4]])
    assert recall_of(np.array([[2, 1], [3, 9]]), expected) == 0.75
    assert recall_of(expected, expected) == 1.0


@pytest.mark.parametrize(
    ("args", "recall", "size"),
    [
        ([], (1.0, 1.0), 4),
        (["--dtype", "bfloat16"], (0.9, 0.9999), 2),  # bfloat16 cannot separate all neighbors
        (["--kind", "scann"], (0.9, 1.0), 4),
    ],
)
def test_the_command_prints_the_recall(args, recall, size, capsys):
    if "scann" in args:
        pytest.importorskip("scann")
    assert main(["bench", "search", "--json", *SMALL, "--queries", "64", *args]) == 0
    result = json.loads(capsys.readouterr().out)
    assert recall[0] <= result["recall"] <= recall[1]
    assert result["vector_bytes"] == 3000 * 16 * size and result["queries_per_s"] > 0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--kind", "faiss"], "--kind is 'faiss': use one of exact, scann"),
        (["--dtype", "int8"], "--dtype is 'int8'"),
        (["--kind", "scann", "--dtype", "bfloat16"], "ScaNN searches float32"),
        (["--k", "3001"], "--k 3001 of --count 3000"),
    ],
)
def test_invalid_work_is_refused(args, message, capsys):
    assert main(["bench", "search", *SMALL, *args]) == 2
    assert message in capsys.readouterr().err
