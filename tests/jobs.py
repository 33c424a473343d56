"""Configs of this project, changed as by the command line."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from jax_ragrl.cli.main import CONFIGS, load_config
from jax_ragrl.run.config import Job
from jax_ragrl.run.load import load_job

NOTHING: Mapping[str, object] = MappingProxyType({})


def config_values(name: str, changes: Mapping[str, object] = NOTHING) -> dict[str, Any]:
    """The values of `configs/NAME.py` or `NAME:PRESET`, with changes by dotted key."""
    file, colon, preset = name.partition(":")
    overrides = [f"--config.{key}={value}" for key, value in changes.items()]
    return load_config(None, [f"--config={CONFIGS / file}.py{colon}{preset}", *overrides])


def config_job(name: str, changes: Mapping[str, object] = NOTHING) -> Job:
    return load_job(config_values(name, changes))
