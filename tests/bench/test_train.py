"""What the bench of the train step counts; how long it takes is nobody's test."""

import json
import sys

import pytest

from jax_ragrl.bench.peers import beside, tunix_step
from jax_ragrl.bench.train import Work, bench_train, train_flops
from jax_ragrl.cli.main import main
from jax_ragrl.errors import UserError

SMALL = Work("tiny", prompts=2, siblings=3, prompt=20, new=4, layers=1, dtype="float32", repeats=1)


@pytest.mark.slow
def test_tokens_are_counted_as_rows_hold_them_and_as_rows_of_one_action_would():
    result = bench_train(SMALL, compare=True)
    grouped, ungrouped = result["grouped"], result["ungrouped"]
    assert (grouped["tokens"], ungrouped["tokens"]) == (2 * (20 + 3 * 4), 2 * 3 * 24)
    for way in (grouped, ungrouped):
        plain = way["ungrouped_tokens_per_s"] / way["tokens_per_s"] * way["tokens"]
        assert plain == pytest.approx(144, rel=1e-3)
    assert result["ratio"] > 0


def test_the_operations_of_a_step_are_those_of_its_products():
    """One layer by hand: weights, pairs of tokens that see each other, the head; backward twice."""
    (turns,) = [SMALL.turns()[:3]]
    weights = 2 * 128 + 4 * 128 * 128 + 3 * 128 * 256 + 2 * 32 + 128  # norms and projections
    pairs = 20 * 21 // 2 + 3 * (4 * 20 + 4 * 5 // 2)
    forward = 2 * weights * 32 + 2 * 1024 * 128 * 12 + 4 * 128 * pairs
    assert train_flops(SMALL, [turns]) == pytest.approx(3 * forward)


def test_the_command_takes_every_size_and_refuses_an_unknown_shape(capsys):
    sizes = "--prompts 1 --siblings 2 --prompt 20 --new 4 --layers 1 --repeats 1".split()
    given = ["bench", "train", "--json", "--shape", "tiny", "--dtype", "float32", *sizes]
    assert main([*given, "--ungrouped"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["ungrouped"]["tokens"] == 48 and "grouped" not in result
    assert main(["bench", "train", "--shape", "qwen9"]) == 2
    assert "no shape named 'qwen9'" in capsys.readouterr().err


def test_a_peer_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "tunix", None)
    with pytest.raises(UserError, match="install google-tunix"):
        tunix_step(SMALL)


def test_a_peer_is_compared_by_what_both_did_and_memory_where_both_know_it():
    ours = {"step_s": 1.0, "reference_s": 0.5, "peak_bytes": 100}
    theirs = {"step_s": 6.0, "reference_s": 1.5, "peak_bytes": 400}
    assert beside(ours, theirs) == {"times_faster": 5.0, "memory_share": 0.25}
    alone = {"step_s": 6.0, "peak_bytes": None}
    assert beside(ours, alone) == {"times_faster": 6.0, "memory_share": None}
