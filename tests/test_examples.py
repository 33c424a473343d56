"""The examples at the top of the repository run."""

from __future__ import annotations

import numpy as np

from examples import minimal


def test_the_minimal_example_trains(capsys):
    rewards = minimal.main(steps=2, questions_per_step=4)
    assert len(rewards) == 2 and np.isfinite(rewards).all()
    assert capsys.readouterr().out.count("reward") == 2
