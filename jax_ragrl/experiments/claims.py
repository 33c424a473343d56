"""Claims of the papers and how each one is decided (`ragrl experiment reproduce`).

A claim is decided by tests, if it follows from the formulas, or by an experiment: pairs of arms,
each with a claim about their difference. What cannot be decided here says why.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import pathlib
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from jax_ragrl.config.schema import build
from jax_ragrl.config.shipped_configs import CONFIGS
from jax_ragrl.errors import UserError
from jax_ragrl.evaluation.suite import markdown_table
from jax_ragrl.experiments.arms import (
    Arm,
    Cell,
    Experiment,
    arm_key,
    cells_of,
    run_cells,
    training_cell,
)
from jax_ragrl.experiments.comparison import adjust_for_family, compare_pair
from jax_ragrl.experiments.measures import is_in_points, title_of
from jax_ragrl.experiments.pairs import FAILS, HOLDS, UNDECIDED, Pair
from jax_ragrl.experiments.pairs import decide as decide_pair
from jax_ragrl.experiments.statistics import points
from jax_ragrl.run.overrides import load_config
from jax_ragrl.runtime.caches import write_text
from jax_ragrl.runtime.jsonl import write_json
from jax_ragrl.runtime.revision import device_name, revision

OPEN = "open"
MARGIN = 2.0  # points: a smaller difference counts as none, unless a pair gives another margin
COLUMNS = ("#", "claim", "evidence", "difference, 95 %", "could be seen", "verdict")


@dataclasses.dataclass(frozen=True)
class Claim:
    """A claim of a paper.

    Fields:
      number: its number.
      statement: the claim.
      source: its place in the paper, with the paper's own figure if there is one.
      arms: the arms of the experiment by name.
      pairs: pairs of arms; the claim holds if the claim of each pair does.
      tests: tests that prove the claim, as `file::name`.
      missing: what cannot be decided, and why.
    """

    number: int
    statement: str
    source: str
    arms: Mapping[str, Arm] = dataclasses.field(default_factory=dict)
    pairs: tuple[Pair, ...] = ()
    tests: tuple[str, ...] = ()
    missing: str = ""

    def __post_init__(self) -> None:
        names = {name for pair in self.pairs for name in (pair.first, pair.second)}
        if unknown := names - self.arms.keys():
            raise UserError(f"claim {self.number}: there is no arm {sorted(unknown)[0]!r}")
        if not (self.pairs or self.tests or self.missing):
            raise UserError(f"claim {self.number}: give pairs of arms, tests, or what is missing")


def load_claims() -> list[Claim]:
    """Returns all claims of `configs/claims`, by number."""
    values = [
        value
        for file in sorted((CONFIGS / "claims").glob("*.py"))
        for value in load_config(file, [])["claims"]
    ]
    return sorted(map(_claim, values), key=lambda claim: claim.number)


def _claim(values: Mapping[str, Any]) -> Claim:
    place, metric = f"claim {values.get('number')}", values.get("metric", "f1")
    sections, names = values.get("arms", {}), values.get("pairs", ())
    arms = {name: build(Arm, arm, f"{place}: arms.{name}") for name, arm in sections.items()}
    pairs = tuple(build(Pair, _pair_values(x, metric), f"{place}: pairs") for x in names)
    fields = {name: value for name, value in values.items() if name != "metric"}
    return build(Claim, {**fields, "arms": arms, "pairs": pairs}, place)


def _pair_values(pair: Mapping[str, Any] | Sequence[str], metric: str) -> dict[str, Any]:
    """Returns the fields of a pair, which may be just the names of the higher and the lower arm."""
    names = ("first", "second")
    own = pair if isinstance(pair, Mapping) else dict(zip(names, pair, strict=True))
    fields = {"metric": metric, **own}
    return {"margin": MARGIN if is_in_points(fields["metric"]) else 0.0, **fields}


def experiment_of(claim: Claim, seeds: Sequence[int], world: int) -> Experiment:
    """Returns the experiment of a claim; arms have the names of `arm_key`."""
    arms = {arm_key(arm): arm for arm in claim.arms.values()}
    return Experiment(arms, next(iter(arms)), training_seeds=tuple(seeds), world_seeds=(world,))


def decide(claim: Claim, rows: Mapping[Cell, Mapping[str, Any]]) -> dict[str, Any]:
    """Decides a claim by the finished cells of its experiment.

    Returns `verdict`, and `pairs`: the comparison of each one, see `comparison.compare_pair`, with
    its `text` and `verdict`. A claim holds if every pair does, and does not hold if one does not.
    """
    keys = {name: arm_key(arm) for name, arm in claim.arms.items()}

    def comparison_of(pair: Pair) -> dict[str, Any]:
        first, second = keys[pair.first], keys[pair.second]
        return compare_pair(dataclasses.replace(pair, first=first, second=second), rows)

    # All pairs of a claim are one family: the claim holds only if each of them does.
    pairs = adjust_for_family(map(comparison_of, claim.pairs))
    for pair, result in zip(claim.pairs, pairs, strict=True):
        result |= {"text": text_of(pair), "verdict": decide_pair(pair, result)}
    verdicts = {result["verdict"] for result in pairs}
    consensus = HOLDS if verdicts == {HOLDS} else UNDECIDED
    return {"verdict": FAILS if FAILS in verdicts else consensus, "pairs": pairs}


def text_of(pair: Pair) -> str:
    """Returns a pair in words: arms, metric and questions."""
    among = f", {pair.among}" if pair.among else ""
    versus = f" against {title_of(pair.second_metric)}" if pair.second_metric else ""
    return f"{pair.text} ({title_of(pair.metric)}{versus}{among})"


def reproduce(
    claims: Sequence[Claim], out: pathlib.Path, seeds: Sequence[int], world: int
) -> list[dict[str, Any]]:
    """Runs the experiments of claims and writes `claims.json` and `claims.md`.

    Finished cells are kept, and arms that claims share are trained once. Both files also keep the
    claims of earlier calls. Returns the row of each claim, see `run_claim`.
    """
    if any(claim.tests for claim in claims):
        _has_tests()  # an experiment before the tests may take hours
    out.mkdir(parents=True, exist_ok=True)
    own: dict[int, dict[str, Any]] = {}
    for claim in claims:
        own[claim.number] = run_claim(claim, out, seeds, world)
        # After each claim, so that an interrupted command leaves its results. The file is read
        # now: another call may have added claims during the hours of this experiment.
        rows = {row["number"]: row for row in load_results(out / "claims.json")} | own
        results = [rows[number] for number in sorted(rows)]
        write_json(out / "claims.json", results)
        write_text(out / "claims.md", page(results))
    return [*own.values()]


def load_results(file: pathlib.Path) -> list[dict[str, Any]]:
    """Returns the rows of `claims.json`; none if there is no such file."""
    rows: list[dict[str, Any]] = json.loads(file.read_text("utf-8")) if file.is_file() else []
    return rows


def run_claim(claim: Claim, out: pathlib.Path, seeds: Sequence[int], world: int) -> dict[str, Any]:
    """Decides a claim; returns JSON values.

    These are the fields of the claim without arms, `verdict`, `pairs` (see `decide`), `proof` (the
    verdict of its tests), and how it was measured: `seeds`, `world`, `command`, `commit`, `device`.
    """
    row = {name: getattr(claim, name) for name in ("number", "statement", "source", "missing")}
    row |= {"tests": list(claim.tests), "verdict": OPEN, "pairs": []}
    command = f"ragrl experiment reproduce --claims {claim.number}"
    if claim.pairs:
        numbers = ",".join(map(str, seeds))
        command += f" --training-seeds {numbers} --world-seed {world}"
        experiment = experiment_of(claim, seeds, world)
        row |= decide(claim, run_cells(experiment, cells_of(experiment), out / "cells"))
        row |= {"seeds": list(seeds), "world": world}
    if claim.tests:
        row["proof"] = prove(claim.tests)
        row["verdict"] = weaker(row["verdict"], row["proof"])
    return row | {"command": command, "commit": revision(), "device": device_name()}


def prove(tests: Sequence[str]) -> str:
    """Runs tests of the checkout; returns `HOLDS`, `FAILS`, or `OPEN` without a checkout.

    `UserError` if pytest is not installed, or cannot run the tests.
    """
    if not _has_tests():
        return OPEN
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    options: Any = {"capture_output": True, "text": True, "errors": "replace"}
    process = subprocess.run(command, cwd=CONFIGS.parent, **options)
    # Other codes do not concern the claim: pytest was interrupted, or there is no such test.
    if process.returncode not in VERDICTS:
        lines = f"no output\n{process.stdout}\n{process.stderr}".split("\n")
        lines = [line.strip() for line in lines if line.strip()]
        cause = next((x for x in reversed(lines) if x.startswith("ERROR")), lines[-1])
        raise UserError(
            f"pytest could not run {' '.join(tests)} (exit code {process.returncode}: {cause}): "
            f"run {' '.join(command)!r} in {CONFIGS.parent}, and correct the cause"
        )
    return VERDICTS[process.returncode]


VERDICTS = {0: HOLDS, 1: FAILS}  # by the exit code of pytest


def _has_tests() -> bool:
    """Whether this is a checkout with tests; raises `UserError` if pytest is not installed."""
    has_tests = (CONFIGS.parent / "tests").is_dir()
    if has_tests and importlib.util.find_spec("pytest") is None:
        raise UserError(
            "pytest is not installed, but tests decide a claim: install the extra `test` with "
            f"'pip install -e {CONFIGS.parent}[test]', or choose other claims with --claims"
        )
    return has_tests


def weaker(verdict: str, proof: str) -> str:
    """Returns the verdict of an experiment (`OPEN`: none) and of tests together."""
    if verdict == OPEN:
        return proof
    order = (FAILS, UNDECIDED, HOLDS)
    return verdict if proof == OPEN else min(verdict, proof, key=order.index)


def count_unfinished(
    claims: Sequence[Claim], out: pathlib.Path, seeds: Sequence[int], world: int
) -> tuple[int, int]:
    """Returns the numbers of trainings and of further evaluations that `reproduce` would run."""
    experiments = [experiment_of(claim, seeds, world) for claim in claims if claim.pairs]
    pairs = {(cell, training_cell(e, cell)) for e in experiments for cell in cells_of(e)}
    # Several arms may answer with the policies of one training.
    origins = {origin.folder for _, origin in pairs}
    others = {cell.folder for cell, _ in pairs} - origins

    def count_missing(folders: set[str]) -> int:
        return sum(not (out / "cells" / folder / "cell.json").is_file() for folder in folders)

    return count_missing(origins), count_missing(others)


def page(results: Sequence[Mapping[str, Any]]) -> str:
    """Renders results as Markdown: one row per pair, test or reason."""
    rows = [
        (row["number"] if not i else "", row["statement"] if not i else "", *line)
        for row in results
        for i, line in enumerate(evidence_of(row))
    ]
    return markdown_table(COLUMNS, rows)


def evidence_of(row: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """Returns lines of what, the difference, what could be seen, and the verdict."""
    lines = [(f"test `{test}`", "", "", row["proof"]) for test in row["tests"]]
    for pair in row["pairs"]:
        difference = "{:+.2f} [{:.2f}, {:.2f}]".format(pair["mean"], *pair["ci95"])
        lines.append((pair["text"], difference, points(pair["detectable"]), pair["verdict"]))
    if row["missing"]:
        lines.append((row["missing"], "", "", OPEN))
    return lines
