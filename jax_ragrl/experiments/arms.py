"""Experiments of several arms over several seeds (`ragrl experiment FILE`).

An arm is a config with overrides. A cell is an arm with one seed each of training, world and warm
start. It is trained and evaluated in its own folder, so that an interrupted experiment resumes.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jax_ragrl.config.overrides import load_config
from jax_ragrl.config.schema import build
from jax_ragrl.corpus.questions import fingerprint
from jax_ragrl.errors import UserError
from jax_ragrl.experiments.experiment import result_row
from jax_ragrl.run.components import build_components
from jax_ragrl.run.config import Job, load_job
from jax_ragrl.run.inference import evaluate_models
from jax_ragrl.run.predictions import write_predictions
from jax_ragrl.run.workdir import claim_workdir
from jax_ragrl.runtime.jsonl import read_rows, write_json
from jax_ragrl.training.loop import acting_models, train
from jax_ragrl.warmstart.warmup import load_warmup, warm_up

# Sums over the steps of a training, the x axes on which arms may be matched.
TOTALS = ("llm_calls", "retrieval_calls", "time/rollout_s", "time/train_s")
# Metrics of roles, of which a row holds the means over the steps.
ROLE_METRICS = ("/role_gradient/", "/advantage/std/", "/valid_frac/")


@dataclasses.dataclass(frozen=True)
class Arm:
    """One arm of an experiment.

    Fields:
      config: the path of a config file.
      overrides: changes of the config, such as `recipe.tree.width=1`.
      warm_up: the path of a config of `ragrl warmup`, whose policy the arm starts from; empty: the
        policy of the config.
    """

    config: str
    overrides: tuple[str, ...] = ()
    warm_up: str = ""


@dataclasses.dataclass(frozen=True)
class Experiment:
    """The config of an experiment.

    Fields:
      arms: the arms by name.
      baseline: the name of the arm with which the others are compared.
      metrics: the metrics of the comparison; the first one is the headline.
      training_seeds: seeds of initialization, order of questions and sampling.
      world_seeds: seeds of the generated encyclopedia, with its questions; not used for files.
      warm_start_seeds: seeds of the warm-ups.
      test_questions: the number of test questions, the same ones for all arms of a world.
    """

    arms: Mapping[str, Arm]
    baseline: str
    metrics: tuple[str, ...] = ("f1",)
    training_seeds: tuple[int, ...] = (0, 1, 2)
    world_seeds: tuple[int, ...] = (0,)
    warm_start_seeds: tuple[int, ...] = (0,)
    test_questions: int = 400

    def __post_init__(self) -> None:
        if self.baseline not in self.arms:
            raise UserError(
                f"baseline is {self.baseline!r}: use the name of an arm ({', '.join(self.arms)})"
            )
        for name in ("training_seeds", "world_seeds", "warm_start_seeds", "metrics"):
            if not getattr(self, name):
                raise UserError(f"{name} is empty: give at least one value")


class Cell(NamedTuple):
    """One training: an arm and its seeds."""

    arm: str
    training: int
    world: int
    warm_start: int

    @property
    def folder(self) -> str:
        """The name of the folder of the cell."""
        return f"{self.arm}-t{self.training}-w{self.world}-s{self.warm_start}"

    @property
    def seeds(self) -> tuple[int, int, int]:
        """The seeds, which cells of different arms share if they can be paired."""
        return self.training, self.world, self.warm_start


def load_experiment(file: pathlib.Path) -> Experiment:
    """Reads the config file of an experiment, see `Experiment`.

    Raises:
      UserError: the file is not the config of an experiment.
    """
    values = load_config(file, [])
    arms = {name: build(Arm, arm, f"arms.{name}") for name, arm in values.pop("arms", {}).items()}
    return build(Experiment, {**values, "arms": arms}, "experiment")


def cells_of(experiment: Experiment) -> list[Cell]:
    """Returns all cells, grouped by their seeds, the baseline first."""
    # The arms of one seed follow each other, and the baseline is the partner of all of them, so
    # that an interrupted experiment can be compared.
    arms = sorted(experiment.arms, key=lambda arm: arm != experiment.baseline)
    seeds = itertools.product(
        experiment.training_seeds, experiment.world_seeds, experiment.warm_start_seeds
    )
    return [Cell(arm, *seed) for seed in seeds for arm in arms]


def run_cells(
    experiment: Experiment, cells: Sequence[Cell], out: pathlib.Path
) -> dict[Cell, dict[str, Any]]:
    """Trains and evaluates cells that are not finished in `out`.

    Args:
      experiment: the arms.
      cells: the cells to run, all or the share of one process.
      out: holds one folder per cell, and one per warm-up, which cells share.

    Returns:
      The rows of the cells, see `run_cell`.

    Raises:
      UserError: a config is not valid; no cell has started.
    """
    # All configs are read before the first training, so that a mistake costs nothing.
    values = {cell: cell_values(experiment, cell, out) for cell in cells}
    for cell in cells:
        load_job(values[cell] | {"policy": "tiny"})
    return {cell: run_cell(experiment, cell, values[cell], out) for cell in cells}


def cell_values(experiment: Experiment, cell: Cell, out: pathlib.Path) -> dict[str, Any]:
    """Returns the config of a cell.

    Args:
      experiment: the arms.
      cell: the arm and its seeds.
      out: the folder of the experiment.
    """
    arm = experiment.arms[cell.arm]
    try:
        overrides = [f"--config.{change}" for change in arm.overrides]
        values = load_config(pathlib.Path(arm.config), overrides)
    except UserError as error:
        raise UserError(f"arm {cell.arm}: {error}") from error
    values["seed"] = cell.training
    # Files are the same for all seeds of a world.
    if values["data"].get("world"):
        values["data"]["world"]["seed"] = cell.world
    # A frozen test set: all arms answer the same questions.
    values["run"] = {**values["run"], "test_questions": experiment.test_questions}
    if arm.warm_up:
        values["policy"] = str(warm_folder(arm, cell, out) / "checkpoint")
    return values


def warm_folder(arm: Arm, cell: Cell, out: pathlib.Path) -> pathlib.Path:
    """Returns the folder of the warm-up of a cell, which cells of equal warm-ups share."""
    return out / f"{pathlib.Path(arm.warm_up).stem}-s{cell.warm_start}"


def run_cell(
    experiment: Experiment, cell: Cell, values: dict[str, Any], out: pathlib.Path
) -> dict[str, Any]:
    """Trains and evaluates one cell, or reads its finished row.

    Args:
      experiment: the arms.
      cell: the arm and its seeds.
      values: the config of the cell.
      out: the folder of the experiment.

    Returns:
      The scores per question and summary of `result_row`, `questions` (their fingerprint), the
      `totals` and `means` of the training and its `wall_s`.
    """
    folder = out / cell.folder
    if (file := folder / "cell.json").is_file():
        row: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return row
    arm, start = experiment.arms[cell.arm], time.perf_counter()
    if arm.warm_up:
        _ensure_warm_up(arm.warm_up, cell.warm_start, warm_folder(arm, cell, out))
    row = _train_and_evaluate(claim_workdir(values, folder), folder)
    # Written last, so that the file marks a finished cell.
    row["wall_s"] = round(time.perf_counter() - start, 1)
    write_json(file, row)
    return row


def _ensure_warm_up(config: str, seed: int, folder: pathlib.Path) -> None:
    """Runs a warm-up, unless its folder holds a finished one."""
    if not (folder / "done.json").is_file():
        values = load_config(pathlib.Path(config), []) | {"seed": seed}
        write_json(folder / "done.json", warm_up(*load_warmup(values), folder))


def _train_and_evaluate(job: Job, folder: pathlib.Path) -> dict[str, Any]:
    parts = build_components(job, folder)
    models = acting_models(train(job, parts, folder))
    questions = parts.questions["test"][: job.run.test_questions]
    result = evaluate_models(job, parts, models, questions)
    result.check_answered()
    write_predictions(folder, "test", questions, result)
    row = {**result_row(result), "questions": fingerprint(questions)}
    return row | {"totals": training_totals(folder), "means": training_means(folder)}


def training_totals(folder: pathlib.Path) -> dict[str, float]:
    """Returns the total calls, searches, tokens and seconds of the training of a run."""
    rows = list(read_rows(folder / "metrics.jsonl"))
    # Runs of earlier versions lack some of these metrics.
    names = [name for name in (*TOTALS, "policy_tokens") if any(name in row for row in rows)]
    return {name: round(sum(row.get(name) or 0.0 for row in rows), 1) for name in names}


def training_means(folder: pathlib.Path) -> dict[str, float]:
    """Returns the means of the metrics of roles over the steps that have them."""
    values: dict[str, list[float]] = {}
    for row in read_rows(folder / "metrics.jsonl"):
        for name, x in row.items():
            # Runs with several policies have the name of the policy before that of the metric.
            if x is not None and any(part in f"/{name}" for part in ROLE_METRICS):
                values.setdefault(name, []).append(x)
    return {name: round(sum(xs) / len(xs), 6) for name, xs in sorted(values.items())}


def finished_part(
    experiment: Experiment, out: pathlib.Path
) -> tuple[Experiment, dict[Cell, dict[str, Any]]]:
    """Returns the finished cells of an experiment, and the experiment of the arms that have some.

    An arm counts if it shares seeds with a finished cell of the baseline.

    Args:
      experiment: the arms.
      out: the folder of the experiment.

    Raises:
      UserError: no cell of the baseline is finished.
    """
    files = {cell: out / cell.folder / "cell.json" for cell in cells_of(experiment)}
    rows = {
        cell: json.loads(file.read_text(encoding="utf-8"))
        for cell, file in files.items()
        if file.is_file()
    }
    seeds = {cell.seeds for cell in rows if cell.arm == experiment.baseline}
    if not seeds:
        raise UserError(
            f"{out} holds no finished cell of the baseline {experiment.baseline}, with which arms "
            "are compared: train it first"
        )
    partners = {cell.arm for cell in rows if cell.seeds in seeds}
    arms = {name: arm for name, arm in experiment.arms.items() if name in partners}
    partner_rows = {cell: row for cell, row in rows.items() if cell.arm in partners}
    return dataclasses.replace(experiment, arms=arms), partner_rows


def share_of(cells: Sequence[Cell], number: int, count: int) -> list[Cell]:
    """Returns the cells of one of several processes, such as a task of a Slurm array.

    Args:
      cells: all cells.
      number: the number of the process, from 1 to `count`.
      count: the number of processes.

    Raises:
      UserError: `number` is not from 1 to `count`.
    """
    if not 1 <= number <= count:
        raise UserError(f"share {number}/{count}: the first number is from 1 to the second one")
    return list(cells[number - 1 :: count])
