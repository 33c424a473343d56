"""Saves the config of a run in its work folder, and refuses to resume with a different one."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Collection, Mapping
from typing import Any

from jax_ragrl.errors import UserError, redacted
from jax_ragrl.json_text import read_object

# Locations and reporting: no result of a run depends on these keys, so that they may change.
LOCATION_KEYS = (
    "config.index.folder",
    "config.index.url",
    "config.llm.base_url",
    "config.judge.base_url",
    "config.prices.dollars_per_million_prompt_tokens",
    "config.prices.dollars_per_million_completion_tokens",
    "config.prices.dollars_per_search",
    "config.llm.cache",
    "config.judge.cache",
    "config.llm.replies",
    "config.judge.replies",
    "config.llm.replies_only",
    "config.judge.replies_only",
    "config.run.wandb_project",
    "config.run.mlflow_experiment",
    "config.run.trackio_project",
    "config.run.other_versions",
)


def save_config(
    file: pathlib.Path,
    values: Mapping[str, Any],
    *,
    free: Collection[str] = LOCATION_KEYS,
    renew: bool = False,
    place: str = "--workdir",
) -> None:
    """Writes the config of a run as JSON, atomically, without credentials (`errors.redacted`).

    Args:
      file: the JSON file; its folder is created.
      values: the nested values of the config.
      free: dotted keys (`config.a.b`) that may differ from an existing file.
      renew: replace an existing file unseen, because nothing was produced with it yet.
      place: the option that names another folder, for the error message.

    Raises:
      UserError: the file exists with another config.
    """
    if file.exists() and not renew:
        check_saved_config(file, values, free, place)
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = file.with_suffix(".tmp")
    draft.write_text(_text(values), encoding="utf-8")
    draft.replace(file)


def check_saved_config(
    file: pathlib.Path, values: Mapping[str, Any], free: Collection[str], place: str = "--workdir"
) -> None:
    """Raises `UserError` if a config differs from a saved one; arguments as in `save_config`."""
    # The new config makes the same trip through JSON as the file, which turns tuples into lists.
    before, now = _flat(load_saved_config(file)), _flat(json.loads(_text(values)))
    differences = sorted(key for key, _ in before.items() ^ now.items() if key not in free)
    if differences:
        key = differences[0]
        value, former = (f"{x[key]:.80}" if key in x else "not set" for x in (now, before))
        raise UserError(
            f"{file.parent} holds a run with another config ({key} differs: it is {value}, and was "
            f"{former}): use the same config to resume, or another {place}"
        )


def load_saved_config(file: pathlib.Path) -> dict[str, Any]:
    """Reads the config that `save_config` wrote.

    Raises:
      UserError: the file does not exist.
    """
    if not file.is_file():
        raise UserError(f"{file} does not exist: give the --workdir of a run of 'ragrl train'")
    remedy = "copy it again, or delete it: 'ragrl train' with the config of the run writes it again"
    return read_object(file, remedy)


def _text(values: Mapping[str, Any]) -> str:
    return json.dumps(_without_secrets(values), indent=2, sort_keys=True, default=list) + "\n"


def _without_secrets(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_secrets(x) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [_without_secrets(x) for x in value]
    return redacted(value) if isinstance(value, str) else value


def _flat(values: Any, where: str = "config") -> dict[str, str]:
    # An empty section may turn something on: `preference={}` is DPO.
    if not isinstance(values, Mapping) or not values:
        # Keys of the sections in a list may be in any order.
        return {where: json.dumps(values, sort_keys=True, default=list)}
    return {
        k: v for name, part in values.items() for k, v in _flat(part, f"{where}.{name}").items()
    }
