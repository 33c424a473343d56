"""A run that starts from the trained policies of another one (`Job.start_from`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from jax_ragrl.config.snapshot import load_saved_config
from jax_ragrl.errors import UserError
from jax_ragrl.models.by_name import local_model
from jax_ragrl.models.decoder import Decoder
from jax_ragrl.run.checkpoint_name import parse_run
from jax_ragrl.run.config import Job
from jax_ragrl.run.inference import trained_policies
from jax_ragrl.run.load import load_job
from jax_ragrl.run.models import initial_models


def start_policies(job: Job, decoders: Mapping[str, Decoder]) -> dict[str, Decoder]:
    """Returns the trained policies of the run `job.start_from`.

    `decoders`, which the config of the new run names, give shapes and frozen weights. `UserError`
    if there is no such checkpoint, or it does not fit them.
    """
    # The other run's config defines adapters, names and shapes, not the config of this run.
    run = parse_run(job.start_from)
    origin = load_job(load_saved_config(run.folder / "config.json"))
    check_adapters(job, origin)
    return trained_policies(origin, decoders, run, reader=job)


def check_adapters(job: Job, origin: Job) -> None:
    """Raises `UserError` if a run would put the adapters of its origin on other weights.

    The arrays may fit nevertheless: another base of the same size, or another `lora.alpha`, gives
    an untrained policy.
    """
    if job.lora is None and origin.lora is None:  # a checkpoint has all weights
        return
    if differences := [*_other_sizes(job, origin), *_other_bases(job, origin)]:
        key, now, before = differences[0]
        raise UserError(
            f"config.{key} is {now}, but {job.start_from} was trained with {before}, which its "
            "adapters need: use the same value, or merge them with 'ragrl export "
            f"{job.start_from} --out FOLDER' and give --config.policy=FOLDER in place of --from"
        )


def _other_sizes(job: Job, origin: Job) -> Iterator[tuple[str, Any, Any]]:
    """Yields the keys of adapters with other values, and both values: new, former."""
    now, before = (
        dataclasses.asdict(x) | {"targets": tuple(sorted(x.targets))} if x else {}
        for x in (job.lora, origin.lora)
    )
    if now.keys() != before.keys():
        yield "lora", job.lora, origin.lora
    elif now != before:
        key = next(key for key in now if now[key] != before[key])
        yield f"lora.{key}", now[key], before[key]


def _other_bases(job: Job, origin: Job) -> Iterator[tuple[str, str, str]]:
    """Yields the keys of policies that start from other models, and both names: new, former."""
    before = initial_models(origin)
    for policy, name in initial_models(job).items():
        other = before.get(policy, name)
        if name == other:
            continue
        try:
            one, two = local_model(name), local_model(other)
        except UserError:  # the folder of the former model has moved
            one = two = None
        # One folder may have both names. None: on the Hub, where a model has one name.
        if one is None or two is None or one.resolve() != two.resolve():
            yield "policies" if policy in dict(job.policies) else "policy", name, other
