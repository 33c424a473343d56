"""Writes a run's config next to its files, and refuses to resume with a different one."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Collection, Mapping
from typing import Any

from jax_ragrl.errors import UserError

# Where something is, which no number of a run depends on.
PLACES = (
    "config.index.folder",
    "config.index.url",
    "config.llm.base_url",
    "config.judge.base_url",
    "config.run.wandb",
)


def settle(
    file: pathlib.Path,
    values: Mapping[str, Any],
    *,
    free: Collection[str] = PLACES,
    renew: bool = False,
    place: str = "--workdir",
) -> None:
    """Writes a run's config beside it, whole or not at all.

    Raises `UserError` where another one is already there, unless only `free` keys differ, or
    `renew` says that nothing was made with it yet. `place` is the option that names another place.
    """
    if file.exists() and not renew:
        check_settled(file, values, free, place)
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = file.with_suffix(".tmp")
    draft.write_text(_text(values), encoding="utf-8")
    draft.replace(file)


def check_settled(
    file: pathlib.Path,
    values: Mapping[str, Any],
    free: Collection[str],
    place: str = "--workdir",
) -> None:
    """Raises `UserError` where a config differs from the one in a file by more than `free` keys."""
    before, now = _flat(settled(file)), _flat(json.loads(_text(values)))
    changed = sorted(key for key, _ in before.items() ^ now.items() if key not in free)
    if changed:
        raise UserError(
            f"{file.parent} holds a run with another config ({changed[0]} differs): "
            f"use the same config to resume, or another {place}"
        )


def _text(values: Mapping[str, Any]) -> str:
    return json.dumps(values, indent=2, sort_keys=True, default=list) + "\n"


def settled(file: pathlib.Path) -> dict[str, Any]:
    """The config that `settle` wrote; `UserError` where there is none."""
    if not file.is_file():
        raise UserError(f"{file} does not exist: give the --workdir of a run of 'ragrl train'")
    return json.loads(file.read_text(encoding="utf-8"))


def _flat(values: Any, where: str = "config") -> dict[str, str]:
    if not isinstance(values, Mapping):
        return {where: repr(values)}
    return {
        k: v for name, part in values.items() for k, v in _flat(part, f"{where}.{name}").items()
    }
