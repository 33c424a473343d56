"""What the bench of searching draws and counts; how long it takes is nobody's test."""

import json

import numpy as np
import pytest

from jax_ragrl.bench import search
from jax_ragrl.bench.search import Search, found_share
from jax_ragrl.cli.main import main

SMALL = "--count 3000 --dimension 16 --queries 8 --k 5 --repeats 1".split()


def test_vectors_have_unit_length_and_are_drawn_in_parts_of_any_size(monkeypatch):
    monkeypatch.setattr(search, "BLOCK", 64)
    queries_QD, passages_XD = Search(count=150, dimension=32, queries=4).vectors()
    assert queries_QD.shape == (4, 32) and passages_XD.shape == (150, 32)
    np.testing.assert_allclose(np.linalg.norm(passages_XD, axis=1), 1.0, rtol=1e-5)
    assert len(np.unique(passages_XD[:, 0])) == 150
    spread = passages_XD.std(axis=0)
    assert spread[0] > 2 * spread[31]


def test_the_share_found_counts_what_was_expected():
    expected = np.array([[1, 2], [3, 4]])
    assert found_share(np.array([[2, 1], [3, 9]]), expected) == 0.75
    assert found_share(expected, expected) == 1.0


@pytest.mark.parametrize(
    ("given", "recall", "size"),
    [
        ([], (1.0, 1.0), 4),
        (["--dtype", "bfloat16"], (0.9, 0.9999), 2),  # some lie nearer than bfloat16 tells
        (["--kind", "scann"], (0.9, 1.0), 4),
    ],
)
def test_the_command_says_what_was_found(given, recall, size, capsys):
    if "scann" in given:
        pytest.importorskip("scann")
    assert main(["bench", "search", "--json", *SMALL, "--queries", "64", *given]) == 0
    result = json.loads(capsys.readouterr().out)
    assert recall[0] <= result["recall"] <= recall[1]
    assert result["vector_bytes"] == 3000 * 16 * size and result["queries_per_s"] > 0


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--kind", "faiss"], "--kind is 'faiss': use one of exact, scann"),
        (["--dtype", "int8"], "--dtype is 'int8'"),
        (["--kind", "scann", "--dtype", "bfloat16"], "ScaNN searches float32"),
        (["--k", "3001"], "--k 3001 of --count 3000"),
    ],
)
def test_what_cannot_be_measured_is_refused(given, told, capsys):
    assert main(["bench", "search", *SMALL, *given]) == 2
    assert told in capsys.readouterr().err
