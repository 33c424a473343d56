"""Commands about configs: `validate` and `config`."""

from __future__ import annotations

import argparse
import json

from jax_ragrl.cli.common import AddCommand
from jax_ragrl.config.overrides import load_config
from jax_ragrl.config.schema import local
from jax_ragrl.errors import UserError


def add_commands(command: AddCommand) -> None:
    summary = "check a config and all that it names, before anything is spent"
    sub = command("validate", run_validate, summary, takes_config=True)
    workdir = "folder of the run, whose index is checked (default: that of index.folder)"
    sub.add_argument("--workdir", type=local, help=workdir)
    quick = "ask no endpoint and load no model"
    sub.add_argument("--quick", action="store_true", help=quick)
    sub.add_argument("--json", action="store_true", help="print one JSON object per finding")


def run_validate(options: argparse.Namespace) -> None:
    values = load_config(None, options.config)
    # Here, because it loads JAX.
    from jax_ragrl.validation.checks import validate

    errors = 0
    for finding in validate(values, options.workdir, quick=options.quick):
        errors += finding.level == "error"
        line = json.dumps(finding._asdict()) if options.json else finding.line()
        print(line, flush=True)
    if errors:
        raise UserError(f"{errors} errors: mend them as their lines say, and validate again")
