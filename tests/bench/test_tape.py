"""The counters of the tape of ragged conversations, in batches and in slots."""

from __future__ import annotations

import json

import pytest

from jax_ragrl.bench.tape import distinct_tokens
from jax_ragrl.cli.main import main


@pytest.mark.slow
def test_slots_write_the_same_replies_with_less_work(capsys):
    sizes = "--conversations 3 --new 64 --decode-rows 8 --kept-contexts 32".split()
    assert main(["bench", "tape", "--json", *sizes]) == 0
    result = json.loads(capsys.readouterr().out)
    batches, slots = result["batches"], result["slots"]
    assert result["equal_replies"] == 1 and batches["tokens"] == slots["tokens"]
    assert slots["row_steps_per_token"] < batches["row_steps_per_token"]
    assert slots["prefill_per_distinct_token"] < 1.2 < batches["prefill_per_distinct_token"]


def test_common_first_tokens_are_counted_once():
    assert distinct_tokens([(1, 2, 3), (1, 2, 4), (1, 2, 3), (5,)]) == 5
