"""Commands about configs: `validate` and `config`."""

from __future__ import annotations

import argparse
import json
import textwrap
from typing import TYPE_CHECKING

from jax_ragrl.cli.common import AddCommand
from jax_ragrl.config.overrides import load_config
from jax_ragrl.config.schema import local
from jax_ragrl.config.shipped_configs import shipped_configs
from jax_ragrl.errors import UserError

if TYPE_CHECKING:
    from jax_ragrl.config.keys import ConfigKey


def add_commands(command: AddCommand) -> None:
    summary = "check a config and all that it names, before anything is spent"
    sub = command("validate", run_validate, summary, takes_config=True)
    workdir = "folder of the run, whose index is checked (default: that of index.folder)"
    sub.add_argument("--workdir", type=local, help=workdir)
    quick = "leave out the checks that ask endpoints or load models"
    sub.add_argument("--quick", action="store_true", help=quick)
    sub.add_argument("--json", action="store_true", help="print one JSON object per finding")
    summary = "print all keys of a config with value, default, type and meaning"
    sub = command("config", run_config, summary, takes_config=True)
    file = "config file (default: print the files that ship with the package)"
    sub.add_argument("file", nargs="?", metavar="FILE[:ARGUMENT]", help=file)
    section = "print the keys below this one only, such as optimizer"
    sub.add_argument("key", nargs="?", default="", metavar="KEY", help=section)
    sub.add_argument("--json", action="store_true", help="print one JSON object per key")
    sub.epilog = "--config.a.b=VALUE overrides a key of the file."


def run_validate(options: argparse.Namespace) -> None:
    values = load_config(None, options.config)
    # Here, because it loads JAX.
    from jax_ragrl.runtime.compile_cache import enable_compile_cache
    from jax_ragrl.validation.checks import validate

    enable_compile_cache()
    errors = 0
    for finding in validate(values, options.workdir, quick=options.quick):
        errors += finding.level == "error"
        line = json.dumps(finding._asdict()) if options.json else finding.line()
        print(line, flush=True)
    if errors:
        count = "1 error" if errors == 1 else f"{errors} errors"
        raise UserError(f"{count}: do what each line says, and validate again")


def run_config(options: argparse.Namespace) -> None:
    if not options.file:
        return _print_shipped()
    values = load_config(local(options.file), options.config)
    from jax_ragrl.validation.config import keys_of

    prefix = f"{options.key}." if options.key else ""
    keys = [key for key in keys_of(values) if f"{key.name}.".startswith(prefix)]
    if not keys:
        raise UserError(
            f"{options.file} has no key {options.key!r}: leave it out to print all keys"
        )
    for key in keys:
        print(_json_line(key) if options.json else _key_lines(key))


def _print_shipped() -> None:
    """Prints the names of the shipped configs, each with the first line of its docstring."""
    for name, summary in shipped_configs().items():
        print(f"{name:<36}  {summary}")


def _json_line(key: ConfigKey) -> str:
    return json.dumps(key._asdict(), default=list)


def _key_lines(key: ConfigKey) -> str:
    """A key as a line of Python, and its description below, wrapped."""
    default = f"default: {key.default}" if key.default else "required"
    head = f"{key.name} = {key.value!r}  ({key.type}; {default})"
    text = key.meaning or "(no description)"
    return "\n".join([head, *textwrap.wrap(text, 92, initial_indent="    ",
                                           subsequent_indent="    ")])  # fmt: skip
