"""Experiments of several arms over several seeds (`ragrl experiment run FILE`).

An arm is a config with overrides. A cell is an arm with one seed each of training, world and warm
start. It is trained and evaluated in its own folder, so that an interrupted experiment resumes.
Arms that differ only in how they answer share the training.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jax_ragrl.config.ranges import Natural, Seed
from jax_ragrl.config.schema import build
from jax_ragrl.config.snapshot import load_saved_config, save_config
from jax_ragrl.errors import UserError
from jax_ragrl.experiments.measures import check_measure, is_of_training, with_facts
from jax_ragrl.experiments.stages import (
    IMITATION,
    POLICY,
    answer_again,
    check_imitation,
    check_unchanged,
    check_warm_up,
    ensure_imitation,
    ensure_warm_up,
    fixed_strategy,
    imitation,
    train_and_evaluate,
    warm_up_values,
)
from jax_ragrl.run.load import load_job
from jax_ragrl.run.overrides import load_config
from jax_ragrl.runtime.jsonl import write_json
from jax_ragrl.warmstart.make_demos import LABELS, find_labeler
from jax_ragrl.warmstart.warmup import load_warmup

# In the folder of a cell that shares a training: how it was trained, and the strategy.
TRAINING = "training.json"


@dataclasses.dataclass(frozen=True)
class Arm:
    """One arm of an experiment.

    Fields:
      config: the path of a config file.
      overrides: changes of the config, such as `recipe.tree.width=1`.
      warm_up: the path of a config of `ragrl warmup tiny`, whose policy the arm starts from; empty:
        the policy of the config.
      sft: the path of a config of `ragrl warmup sft`: before its reinforcement learning, the policy
        imitates demonstrations on training questions; empty: none.
      demos: the author of the demonstrations: `policy`, the policy itself (its correct rollouts),
        or `labels`, rules that read gold passages and answers (for MMOA-RAG `labels:answer`, too).
      answer_with: changes of the config for the test questions alone: the arm shares the training
        of the arm without them.
      strategy: a strategy that the trained system takes for every test question, such as
        `Planning`; empty: the system selects it.
    """

    config: str
    overrides: tuple[str, ...] = ()
    warm_up: str = ""
    sft: str = ""
    demos: str = POLICY
    answer_with: tuple[str, ...] = ()
    strategy: str = ""

    def __post_init__(self) -> None:
        if self.demos.partition(":")[0] not in (POLICY, LABELS):
            raise UserError(f"demos is {self.demos!r}: use {POLICY} or {LABELS}")

    @property
    def origin(self) -> Arm:
        """The arm with the same training that answers as it was trained."""
        return dataclasses.replace(self, answer_with=(), strategy="")


def arm_key(arm: Arm) -> str:
    """Returns a name for the content of an arm, so that equal arms share their cells."""
    # Later fields count if they are set, so that the cells of recorded results keep their names.
    first, later = dataclasses.astuple(arm)[:3], dataclasses.fields(arm)[3:]
    extras = {f.name: x for f in later if (x := getattr(arm, f.name)) != f.default}
    content = json.dumps((*first, extras) if extras else first)
    return _unique_name(pathlib.Path(arm.config), content)


def _unique_name(file: pathlib.Path, content: str) -> str:
    return f"{file.stem}-{hashlib.sha256(content.encode()).hexdigest()[:8]}"


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
    training_seeds: tuple[Seed, ...] = (0, 1, 2)
    world_seeds: tuple[Seed, ...] = (0,)
    warm_start_seeds: tuple[Seed, ...] = (0,)
    test_questions: Natural = 400

    def __post_init__(self) -> None:
        if self.baseline not in self.arms:
            raise UserError(
                f"baseline is {self.baseline!r}: use the name of an arm ({', '.join(self.arms)})"
            )
        for name in ("training_seeds", "world_seeds", "warm_start_seeds", "metrics"):
            if not getattr(self, name):
                raise UserError(f"{name} is empty: give at least one value")
        for metric in self.metrics:
            check_measure(metric)
            shared = [name for name, arm in self.arms.items() if arm != arm.origin]
            if is_of_training(metric) and shared:
                raise UserError(
                    f"{metric} is of a training, and {shared[0]} shares the training of another "
                    "arm: leave the metric or the arm out"
                )


class Cell(NamedTuple):
    """One training: an arm and its seeds."""

    arm: str
    training: int
    world: int
    warm_start: int

    @property
    def folder(self) -> str:
        return f"{self.arm}-t{self.training}-w{self.world}-s{self.warm_start}"

    @property
    def seeds(self) -> tuple[int, int, int]:
        """The seeds, which cells of different arms share if they can be paired."""
        return self.training, self.world, self.warm_start


def load_experiment(file: pathlib.Path) -> Experiment:
    """Reads the config file of an experiment; `UserError` for any other file."""
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


def training_cell(experiment: Experiment, cell: Cell) -> Cell:
    """Returns the cell whose training a cell shares; its own unless its arm answers otherwise."""
    arm = experiment.arms[cell.arm].origin
    names = (name for name, other in experiment.arms.items() if other == arm)
    return cell._replace(arm=next(names, arm_key(arm)))


def with_training_arms(experiment: Experiment) -> Experiment:
    """Returns an experiment that also has the arms whose training others share."""
    # Named by content, because the experiment has no name for them.
    arms = {arm_key(arm.origin): arm.origin for arm in experiment.arms.values()}
    missing = {name: arm for name, arm in arms.items() if arm not in experiment.arms.values()}
    return dataclasses.replace(experiment, arms={**experiment.arms, **missing})


def run_cells(
    experiment: Experiment, cells: Sequence[Cell], out: pathlib.Path
) -> dict[Cell, dict[str, Any]]:
    """Trains and evaluates cells that are not finished in `out`.

    Each has a folder there, and each warm-up, which cells share. Returns the rows of the cells, see
    `run_cell`, with what `measures.with_facts` adds. `UserError`, before any cell starts, if a
    config or a name is not valid, a config not that of a finished cell, or a seed changes no arm.
    """
    _check_seeds(experiment, {cell.arm for cell in cells}, out)
    experiment = with_training_arms(experiment)
    # All configs are read before the first training, so that a mistake costs nothing.
    for cell in cells:
        for one in (training_cell(experiment, cell), cell):
            values = cell_values(experiment, one, out)
            job, arm = load_job(values | {"policy": "tiny"}), experiment.arms[one.arm]
            if arm.warm_up:
                load_warmup(warm_up_values(arm.warm_up, one.warm_start))
            if arm.sft:
                imitation(values, arm.sft, out / one.folder)
            if arm.sft and arm.demos != POLICY and arm == arm.origin:
                find_labeler(job, arm.demos, str(values.get("system")))
            if (out / one.folder / "cell.json").is_file():
                check_cell(experiment, one, out)
        if name := experiment.arms[cell.arm].strategy:
            fixed_strategy(job, name)
    return {c: with_facts(run_cell(experiment, c, out), out / c.folder) for c in cells}


def _check_seeds(experiment: Experiment, arms: set[str], out: pathlib.Path) -> None:
    """Raises `UserError` if two seeds give equal cells, which a comparison would count twice."""
    experiment, known = with_training_arms(experiment), dict[str, tuple[int, int, int]]()
    for seeds in dict.fromkeys(cell.seeds for cell in cells_of(experiment)):
        configs = [cell_values(experiment, Cell(arm, *seeds), out) for arm in sorted(arms)]
        if (other := known.setdefault(repr(configs), seeds)) != seeds:
            raise UserError(
                f"the seeds {other} and {seeds} of training, world and warm start give equal cells,"
                " copies of one training: world_seeds need generated data, and warm_start_seeds a "
                "warm_up; give one seed"
            )


def cell_values(experiment: Experiment, cell: Cell, out: pathlib.Path) -> dict[str, Any]:
    values = _values_before_imitation(experiment, cell, out)
    # The answers of a shared training begin with the same weights as the training.
    if experiment.arms[cell.arm].sft:
        folder = out / training_cell(experiment, cell).folder
        values["policy"] = str(folder / IMITATION / "checkpoint")
    return values


def _values_before_imitation(
    experiment: Experiment, cell: Cell, out: pathlib.Path
) -> dict[str, Any]:
    arm = experiment.arms[cell.arm]
    try:
        overrides = [f"--config.{change}" for change in (*arm.overrides, *arm.answer_with)]
        values = load_config(pathlib.Path(arm.config), overrides)
    except UserError as error:
        raise UserError(f"arm {cell.arm}: {error}") from error
    if arm.answer_with:
        # It trains nothing here, and may name roles that the system of the answers lacks.
        values.pop("schedule", None)
    values["seed"] = cell.training
    # Files are the same for all seeds of a world.
    if values["data"].get("world"):
        values["data"]["world"]["seed"] = cell.world
    # A frozen test set: all arms answer the same questions.
    values["run"] = {**values["run"], "test_questions": experiment.test_questions}
    if arm.warm_up:
        values["policy"] = str(warm_folder(experiment, cell, out) / "checkpoint")
    return values


def warm_folder(experiment: Experiment, cell: Cell, out: pathlib.Path) -> pathlib.Path:
    """Returns the folder of the warm-up of a cell, which cells of equal warm-ups share."""
    file = pathlib.Path(experiment.arms[cell.arm].warm_up)
    files = (pathlib.Path(arm.warm_up) for arm in experiment.arms.values())
    # The first file of a name has the plain one: an arm that is added later renames no folder.
    is_first = file == next(other for other in files if other.stem == file.stem)
    name = file.stem if is_first else _unique_name(file, str(file))
    return out / f"{name}-s{cell.warm_start}"


def check_cell(experiment: Experiment, cell: Cell, out: pathlib.Path) -> None:
    """Raises `UserError` unless a finished cell, and the stages before it, had the present configs.

    The experiment is that of `with_training_arms`, here and in `run_cell`.
    """
    arm, origin = experiment.arms[cell.arm], training_cell(experiment, cell)
    folder, former_out = out / cell.folder, _former_out(arm, out / cell.folder, out)
    check_unchanged(folder / "config.json", cell_values(experiment, cell, former_out))
    if origin != cell:
        check_unchanged(folder / TRAINING, _training_settings(experiment, cell, former_out))
        check_cell(experiment, origin, out)
        return
    if arm.warm_up:
        check_warm_up(arm.warm_up, cell.warm_start, warm_folder(experiment, cell, out))
    if arm.sft:
        values = _values_before_imitation(experiment, cell, former_out)
        check_imitation(values, arm.sft, arm.demos, folder)


def _former_out(arm: Arm, folder: pathlib.Path, out: pathlib.Path) -> pathlib.Path:
    """Returns the folder of the experiment when a cell ran; a finished one may have moved."""
    file = folder / "config.json"
    if not (file.is_file() and (arm.warm_up or arm.sft)):
        return out
    # OUT/WARM_UP/checkpoint, or after an imitation OUT/CELL/imitation/checkpoint.
    start = pathlib.Path(load_saved_config(file).get("policy", "")).parent.parent
    return start.parent if arm.sft else start


def _training_settings(experiment: Experiment, cell: Cell, out: pathlib.Path) -> dict[str, Any]:
    """Returns the config of the training that a cell shares, and the strategy of its answers."""
    strategy = experiment.arms[cell.arm].strategy
    return cell_values(experiment, training_cell(experiment, cell), out) | {"strategy": strategy}


def run_cell(experiment: Experiment, cell: Cell, out: pathlib.Path) -> dict[str, Any]:
    """Trains and evaluates one cell, or reads its finished row.

    The row has the scores per question and summary of `result_row`, `questions` (their
    fingerprint), the `totals` of the training and its `wall_s`.
    """
    folder = out / cell.folder
    if (file := folder / "cell.json").is_file():
        row: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return row
    arm, origin = experiment.arms[cell.arm], training_cell(experiment, cell)
    if origin != cell:
        run_cell(experiment, origin, out)
    start, values = time.perf_counter(), cell_values(experiment, cell, out)
    folder.mkdir(parents=True, exist_ok=True)
    if origin != cell:
        settings = _training_settings(experiment, cell, out)
        save_config(folder / TRAINING, settings, renew=True)
        row = answer_again(values, arm.strategy, out / origin.folder, folder)
    else:
        if arm.warm_up:
            ensure_warm_up(arm.warm_up, cell.warm_start, warm_folder(experiment, cell, out))
        if arm.sft:
            start_values = _values_before_imitation(experiment, cell, out)
            ensure_imitation(start_values, arm.sft, arm.demos, folder)
        row = train_and_evaluate(values, folder)
    # Written last, so that the file marks a finished cell.
    row["wall_s"] = round(time.perf_counter() - start, 1)
    write_json(file, row)
    return row


def finished_part(
    experiment: Experiment, out: pathlib.Path
) -> tuple[Experiment, dict[Cell, dict[str, Any]]]:
    """Returns the finished cells of an experiment, and the experiment of the arms that have some.

    An arm counts if it shares seeds with a finished cell of the baseline. `UserError` if none is
    finished, or a cell had another config.
    """
    files = {cell: out / cell.folder / "cell.json" for cell in cells_of(experiment)}
    files = {cell: file for cell, file in files.items() if file.is_file()}
    with_origins = with_training_arms(experiment)
    for cell in files:
        check_cell(with_origins, cell, out)
    rows = {
        cell: with_facts(json.loads(file.read_text(encoding="utf-8")), file.parent)
        for cell, file in files.items()
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


def share_of(experiment: Experiment, number: int, count: int) -> list[Cell]:
    """Returns the cells of process `number` of `count`, from 1, such as a task of a Slurm array.

    Cells that share a training are in one share.
    """
    if not 1 <= number <= count:
        raise UserError(f"share {number}/{count}: the first number is from 1 to the second one")
    origins = {cell: training_cell(experiment, cell) for cell in cells_of(experiment)}
    # Two processes must not run the same training at once.
    own = list(dict.fromkeys(origins.values()))[number - 1 :: count]
    return [cell for cell, origin in origins.items() if origin in own]
