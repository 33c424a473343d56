"""`ragrl bench`: the options of its measurements."""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

from jax_ragrl.config.arguments import CONFIG_HELP, natural, positive
from jax_ragrl.config.overrides import load_config
from jax_ragrl.config.schema import local


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """One sub-command a measurement; its `measure` makes of the arguments what is printed."""
    kinds = sub.add_subparsers(required=True, metavar="what")
    kind = kinds.add_parser("load", help="host memory that loading a checkpoint takes")
    kind.add_argument("--shape", default="qwen2.5-0.5b", help="of a published model")
    kind.set_defaults(measure=_load)
    kind = kinds.add_parser("train", help="a train step: siblings after shared prompts")
    kind.set_defaults(measure=_train)
    _train_arguments(kind)
    kind = kinds.add_parser("sample", help="continuations of prompts, of equal length or not")
    kind.set_defaults(measure=_sample)
    _sample_arguments(kind)
    kind = kinds.add_parser("search", help="the nearest of many passages, and how many are found")
    kind.set_defaults(measure=_search)
    _search_arguments(kind)
    what = "a whole step of --config=FILE: rollout and updates"
    kind = kinds.add_parser("step", help=what, epilog=CONFIG_HELP)
    kind.set_defaults(measure=_step, takes_config=True)
    kind.add_argument("--workdir", type=local, help="with an index; default: a new one")
    kind.add_argument(
        "--repeats", type=positive, default=2, help="steps timed, after one that compiles"
    )
    kind.add_argument("--shape", help="random policies of a published shape, or tiny")
    for kind in kinds.choices.values():
        kind.add_argument("--json", action="store_true", help="on one line, for machines")


def _model_arguments(
    kind: argparse.ArgumentParser, numbers: Sequence[tuple[str, int, str]]
) -> None:
    """A model of random weights, and numbers."""
    kind.add_argument("--shape", default="qwen2.5-0.5b", help="of a published model, or tiny")
    _number_arguments(kind, numbers)
    kind.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))


def _number_arguments(
    kind: argparse.ArgumentParser, numbers: Sequence[tuple[str, int, str]]
) -> None:
    """Numbers by name, default and help; 0 may be given if it is the default."""
    for name, default, text in numbers:
        of = positive if default else natural
        kind.add_argument(f"--{name}", type=of, default=default, help=text)


def _search_arguments(kind: argparse.ArgumentParser) -> None:
    kind.add_argument("--kind", default="exact", help="exact, on the devices, or scann")
    kind.add_argument("--dtype", default="float32", help="of an exact index: or bfloat16")
    numbers = (
        ("count", 100_000, "passages"),
        ("dimension", 768, "of a vector"),
        ("queries", 256, "searched at once"),
        ("k", 10, "hits of a query"),
        ("repeats", 3, "searches timed, after one that compiles"),
    )
    _number_arguments(kind, numbers)


def _sample_arguments(kind: argparse.ArgumentParser) -> None:
    numbers = (
        ("prompts", 64, "how many"),
        ("siblings", 8, "continuations of each"),
        ("prompt", 512, "tokens of a prompt"),
        ("new", 1024, "most tokens of a continuation"),
        ("mean", 0, "tokens of one on average, exponentially distributed; 0: all have the most"),
        ("batch", 64, "prompts sampled at once"),
        ("slots", 128, "new tokens that a cache begins with; as many as --new: it never grows"),
        ("repeats", 3, "rollouts timed, after one that compiles"),
    )
    _model_arguments(kind, numbers)


def _train_arguments(kind: argparse.ArgumentParser) -> None:
    numbers = (
        ("prompts", 32, "how many"),
        ("siblings", 8, "actions after each prompt"),
        ("prompt", 1024, "tokens of a prompt"),
        ("new", 128, "tokens of an action"),
        ("layers", 0, "another depth; 0: the shape's"),
        ("vocabulary", 0, "another size of it; 0: the shape's"),
        ("tokens", 65536, "of a batch of rows; more are accumulated"),
        ("repeats", 3, "steps timed, after one that compiles"),
    )
    _model_arguments(kind, numbers)
    kind.add_argument("--remat", default="full", choices=("none", "full", "dots"))
    kind.add_argument("--attention", default="auto", choices=("auto", "cudnn", "splash", "xla"))
    rows = kind.add_mutually_exclusive_group()
    rows.add_argument("--grouped", dest="together", action="store_true", default=True)
    rows.add_argument("--ungrouped", dest="together", action="store_false")
    kind.add_argument("--compare", action="store_true", help="measure the other way of rows too")
    others = ("transformers", "tunix")
    kind.add_argument("--against", choices=others, help="measure another library too")


def _load(arguments: argparse.Namespace) -> dict[str, Any]:
    from jax_ragrl.bench.load import bench_load

    return bench_load(arguments.shape)


def _step(arguments: argparse.Namespace) -> dict[str, Any]:
    import tempfile

    from jax_ragrl.bench.step import bench_step
    from jax_ragrl.models.published import shape
    from jax_ragrl.run.config import load_job

    job = load_job(load_config(None, arguments.config))
    size = None if arguments.shape is None else shape(arguments.shape)
    with tempfile.TemporaryDirectory() as folder:
        return bench_step(job, arguments.workdir or pathlib.Path(folder), arguments.repeats, size)


def _sample(arguments: argparse.Namespace) -> dict[str, Any]:
    from jax_ragrl.bench.sample import Rollout, bench_sample

    return bench_sample(_filled(Rollout, arguments))


def _search(arguments: argparse.Namespace) -> dict[str, Any]:
    from jax_ragrl.bench.search import Search, bench_search

    return bench_search(_filled(Search, arguments))


def _filled(cls: Any, arguments: argparse.Namespace) -> Any:
    """A dataclass whose fields are options of a command."""
    return cls(**{field.name: getattr(arguments, field.name) for field in dataclasses.fields(cls)})


def _train(arguments: argparse.Namespace) -> dict[str, Any]:
    from jax_ragrl.bench.train import Work, bench_train

    work = _filled(Work, arguments)
    if not arguments.against:
        return bench_train(work, together=arguments.together, compare=arguments.compare)
    from jax_ragrl.bench.peers import beside, measure_peer

    # First, while this process has not taken the device's memory yet.
    theirs = measure_peer(arguments.against, work)
    measured = bench_train(work, together=arguments.together, compare=arguments.compare)
    ours = measured["grouped" if arguments.together else "ungrouped"]
    return measured | {arguments.against: theirs | beside(ours, theirs)}
