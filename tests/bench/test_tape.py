"""The counters of the tape of ragged conversations."""

from __future__ import annotations

import json

import pytest

from jax_ragrl.bench.tape import distinct_tokens
from jax_ragrl.cli.main import main


@pytest.mark.slow
def test_the_work_of_a_tape_is_counted(capsys):
    assert main(["bench", "tape", "--json", *"--conversations 3 --new 64".split()]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["row_steps"] > result["tokens"] > 0
    assert result["prefill_tokens"] > result["distinct_tokens"] > 0


def test_common_first_tokens_are_counted_once():
    assert distinct_tokens([(1, 2, 3), (1, 2, 4), (1, 2, 3), (5,)]) == 5
