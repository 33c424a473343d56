"""Commands that train with reinforcement learning: `quickstart`, `train` and `experiment`."""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Sequence
from typing import Any

from jax_ragrl.cli.common import (
    QUICKSTART_CONFIG,
    REAL_CONFIG,
    REAL_WARM_START,
    AddCommand,
    parse_numbers,
    parse_ranges,
    show,
)
from jax_ragrl.config.schema import local
from jax_ragrl.errors import UserError
from jax_ragrl.run.overrides import load_config, override

# Keys that the option --seed sets.
SEED_KEYS = frozenset({"--config.seed", "--config.data.world.seed"})


def add_quickstart(command: AddCommand) -> None:
    summary = "train C-3PO's router on the synthetic corpus, evaluate it and write a report"
    sub = command("quickstart", run_quickstart, summary, takes_config=True)
    sub.add_argument("--seed", type=int, default=0, help="random seed of the data and of training")
    sub.add_argument(
        "--workdir",
        type=local,
        help="folder of the run (default: runs/quickstart-SEED, or runs/real-SEED)",
    )
    real = "train a pretrained language model on real questions instead (MMOA-RAG, SmolLM2)"
    sub.add_argument("--real", action="store_true", help=real)
    sub.add_argument(
        "--warm-questions",
        type=int,
        default=120,
        help="with --real: questions whose labels the policy imitates before the training",
    )


def add_train(command: AddCommand) -> None:
    sub = command("train", run_train, "train the system of a config", takes_config=True)
    sub.add_argument(
        "--workdir", type=local, required=True, help="folder of the run; an existing run resumes"
    )
    start = (
        "start from the trained policies of another run, with a fresh optimizer: RUN, RUN@best or "
        "RUN@STEP. Without --config=FILE, its config is used"
    )
    sub.add_argument("--from", dest="start_from", default="", metavar="RUN", help=start)


def add_experiment(command: AddCommand) -> None:
    summary = "train arms of an experiment over several seeds and compare them"
    sub = command("experiment run", run_experiment, summary)
    file = "config file of the experiment, such as configs/experiments/gains.py:coda"
    sub.add_argument("file", type=local, metavar="FILE[:ARGUMENT]", help=file)
    out = "output folder (default: runs/NAME of the file); finished cells are kept"
    sub.add_argument("--out", type=local, help=out)
    share = "run one share of the cells only, such as 3/8 in task 3 of a Slurm array of 8"
    sub.add_argument("--share", default="1/1", metavar="I/N", help=share)
    comparison_only = "train nothing: compare the cells that are finished"
    sub.add_argument("--finished", action="store_true", help=comparison_only)
    summary = "decide claims of the papers"
    _add_claim_options(command("experiment reproduce", run_reproduce, summary))


def _add_claim_options(sub: argparse.ArgumentParser) -> None:
    sub.epilog = (
        "Experiments train arms of configs/tiny on a generated world and compare them; tests prove "
        "what follows from formulas. Trainings take minutes each and are kept in --out."
    )
    sub.add_argument("--claims", default="", help="numbers of claims, such as 1,6-9 (default: all)")
    out = pathlib.Path("runs/claims")
    sub.add_argument("--out", type=local, default=out, help="output folder (resumable)")
    sub.add_argument("--training-seeds", default="0,1,2", help="comma-separated seeds of training")
    sub.add_argument("--world-seed", type=int, default=100, help="seed of the generated world")
    sub.add_argument("--dry-run", action="store_true", help="only count the trainings")


def run_quickstart(options: argparse.Namespace) -> None:
    if conflicts := sorted({text.partition("=")[0] for text in options.config} & SEED_KEYS):
        raise UserError(
            f"{conflicts[0]} is not for quickstart, which has one seed for data and training: give "
            "--seed"
        )
    # A folder per seed, so that a second call with another seed does not resume the first run.
    name = "real" if options.real else "quickstart"
    workdir = options.workdir or pathlib.Path("runs") / f"{name}-{options.seed}"
    values = load_config(REAL_CONFIG if options.real else QUICKSTART_CONFIG, options.config)
    from jax_ragrl.runtime.multihost import is_process_zero, join

    join()  # jax.distributed must start before JAX looks for devices
    from jax_ragrl.experiments.experiment import quickstart
    from jax_ragrl.experiments.real import real_quickstart
    from jax_ragrl.run.workdir import claim_workdir
    from jax_ragrl.runtime.compile_cache import enable_compile_cache

    enable_compile_cache(workdir)
    values["seed"] = options.seed
    if options.real:
        warm_values = load_config(REAL_WARM_START, ["--config.data.demos=demos.jsonl"])
        real_quickstart(values, warm_values, workdir, options.warm_questions)
    else:
        # One seed for both, so that runs with different seeds differ in their data, too.
        if values["data"].get("world"):
            values["data"]["world"]["seed"] = options.seed
        quickstart(claim_workdir(values, workdir), workdir)
    if is_process_zero():
        _print_facts(workdir)
        print(f"wrote {workdir / 'summary.json'} and {workdir / 'report.html'}")


def run_train(options: argparse.Namespace) -> None:
    values = _train_values(options.start_from, options.config)
    from jax_ragrl.runtime.multihost import is_process_zero, join

    join()  # jax.distributed must start before JAX looks for devices
    from jax_ragrl.llm.cache import print_hits
    from jax_ragrl.run.build import build_components
    from jax_ragrl.run.workdir import claim_workdir
    from jax_ragrl.runtime.compile_cache import enable_compile_cache
    from jax_ragrl.training.loop import train

    job = claim_workdir(values, options.workdir)
    enable_compile_cache(options.workdir)
    train(job, build_components(job, options.workdir), options.workdir)
    print_hits()
    if is_process_zero():
        _print_facts(options.workdir)


def _print_facts(workdir: pathlib.Path) -> None:
    """Prints the data, models and scores of a run, and the commands that come next."""
    from jax_ragrl.report.build import gain, origin, results, system_title
    from jax_ragrl.report.load import load_run
    from jax_ragrl.training.log import METRICS

    if not (workdir / METRICS).is_file():
        return  # run.steps=0: there is nothing to describe
    # From the files, so that a report says the same.
    run = load_run(workdir)
    for name, value in (origin(run.config) | results(run)).items():
        show(f"{name + ':':<20} {value}")
    if scores := run.summary.get("accuracy"):
        print(f"Test questions ({run.summary.get('metric', 'share')}):")
        for name, score in scores.items():
            print(f"  {system_title(name):<36} {score!s:>6}")
    for key in ("gain", "gain_over_fixed", "gain_over_supervised"):
        if found := gain(run.summary, key):
            print(f"{found['mean']} points ({found['ci']}) over {found['over']}")
    print(
        f"next: ragrl report {workdir}; ragrl serve --workdir {workdir}; "
        f"ragrl evaluate --run {workdir} --systems ... for the test questions"
    )


def _train_values(start_from: str, arguments: Sequence[str]) -> dict[str, Any]:
    """The config of `train`; `--from` alone takes that of its run."""
    if not start_from:
        return load_config(None, arguments)
    from jax_ragrl.config.snapshot import load_saved_config
    from jax_ragrl.run.checkpoint_name import parse_run

    # The saved config, because the file that it came from may have changed since.
    if all(text.startswith("--config.") for text in arguments):
        values = load_saved_config(parse_run(start_from).folder / "config.json")
        override(values, arguments)
    else:
        values = load_config(None, arguments)
    return values | {"start_from": start_from}


def run_experiment(options: argparse.Namespace) -> None:
    from jax_ragrl.experiments.arms import finished_part, load_experiment, run_cells, share_of
    from jax_ragrl.experiments.comparison import write_comparison
    from jax_ragrl.runtime.compile_cache import enable_compile_cache

    experiment = load_experiment(options.file)
    name, _, argument = str(options.file).partition(".py:")
    parts = (pathlib.Path(name).stem, *filter(None, argument.split("/")))
    out = options.out or pathlib.Path("runs") / "-".join(parts)
    if options.finished:
        print(write_comparison(*finished_part(experiment, out), out))
        return
    number, _, count = options.share.partition("/")
    if not (number.isdecimal() and count.isdecimal()):
        raise UserError(f"--share is {options.share!r}: give two numbers, such as 3/8")
    cells = share_of(experiment, int(number), int(count))
    enable_compile_cache(out)
    rows = run_cells(experiment, cells, out)
    if int(count) > 1:
        print(f"share {options.share} is done: without --share, the same command compares the arms")
    else:
        print(write_comparison(experiment, rows, out))


def run_reproduce(options: argparse.Namespace) -> None:
    from jax_ragrl.experiments import claims as experiments
    from jax_ragrl.runtime.compile_cache import enable_compile_cache

    claims = experiments.load_claims()
    if options.claims:
        numbers = parse_ranges(options.claims)
        if unknown := sorted(numbers - {claim.number for claim in claims}):
            raise UserError(f"there is no claim {unknown[0]}: use 1 to {claims[-1].number}")
        claims = [claim for claim in claims if claim.number in numbers]
    seeds = parse_numbers(options.training_seeds)
    counts = experiments.count_unfinished(claims, options.out, seeds, options.world_seed)
    work = "{} trainings and {} further evaluations".format(*counts)
    print(f"{len(claims)} claims, {work} to do", flush=True)
    if options.dry_run:
        return
    enable_compile_cache(options.out)
    print(experiments.page(experiments.reproduce(claims, options.out, seeds, options.world_seed)))
