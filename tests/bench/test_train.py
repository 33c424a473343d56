"""The counts of the training benchmark; no test asserts a duration."""

import json

import pytest

from jax_ragrl.bench.train import TrainWork, bench_train, train_flops
from jax_ragrl.cli.main import main

SMALL = TrainWork(
    "tiny", prompts=2, siblings=3, prompt=20, new=4, layers=1, dtype="float32", repeats=1
)


@pytest.mark.slow
def test_tokens_are_counted_for_both_row_layouts():
    result = bench_train(SMALL, compare=True)
    grouped, ungrouped = result["grouped"], result["ungrouped"]
    assert (grouped["tokens"], ungrouped["tokens"]) == (2 * (20 + 3 * 4), 2 * 3 * 24)
    for x in (grouped, ungrouped):
        tokens = x["ungrouped_tokens_per_s"] / x["tokens_per_s"] * x["tokens"]
        assert tokens == pytest.approx(144, rel=1e-3)
    assert result["ratio"] > 0


def test_the_operations_of_a_step_match_a_manual_count():
    """One layer: weights, pairs of attending tokens, head; the backward pass counts twice."""
    (turns,) = [SMALL.turns()[:3]]
    weights = 2 * 128 + 4 * 128 * 128 + 3 * 128 * 256 + 2 * 32 + 128  # norms and projections
    pairs = 20 * 21 // 2 + 3 * (4 * 20 + 4 * 5 // 2)
    forward = 2 * weights * 32 + 2 * 1024 * 128 * 12 + 4 * 128 * pairs
    assert train_flops(SMALL, [turns]) == pytest.approx(3 * forward)


@pytest.mark.slow
def test_the_command_accepts_all_sizes(capsys):
    sizes = "--prompts 1 --siblings 2 --prompt 20 --new 4 --layers 1 --repeats 1".split()
    args = ["bench", "train", "--json", "--shape", "tiny", "--dtype", "float32", *sizes]
    assert main([*args, "--ungrouped"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["ungrouped"]["tokens"] == 48 and "grouped" not in result


def test_an_unknown_model_size_is_named(capsys):
    assert main(["bench", "train", "--shape", "qwen9"]) == 2
    assert "no model size named 'qwen9'" in capsys.readouterr().err
