"""A soak: many steps of a small training, and whether what the process holds stays flat.

    python docs/lab/soak.py --config=configs/tiny/c3po.py --steps 1000 --workdir runs/soak

Every step takes one sample: resident memory, open files, memory mappings, threads, compiled
programs and the time of the step. A run of weeks ends if any of them grows with the number of
steps. An interrupted soak continues with the same command; its samples then belong to several
processes, of which the one with the most samples is judged.
"""

from __future__ import annotations

import argparse
import collections
import json
import pathlib
import resource
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from markupsafe import Markup

from jax_ragrl.errors import UserError
from jax_ragrl.json_text import loads_or_none
from jax_ragrl.report.svg import Frame, element, join, path, text
from jax_ragrl.run.build import build_components
from jax_ragrl.run.overrides import PREFIX, load_config, override
from jax_ragrl.run.workdir import claim_workdir
from jax_ragrl.runtime.compile_cache import compiled_programs, enable_compile_cache
from jax_ragrl.runtime.jsonl import append_row, read_rows
from jax_ragrl.training.log import METRICS
from jax_ragrl.training.loop import train

SAMPLES = "soak.jsonl"
# Quantities of a sample, with the unit of the plot and its size.
QUANTITIES = {
    "rss_bytes": ("resident memory, MiB", 1 << 20),
    "handles": ("open files", 1),
    "mappings": ("memory mappings", 1),
    "threads": ("threads", 1),
    "programs": ("compiled programs", 1),
    "seconds": ("seconds per step (median)", 1),
}
MAX_RATIO = 1.1  # of the last quarter to the first one
POINTS = 120  # of a curve: each is the median of its samples
MIN_SAMPLES = 8  # two per quarter
POLL = 0.02  # seconds between looks at the log
TAIL = 1 << 16  # bytes at the end of the log, more than a row has

# One question per step. Evaluations, checkpoints and trees are more frequent than in a real run,
# since they open files. The slow rate keeps the policy, and with it the length of its texts; a
# constant rate lets a soak be made longer.
SMALL: dict[str, dict[str, Any]] = {
    "run": {
        "questions_per_step": 1,
        "save_every": 25,
        "eval_every": 50,
        "dev_questions": 2,
        "test_questions": 1,
        "save_trees_every": 50,
        "trees_per_save": 1,
    },
    "optimizer": {
        "policy_lr": 1e-6,
        "value_lr": 1e-6,
        "schedule": "constant",
        "warmup_fraction": 0.0,
        "minibatches": 1,
        "epochs": 1,
    },
}
WORLD_SIZE = 40  # entities of a synthetic corpus; fewer have too few questions
ROWS = 4  # of a batch of the sampler, and half as many of the learner


def small(values: Mapping[str, Any], steps: int) -> dict[str, Any]:
    """Returns a config with the least work per step, and one shape per program.

    Args:
      values: the values of the config.
      steps: the number of steps.
    """
    small = dict(values) | {
        name: {**values.get(name, {}), **section} for name, section in SMALL.items()
    }
    small["run"]["steps"] = steps
    if world := values["data"].get("world"):
        small["data"] = {**values["data"], "world": {**world, "size": WORLD_SIZE}}
    shapes, packing = values["shapes"], values["packing"]
    # The longest prompts and rows fit any text of the run.
    small["shapes"] = {
        **shapes,
        "prompt_lengths": (max(shapes["prompt_lengths"]),),
        "batch_sizes": (ROWS,),
    }
    row = max(packing["row_lengths"])
    small["packing"] = {**packing, "row_lengths": (row,), "tokens_per_device": ROWS // 2 * row}
    return small


def bench_soak(
    values: Mapping[str, Any], workdir: pathlib.Path, drawing: pathlib.Path | None = None
) -> dict[str, Any]:
    """Trains, and returns how the quantities of the process developed as values for JSON.

    Args:
      values: the values of the config, see `small`.
      workdir: the folder of the run; one with a part of this soak continues it.
      drawing: an SVG file to write the curves to.

    Returns:
      The number of steps and of processes, the trend of each quantity in the process with the most
      samples (see `trend`), and the quantities that grew.

    Raises:
      UserError: there are too few samples.
    """
    job = claim_workdir(values, workdir)
    enable_compile_cache(workdir)
    parts = build_components(job, workdir)
    with Recorder(workdir):
        train(job, parts, workdir)
    samples = list(read_rows(workdir / SAMPLES))
    if drawing is not None:
        drawing.parent.mkdir(parents=True, exist_ok=True)
        drawing.write_text(plot(samples, f"Soak of {len(samples)} steps"), encoding="utf-8")
    return describe(samples)


class Usage(NamedTuple):
    """Numbers of this process at one time.

    Fields:
      rss_bytes: its resident memory.
      handles: its open files, sockets and pipes.
      mappings: its memory mappings; see `runtime.mappings`.
      threads: its threads, with the ones of libraries.
    """

    rss_bytes: int
    handles: int
    mappings: int
    threads: int


def usage() -> Usage:
    """Returns the numbers of this process, on Linux."""
    process = pathlib.Path("/proc/self")
    pages = int((process / "statm").read_text(encoding="ascii").split()[1])
    handles, threads = (sum(1 for _ in (process / x).iterdir()) for x in ("fd", "task"))
    with (process / "maps").open("rb") as lines:
        mappings = sum(1 for _ in lines)
    return Usage(pages * resource.getpagesize(), handles, mappings, threads)


class Recorder:
    """Appends a sample to a file as soon as a run has logged a step, in a thread."""

    def __init__(self, workdir: pathlib.Path):
        """Begins with the next step that the run logs.

        Args:
          workdir: the folder of the run, which also gets the samples.
        """
        self._metrics, self._samples = workdir / METRICS, workdir / SAMPLES
        self._process, self._time = time.time(), time.perf_counter()
        self._step, self._end = self._newest(), threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Recorder:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        self._sample()

    def _watch(self) -> None:
        while not self._end.wait(POLL):
            self._sample()

    def _sample(self) -> None:
        step = self._newest()
        # A resumed run first drops the rows after its checkpoint.
        if step <= self._step:
            self._step = step
            return
        now = time.perf_counter()
        numbers = usage()._asdict() | {"programs": compiled_programs()}
        seconds = round((now - self._time) / (step - self._step), 4)
        self._step, self._time = step, now
        row = {"step": step, "process": self._process, **numbers, "seconds": seconds}
        append_row(self._samples, row)

    def _newest(self) -> int:
        """The last step of the log; 0 before the first one."""
        try:
            with self._metrics.open("rb") as file:
                file.seek(max(0, self._metrics.stat().st_size - TAIL))
                lines = file.read().splitlines()
        except FileNotFoundError:
            return 0
        row = loads_or_none(lines[-1]) if lines else None
        return row.get("step", 0) if isinstance(row, dict) else self._step


def describe(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns what `bench_soak` returns, from samples in the order of their steps.

    Raises:
      UserError: there are too few of them.
    """
    longest = longest_process(samples)
    if len(longest) < MIN_SAMPLES:
        raise UserError(f"{len(longest)} steps have no trend: take at least {MIN_SAMPLES}")
    trends = {name: trend(longest, name) for name in QUANTITIES}
    return {
        "steps": samples[-1]["step"],
        "processes": len({sample["process"] for sample in samples}),
        "judged_steps": [longest[0]["step"], longest[-1]["step"]],
        **trends,
        "grew": [name for name, x in trends.items() if x["ratio"] > MAX_RATIO],
    }


def longest_process(samples: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The samples of the process with the most of them."""
    counts = collections.Counter(sample["process"] for sample in samples)
    longest = max(counts, key=lambda process: counts[process], default=None)
    return [sample for sample in samples if sample["process"] == longest]


def trend(samples: Sequence[Mapping[str, Any]], name: str) -> dict[str, float]:
    """How a quantity developed over the samples of one process.

    The first quarter includes the growth of a process that has just begun. The slope is that of the
    last half, so that it shows growth which does not end.

    Args:
      samples: the samples.
      name: the quantity.

    Returns:
      The means (medians of times) of the first and of the last quarter, their ratio, and the slope
      of a straight line through the last half, per 1,000 steps.
    """
    steps = np.array([sample["step"] for sample in samples])
    values = np.array([sample[name] for sample in samples], float)
    quarter, half = len(values) // 4, len(values) // 2
    # The first step compiles, which a mean of times would show; counts jump at every checkpoint,
    # of which a median shows one side alone.
    middle = np.median if name == "seconds" else np.mean
    first, last = float(middle(values[:quarter])), float(middle(values[-quarter:]))
    slope = float(np.polyfit(steps[half:], values[half:], 1)[0])
    return {
        "first_quarter": round(first, 4),
        "last_quarter": round(last, 4),
        "ratio": round(last / first, 4) if first else float("inf"),
        "slope_per_1000_steps": round(1000 * slope, 4),
    }


# --- the plot ------------------------------------------------------------------------------------

WIDTH, HEIGHT = 230, 130  # of the chart of one quantity, in pixels
COLUMNS = 2
STYLE = """
  svg.drawing-svg { --ink: #1f2933; --soft: #6b7785; --a: #2f6fdf; }
  @media (prefers-color-scheme: dark) {
    svg.drawing-svg { --ink: #e6e9ee; --soft: #9aa5b1; --a: #7aa7ff; }
  }
  .drawing-svg text { font: 12px system-ui, sans-serif; fill: var(--soft); }
  .drawing-svg .bold { font-weight: 600; fill: var(--ink); }
  .drawing-svg .rule { stroke: var(--soft); stroke-width: 0.5; }
  .drawing-svg .curve { fill: none; stroke: var(--a); stroke-width: 1.5; }
"""


def plot(samples: Sequence[Mapping[str, Any]], title: str) -> str:
    """Returns an SVG file with one chart per quantity, from 0 upwards.

    Args:
      samples: the samples of a soak; the process with the most of them is drawn.
      title: a description for screen readers.
    """
    longest = longest_process(samples)
    charts = [chart(longest, name) for name in QUANTITIES]
    places = [(WIDTH * (i % COLUMNS), HEIGHT * (i // COLUMNS)) for i in range(len(charts))]
    placed = [
        element("g", inside, transform=f"translate({x},{y})")
        for inside, (x, y) in zip(charts, places, strict=True)
    ]
    height = HEIGHT * -(-len(charts) // COLUMNS)
    picture = element(
        "svg",
        join([element("title", title), element("style", Markup(STYLE)), *placed]),
        class_="drawing-svg",
        xmlns="http://www.w3.org/2000/svg",
        role="img",
        viewBox=f"0 0 {COLUMNS * WIDTH} {height}",
        aria_label=title,
    )
    return f"{picture}\n"


def chart(samples: Sequence[Mapping[str, Any]], name: str) -> Markup:
    """The chart of one quantity.

    Args:
      samples: the samples of one process.
      name: the quantity.
    """
    label, unit = QUANTITIES[name]
    parts = np.array_split(np.arange(len(samples)), min(POINTS, len(samples)))
    # Medians, since a step with an evaluation or a checkpoint takes longer than the others.
    points = [
        (samples[part[-1]]["step"], float(np.median([samples[i][name] for i in part])) / unit)
        for part in parts
    ]
    high = max(value for _, value in points) or 1.0
    frame = Frame(
        WIDTH, HEIGHT, samples[0]["step"], samples[-1]["step"], 0, 1.1 * high, margin_top=26
    )
    return join(
        [
            text(frame.margin_left, 16, label, class_="bold"),
            *(rule(frame, value) for value in (0.0, high)),
            text(frame.margin_left, HEIGHT - 8, f"step {frame.x0:g}"),
            text(WIDTH - frame.margin_right, HEIGHT - 8, f"{frame.x1:g}", "end"),
            path([(frame.x(step), frame.y(value)) for step, value in points], "curve"),
        ]
    )


def rule(frame: Frame, value: float) -> Markup:
    """A horizontal line with its value."""
    y, right = frame.y(value), frame.width - frame.margin_right
    line = element("line", x1=frame.margin_left, x2=right, y1=y, y2=y, class_="rule")
    return line + text(frame.margin_left - 6, y + 4, f"{value:.4g}", "end")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--steps", type=int, default=1000, help="of one question each")
    parser.add_argument("--workdir", type=pathlib.Path, default=pathlib.Path("runs/soak"))
    parser.add_argument("--plot", type=pathlib.Path, metavar="FILE.svg")
    options, config = parser.parse_known_args()
    values = small(
        load_config(None, [x for x in config if not x.startswith(PREFIX)]), options.steps
    )
    # After the small sizes, so that an option can change them.
    override(values, [x for x in config if x.startswith(PREFIX)])
    print(json.dumps(bench_soak(values, options.workdir, options.plot), indent=2))


if __name__ == "__main__":
    main()
