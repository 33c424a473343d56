"""Compares the metrics of two runs that should be equal."""

import pathlib

import numpy as np

from jax_ragrl.runtime.jsonl import read_rows


def metric_rows(workdir: pathlib.Path) -> list[dict[str, float]]:
    """Returns the metrics of each step, without wall times."""
    return [
        {
            name: x
            for name, x in row.items()
            if not name.startswith(("time/", "compile/", "tokens_per_sec"))
        }
        for row in read_rows(workdir / "metrics.jsonl")
    ]


def assert_equal_metrics(one: pathlib.Path, other: pathlib.Path) -> None:
    """Asserts equal metrics, up to the order of sums."""
    for expected, actual in zip(metric_rows(one), metric_rows(other), strict=True):
        assert expected.keys() == actual.keys()
        for name, x in expected.items():
            np.testing.assert_allclose(actual[name], x, rtol=1e-3, atol=1e-4, err_msg=name)
