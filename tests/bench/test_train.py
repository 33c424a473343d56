"""The counts of the training benchmark; no test asserts a duration."""

import json
import sys

import pytest

from jax_ragrl.bench.peers import compare_steps, transformers_step, tunix_step
from jax_ragrl.bench.train import TrainWork, bench_train, train_flops
from jax_ragrl.cli.main import main
from jax_ragrl.errors import UserError

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


def test_the_command_accepts_all_sizes(capsys):
    sizes = "--prompts 1 --siblings 2 --prompt 20 --new 4 --layers 1 --repeats 1".split()
    args = ["bench", "train", "--json", "--shape", "tiny", "--dtype", "float32", *sizes]
    assert main([*args, "--ungrouped"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["ungrouped"]["tokens"] == 48 and "grouped" not in result
    assert main(["bench", "train", "--shape", "qwen9"]) == 2
    assert "no model size named 'qwen9'" in capsys.readouterr().err


@pytest.mark.slow
def test_transformers_scores_and_updates_the_same_work():
    pytest.importorskip("torch")
    speed = transformers_step(SMALL)
    assert speed["tokens"] == 2 * 3 * 24 and speed["reference_cpu_s"] > 0


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "tunix", None)
    with pytest.raises(UserError, match="install google-tunix"):
        tunix_step(SMALL)


def test_a_comparison_uses_common_measurements():
    ours = {"step_s": 1.0, "reference_s": 0.5, "step_cpu_s": 2.0, "peak_bytes": 100}
    theirs = {"step_s": 6.0, "reference_s": 1.5, "step_cpu_s": 3.0, "peak_bytes": 400}
    ratios = {"times_faster": 5.0, "times_faster_cpu": 1.5, "memory_share": 0.25}
    assert compare_steps(ours, theirs) == ratios
    alone = {"step_s": 6.0, "peak_bytes": None}
    ratios = {"times_faster": 6.0, "times_faster_cpu": None, "memory_share": None}
    assert compare_steps(ours, alone) == ratios
