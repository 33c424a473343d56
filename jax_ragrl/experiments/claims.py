"""Claims of the papers and how each one is decided (`ragrl reproduce`).

A claim is decided by tests, if it follows from the formulas, or by an experiment: pairs of arms of
which one should score higher. What cannot be decided here says why.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pathlib
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from jax_ragrl.config.overrides import load_config
from jax_ragrl.config.schema import build
from jax_ragrl.config.shipped_configs import CONFIGS
from jax_ragrl.errors import UserError
from jax_ragrl.experiments.arms import Arm, Cell, Experiment, cells_of, run_cells
from jax_ragrl.experiments.comparison import compare_pair, decide_pairs
from jax_ragrl.experiments.seeds import markdown
from jax_ragrl.runtime.jsonl import write_json

PAPERS = ("c3po", "mmoa_rag", "coda", "mao_arag", "opera", "across")  # files in configs/claims
HOLDS, FAILS, UNDECIDED, OPEN = "holds", "does not hold", "undecided", "open"


@dataclasses.dataclass(frozen=True)
class Claim:
    """A claim of a paper.

    Fields:
      number: its number.
      statement: the claim.
      source: its place in the paper, with the paper's own figure if there is one.
      arms: the arms of the experiment by name.
      pairs: pairs of arms (higher, lower); the claim holds if the first of each scores higher.
      metric: the metric of the scores.
      tests: tests that prove the claim, as `file::name`.
      missing: what cannot be decided, and why.
    """

    number: int
    statement: str
    source: str
    arms: Mapping[str, Arm] = dataclasses.field(default_factory=dict)
    pairs: tuple[tuple[str, str], ...] = ()
    metric: str = "f1"
    tests: tuple[str, ...] = ()
    missing: str = ""

    def __post_init__(self) -> None:
        if unknown := {name for pair in self.pairs for name in pair} - self.arms.keys():
            raise UserError(f"claim {self.number}: there is no arm {sorted(unknown)[0]!r}")
        if not (self.pairs or self.tests or self.missing):
            raise UserError(f"claim {self.number}: give pairs of arms, tests, or what is missing")


def load_claims() -> list[Claim]:
    """Returns all claims of `configs/claims`, by number."""
    values = [
        value
        for paper in PAPERS
        for value in load_config(CONFIGS / "claims" / f"{paper}.py", [])["claims"]
    ]
    return sorted(map(_claim, values), key=lambda claim: claim.number)


def _claim(values: Mapping[str, Any]) -> Claim:
    place = f"claim {values.get('number')}"
    arms = {
        name: build(Arm, arm, f"{place}: arms.{name}")
        for name, arm in values.get("arms", {}).items()
    }
    return build(Claim, {**values, "arms": arms}, place)


def experiment_of(claim: Claim, seeds: Sequence[int], world: int) -> Experiment:
    """Returns the experiment of a claim; arms have the names of `arm_key`.

    Args:
      claim: a claim with arms.
      seeds: seeds of training.
      world: the seed of the generated world, which no config was tuned on.
    """
    arms = {arm_key(arm): arm for arm in claim.arms.values()}
    return Experiment(
        arms, next(iter(arms)), (claim.metric,), training_seeds=tuple(seeds), world_seeds=(world,)
    )


def arm_key(arm: Arm) -> str:
    """Returns a name for the content of an arm, so that claims with equal arms share its cells."""
    content = json.dumps(dataclasses.astuple(arm))
    digest = hashlib.sha256(content.encode()).hexdigest()
    return f"{pathlib.Path(arm.config).stem}-{digest[:8]}"


def decide(claim: Claim, rows: Mapping[Cell, Mapping[str, Any]]) -> dict[str, Any]:
    """Decides a claim by the finished cells of its experiment.

    Args:
      claim: a claim with pairs.
      rows: the rows of its cells.

    Returns:
      `verdict`, and `pairs`: the comparison of each one, see `comparison.compare`, with `higher`
      and `lower`, the names of the arms. A claim holds if every pair does, and does not hold if one
      is reversed; both the interval and the test adjusted for all pairs must exclude 0.
    """
    keys = {name: arm_key(arm) for name, arm in claim.arms.items()}
    results = decide_pairs(
        compare_pair(keys[lower], keys[higher], claim.metric, rows)
        | {"higher": higher, "lower": lower}
        for higher, lower in claim.pairs
    )
    sides = [result["verdict"] for result in results]
    consensus = HOLDS if set(sides) == {"higher"} else UNDECIDED
    decision = FAILS if "lower" in sides else consensus
    return {"verdict": decision, "pairs": results}


def reproduce(
    claims: Sequence[Claim], out: pathlib.Path, seeds: Sequence[int], world: int
) -> list[dict[str, Any]]:
    """Runs the experiments of claims and writes `claims.json` and `claims.md`.

    Finished cells are kept, and arms that claims share are trained once.

    Args:
      claims: the claims.
      out: output folder.
      seeds: seeds of training.
      world: the seed of the generated world.

    Returns:
      A row per claim: its fields without arms, `verdict` and `pairs`.
    """
    out.mkdir(parents=True, exist_ok=True)
    results = []
    for claim in claims:
        row = {name: getattr(claim, name) for name in ("number", "statement", "source", "missing")}
        row |= {"tests": list(claim.tests), "verdict": OPEN, "pairs": []}
        if claim.pairs:
            experiment = experiment_of(claim, seeds, world)
            row |= decide(claim, run_cells(experiment, cells_of(experiment), out / "cells"))
        if claim.tests:
            row["proof"] = prove(claim.tests)
            row["verdict"] = weaker(row["verdict"], row["proof"])
        results.append(row)
        # After each claim, so that an interrupted command leaves its results.
        write_json(out / "claims.json", results)
        (out / "claims.md").write_text(page(results), encoding="utf-8")
    return results


def prove(tests: Sequence[str]) -> str:
    """Runs tests of the checkout; returns `HOLDS`, `FAILS`, or `OPEN` without a checkout.

    Args:
      tests: as in `Claim`.
    """
    root = CONFIGS.parent
    if not (root / "tests").is_dir():
        return OPEN
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    return FAILS if subprocess.run(command, cwd=root, capture_output=True).returncode else HOLDS


def weaker(verdict: str, proof: str) -> str:
    """Returns the verdict of an experiment (`OPEN`: none) and of tests together."""
    if verdict == OPEN:
        return proof
    order = (FAILS, UNDECIDED, HOLDS)
    return verdict if proof == OPEN else min(verdict, proof, key=order.index)


def count_unfinished(
    claims: Sequence[Claim], out: pathlib.Path, seeds: Sequence[int], world: int
) -> int:
    """Returns the number of trainings that `reproduce` would run.

    Args:
      claims: the claims.
      out: output folder.
      seeds: seeds of training.
      world: the seed of the generated world.
    """
    experiments = [experiment_of(claim, seeds, world) for claim in claims if claim.pairs]
    folders = {cell.folder for experiment in experiments for cell in cells_of(experiment)}
    return sum(not (out / "cells" / folder / "cell.json").is_file() for folder in folders)


def page(results: Sequence[Mapping[str, Any]]) -> str:
    """Renders results as Markdown: one row per pair, test or reason.

    Args:
      results: the rows of `reproduce`.
    """
    rows = [
        (
            row["number"] if not i else "",
            row["statement"] if not i else "",
            evidence,
            difference,
            decision,
        )
        for row in results
        for i, (evidence, difference, decision) in enumerate(_lines(row))
    ]
    return markdown(("#", "claim", "evidence", "difference, 95 %", "verdict"), rows)


def _lines(row: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    lines = [(f"test `{test}`", "", row["proof"]) for test in row["tests"]]
    for pair in row["pairs"]:
        difference = f"{pair['mean']:+.2f} [{pair['ci95'][0]}, {pair['ci95'][1]}]"
        lines.append((f"{pair['higher']} over {pair['lower']}", difference, pair["verdict"]))
    if row["missing"]:
        lines.append((row["missing"], "", OPEN))
    return lines
