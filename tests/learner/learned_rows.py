"""What two runs that do the same write alike."""

from __future__ import annotations

import pathlib

import numpy as np

from jax_ragrl.runtime.jsonl import rows_of


def learned(workdir: pathlib.Path) -> list[dict[str, float]]:
    """The metrics of each step, without those of the clock."""
    return [
        {name: x for name, x in row.items() if not name.startswith(("time/", "tokens_per_sec"))}
        for row in rows_of(workdir / "metrics.jsonl")
    ]


def assert_learned_alike(one: pathlib.Path, other: pathlib.Path) -> None:
    """The same metrics, to what the order of sums may change."""
    for expected, found in zip(learned(one), learned(other), strict=True):
        assert expected.keys() == found.keys()
        for name, x in expected.items():
            np.testing.assert_allclose(found[name], x, rtol=1e-3, atol=1e-4, err_msg=name)
