"""The vectors and the recall of the search benchmark; no test asserts a duration."""

import json

import numpy as np
import pytest

from jax_ragrl.bench import search
from jax_ragrl.bench.against_faiss import FaissWork
from jax_ragrl.bench.search import SearchWork, recall_of
from jax_ragrl.cli.main import main

AGAINST = "--against faiss --count 2000 --dimension 16 --queries 100 --repeats 1".split()
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
        (["--dtype", "int4"], "--dtype is 'int4'"),
        (["--kind", "scann", "--dtype", "bfloat16"], "ScaNN searches float32"),
        (["--k", "3001"], "--k 3001 of --count 3000"),
    ],
)
def test_invalid_work_is_refused(args, message, capsys):
    assert main(["bench", "search", *SMALL, *args]) == 2
    assert message in capsys.readouterr().err


def test_every_library_is_measured_at_each_recall(capsys):
    pytest.importorskip("scann")
    pytest.importorskip("faiss")
    assert main(["bench", "search", "--json", *AGAINST]) == 0
    result = json.loads(capsys.readouterr().out)
    for name in ("scann", "faiss_ivf_flat", "faiss_hnsw_flat"):
        assert [row["target"] for row in result[name]["at"]] == [0.95, 0.99]
        for row in result[name]["at"]:
            # Tuned on other queries than those that are measured.
            assert row["recall"] >= row["target"] - 0.05 and row["queries_per_s"] > 0
        assert result[name]["build_s"] >= 0
    probes = [row["setting"]["nprobe"] for row in result["faiss_ivf_flat"]["at"]]
    assert 1 <= probes[0] <= probes[1] < result["faiss_ivf_flat"]["settings"]["nlist"]


def test_vectors_of_clusters_have_unit_length_and_near_neighbors():
    queries_QD, passages_XD = FaissWork(count=3000, dimension=32, queries=50).vectors()
    np.testing.assert_allclose(np.linalg.norm(passages_XD, axis=1), 1.0, rtol=1e-5)
    scores_QX = np.sort(queries_QD @ passages_XD.T)
    # The nearest are far nearer than the median passage, but no copies.
    assert 0.5 < scores_QX[:, -1].mean() < 0.99 and abs(np.median(scores_QX)) < 0.1


def test_without_faiss_the_error_names_its_package(monkeypatch, capsys):
    monkeypatch.setitem(__import__("sys").modules, "faiss", None)
    assert main(["bench", "search", *AGAINST]) == 2
    assert "pip install faiss-cpu" in capsys.readouterr().err
    assert main(["bench", "search", *AGAINST, "--k", "5"]) == 2
    assert "--k 5 are not read with --against" in capsys.readouterr().err
