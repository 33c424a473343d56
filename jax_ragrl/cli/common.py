"""Helpers shared by the commands: shipped configs, help texts, number lists."""

from __future__ import annotations

import argparse
import json
import math
import os
import pathlib
from typing import Any, Protocol

from jax_ragrl.config.schema import local
from jax_ragrl.config.shipped_configs import CONFIGS
from jax_ragrl.errors import UserError, printable

MODEL_FORMS = "a folder, a .gguf file, OWNER/NAME on the Hugging Face Hub, tiny or smollm2"
DEFAULT_CONFIG = CONFIGS / "tiny" / "c3po.py"
# In its world each strategy is the best one for some questions, so that training has to choose.
QUICKSTART_CONFIG = CONFIGS / "tiny" / "c3po_router.py"
REAL_CONFIG = CONFIGS / "real" / "quickstart.py"
REAL_WARM_START = CONFIGS / "real" / "warm_start.py"


class Command(Protocol):
    """A function that executes a command."""

    def __call__(self, options: argparse.Namespace) -> None: ...


class AddCommand(Protocol):
    """Adds a command, such as "data world", to the parser; returns the parser of its options.

    Commands with `takes_config` accept `--config FILE` and `--config.key VALUE`.
    """

    def __call__(
        self, name: str, run: Command, summary: str, *, takes_config: bool = False
    ) -> argparse.ArgumentParser: ...


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Appends each option's default to its help text, unless the default is "not set"."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        # 0 is a default worth showing, and 0 == False.
        is_unset = action.default is None or action.default is False or action.default in ("", ())
        return action.help if is_unset else super()._get_help_string(action)


def add_fields_option(sub: argparse.ArgumentParser) -> None:
    """Adds the option that names the fields of data files of one's own."""
    fields = (
        "names of fields in data files, if not the usual ones; the fields are question, answer, "
        "id, gold, text and title"
    )
    sub.add_argument("--fields", default="", metavar="FIELD=NAME[,...]", help=fields)


def text_file(name: str) -> pathlib.Path:
    """The path of a file that will be written as text, maybe after hours.

    `UserError` for the name of a compressed file or of a folder, or if it cannot be written.
    """
    path = local(name)
    if path.suffix.lower() in (".gz", ".bz2", ".xz", ".zst", ".zip"):
        raise UserError(f"{path} is written uncompressed: give a name without {path.suffix}")
    if path.is_dir():
        raise UserError(f"{path} is a folder: give the name of a file in it")
    if path.is_file() or not path.exists():  # not a device
        output_folder(str(path.parent))
    return path


def output_folder(name: str) -> pathlib.Path:
    """The path of a folder of results, which may not exist yet; `UserError` if none can be made."""
    path = local(name)
    found = next(x for x in (path.absolute(), *path.absolute().parents) if x.exists())
    if not (found.is_dir() and os.access(found, os.W_OK)):
        raise UserError(
            f"{path} cannot be written, since {found} is not a folder that can be written: give "
            "another path"
        )
    return path


def parse_numbers(text: str, kind: type[int] | type[float] = int) -> list[Any]:
    """The numbers of a comma-separated list."""
    try:
        numbers = [kind(part) for part in text.split(",")]
        if not all(map(math.isfinite, numbers)):
            raise ValueError(text)
        return numbers
    except ValueError:
        noun = "integers" if kind is int else "numbers"
        raise UserError(f"{text!r} is not a list of {noun}: separate {noun} with commas, such as "
                        "0,1") from None  # fmt: skip


def parse_ranges(text: str) -> set[int]:
    """The numbers of a list such as `1,6-9`."""
    numbers = set[int]()
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not (first.isdecimal() and (last.isdecimal() or not dash)):
            raise UserError(f"{text!r} is not a list of numbers: give one such as 1,6-9")
        numbers |= set(range(int(first), int(last or first) + 1))
    return numbers


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))


def show(text: str) -> None:
    """Prints text of models, servers and files, whose control characters no terminal may obey."""
    print(printable(text))
