"""Real cells of one small training step: later answers, and imitation before the training."""

import fcntl
import pathlib
import threading
import time

import pytest

from jax_ragrl.experiments import stages
from jax_ragrl.experiments.arms import (
    Arm,
    Experiment,
    cells_of,
    finished_part,
    run_cells,
    training_cell,
)
from jax_ragrl.experiments.measures import values_of
from jax_ragrl.run.lock import FILE, unlock_folder
from jax_ragrl.runtime.jsonl import read_rows, write_json
from jax_ragrl.warmstart.unfinished import claim_folder

SMALL = ("data.world.size=40", "run.steps=1", "run.questions_per_step=2", "run.dev_questions=2")
# One program of each kind.
SMALL += ("shapes.prompt_lengths=(256,)", "shapes.batch_sizes=(16,)", "packing.row_lengths=(256,)")
SMALL += ("run.eval_before_training=False",)
C3PO = "configs/tiny/c3po.py"
BASE = Arm(C3PO, SMALL)


def run_rows(experiment: Experiment, out: pathlib.Path) -> dict[str, dict]:
    return {c.arm: row for c, row in run_cells(experiment, cells_of(experiment), out).items()}


def finished_rows(experiment: Experiment, out: pathlib.Path) -> dict[str, dict]:
    return {cell.arm: row for cell, row in finished_part(experiment, out)[1].items()}


@pytest.mark.parametrize("is_done", [True, False], ids=["done", "killed"])
def test_a_warm_up_of_another_process_is_awaited(is_done, tmp_path, monkeypatch, capsys):
    """A result is used; if the process ends without one, the warm-up is continued here."""
    config, folder = "configs/tiny/warmup_opera.py", tmp_path / "warm"
    folder.mkdir()
    calls = []

    def warm_up(values, out):
        claim_folder(values, out)
        calls.append(out)
        return {}

    monkeypatch.setattr(stages, "warm_up", warm_up)
    # The other process is this one: it holds the lock by a file that the library does not know.
    file = (folder / FILE).open("w")
    file.write("process 7 on a host")
    file.flush()
    fcntl.flock(file, fcntl.LOCK_EX)

    def end():
        if is_done:
            write_json(folder / "done.json", {})
        file.close()

    started = time.monotonic()
    threading.Timer(1.0, end).start()
    stages.ensure_warm_up(config, 0, folder)
    assert time.monotonic() - started > 0.9 and calls == ([] if is_done else [folder])
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"ragrl: waiting for {folder / 'done.json'} of process 7 on a host"
    unlock_folder(folder)


@pytest.mark.slow
def test_later_answers_are_those_of_the_trained_policy(tmp_path: pathlib.Path):
    experiment = Experiment(
        {
            "trained": BASE,
            "again": Arm(C3PO, SMALL, answer_with=("run.dev_questions=3",)),  # changes no answer
            "other search": Arm(C3PO, SMALL, answer_with=("index.kind=bm25",)),
            "planning": Arm(C3PO, SMALL, strategy="Planning"),
        },
        "trained",
        training_seeds=(0,),
        test_questions=12,
    )
    rows = run_rows(experiment, tmp_path)
    assert rows == finished_rows(experiment, tmp_path)
    assert rows["again"]["scores"] == rows["trained"]["scores"]
    assert rows["again"]["facts"] == rows["trained"]["facts"] and len(rows["again"]["facts"]) == 12
    assert len({row["questions"] for row in rows.values()}) == 1
    for name in ("other search", "planning"):
        assert rows[name]["facts"] != rows["trained"]["facts"]
    assert (values_of(rows["planning"], "strategy=Planning") == 100).all()
    assert rows["trained"]["totals"] and not rows["planning"]["totals"]
    assert values_of(rows["trained"], "training:valid_frac/router")[0] > 0
    # One training: only one folder has a checkpoint.
    assert len(list(tmp_path.glob("*/checkpoints"))) == 1


@pytest.mark.slow
def test_a_policy_learns_from_demonstrations_before_its_training(tmp_path, monkeypatch):
    config = "configs/tiny/mao_arag.py"
    monkeypatch.setattr(stages, "DEMO_QUESTIONS", 6)
    none = (*SMALL[:1], "run.steps=0", "run.dev_questions=2")
    arm = Arm(config, none, sft="configs/tiny/sft_c3po.py", demos="labels")
    arms = {"taught": arm, "untaught": Arm(config, none)}
    experiment = Experiment(arms, "untaught", training_seeds=(3,), test_questions=8)
    rows = run_rows(experiment, tmp_path)
    assert rows == finished_rows(experiment, tmp_path)
    (cell,) = (cell for cell in cells_of(experiment) if cell.arm == "taught")
    folder = tmp_path / cell.folder
    assert list(read_rows(folder / "demos.jsonl"))
    assert (folder / "imitation" / "checkpoint").is_dir()
    assert rows["taught"]["facts"] != rows["untaught"]["facts"]
    assert training_cell(experiment, cell) == cell
