"""The soak: its samples, the trend that it reads from them, its config and its plot."""

from __future__ import annotations

import json
import threading
import time
import xml.etree.ElementTree as ElementTree

import pytest

from jax_ragrl.bench import soak
from jax_ragrl.cli.main import CONFIGS, main
from jax_ragrl.config.overrides import load_config
from jax_ragrl.errors import UserError
from jax_ragrl.run.load import load_job
from jax_ragrl.runtime.jsonl import append_row, drop_after_step, read_rows
from jax_ragrl.runtime.usage import usage

FLAT = {"handles": 10, "mappings": 3000, "threads": 25, "programs": 30, "seconds": 1.0}


def samples(count: int, rss: int, growth: int, process: float = 1.0) -> list[dict]:
    """Samples of a process whose memory grows by `growth` bytes per step."""
    steps = range(1, count + 1)
    return [{"step": n, "process": process, **FLAT, "rss_bytes": rss + growth * n} for n in steps]


def test_growth_is_named_with_its_slope():
    result = soak.describe(samples(400, 1 << 30, 1 << 20))
    assert result["grew"] == ["rss_bytes"]
    assert result["rss_bytes"]["slope_per_1000_steps"] == pytest.approx(1000 * (1 << 20), rel=1e-6)
    assert result["threads"] == {
        "first_quarter": 25,
        "last_quarter": 25,
        "ratio": 1,
        "slope_per_1000_steps": pytest.approx(0, abs=1e-6),
    }


def test_a_flat_soak_names_nothing_and_the_longest_process_is_judged():
    restarted = samples(100, 1 << 30, 0) + samples(40, 4 << 30, 1 << 30, process=2.0)
    result = soak.describe(restarted)
    assert result["grew"] == [] and result["processes"] == 2
    assert result["judged_steps"] == [1, 100]


@pytest.mark.parametrize("count", [0, soak.MIN_SAMPLES - 1])
def test_too_few_steps_are_refused(count: int):
    with pytest.raises(UserError, match=f"{count} steps have no trend: take at least 8"):
        soak.describe(samples(count, 1, 0))


def test_usage_counts_what_the_process_opens(tmp_path):
    """An open file and a thread are one more each, a large array is resident memory."""
    before, end = usage(), threading.Event()
    thread = threading.Thread(target=end.wait)
    with (tmp_path / "file").open("w"):
        thread.start()
        array = bytearray(b"x" * (64 << 20))
        during = usage()
    end.set()
    thread.join()
    assert during.handles == before.handles + 1 and during.threads == before.threads + 1
    assert during.rss_bytes - before.rss_bytes > len(array) // 2
    assert usage().handles == before.handles


def test_a_system_without_proc_is_an_error(tmp_path):
    with pytest.raises(UserError, match="measure on Linux"):
        usage(tmp_path / "none")


def test_the_plot_is_one_file_with_a_curve_per_quantity():
    picture = ElementTree.fromstring(soak.plot(samples(1000, 1 << 30, 0), "a <soak>"))
    space = "{http://www.w3.org/2000/svg}"
    curves = [x for x in picture.iter(f"{space}path") if x.get("class") == "curve"]
    assert len(curves) == len(soak.QUANTITIES)
    # As many points as the plot has room for, fewer than steps.
    assert all(x.get("d", "").count("L") == soak.POINTS - 1 for x in curves)
    assert "1024" in {x.text for x in picture.iter(f"{space}text")}


def test_a_sample_is_taken_per_logged_step_also_after_a_resumption(tmp_path):
    """A resumed run drops the rows after its checkpoint first, and logs these steps again."""
    metrics, samples = tmp_path / "metrics.jsonl", tmp_path / soak.SAMPLES

    def log(step: int) -> None:
        append_row(metrics, {"step": step, "reward/mean": 0.5})
        for _ in range(500):
            if any(row["step"] == step for row in read_rows(samples)):
                return
            time.sleep(0.01)

    with soak.Recorder(tmp_path):
        for step in (1, 2, 3):
            log(step)
    with soak.Recorder(tmp_path):
        drop_after_step(metrics, 2)
        time.sleep(10 * soak.POLL)
        append_row(metrics, {"step": 3})
    rows = list(read_rows(samples))
    assert [row["step"] for row in rows] == [1, 2, 3, 3]
    assert rows[0]["process"] == rows[2]["process"] < rows[3]["process"]


@pytest.mark.parametrize("name", ["c3po", "search_r1", "coda", "mmoa_rag", "opera", "rag_ddr"])
def test_a_small_config_has_one_shape(name: str):
    values = load_config(CONFIGS / "tiny" / f"{name}.py", [])
    job = load_job(soak.small(values, 7))
    assert job.run.steps == 7 and job.run.questions_per_step == 1
    assert [len(x) for x in (job.shapes.prompt_lengths, job.shapes.batch_sizes)] == [1, 1]
    assert len(job.packing.row_lengths) == 1


@pytest.mark.optimized
@pytest.mark.slow
def test_a_soak_of_a_few_steps_continues_and_is_flat(tmp_path, capsys):
    """The commands of the documentation, with fewer steps; the second one continues the first."""
    command = [f"--config={CONFIGS / 'tiny' / 'c3po.py'}", f"--workdir={tmp_path}"]
    command += ["--config.recipe.tree.branching_depth=1", f"--plot={tmp_path / 'soak.svg'}"]
    for steps in (8, 16):
        assert main(["bench", "soak", f"--steps={steps}", "--json", *command]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    rows = list(read_rows(tmp_path / soak.SAMPLES))
    assert result["steps"] == 16 and result["processes"] == 2
    assert [row["step"] for row in rows] == list(range(1, 17))
    # After the first step of a process nothing compiles, since there is one shape.
    assert rows[6]["programs"] == rows[1]["programs"]
    assert (tmp_path / "soak.svg").read_text().startswith("<svg")
