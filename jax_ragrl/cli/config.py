"""Commands about configs: `config show`, `config validate` and `config plan`."""

from __future__ import annotations

import argparse
import json
import textwrap

from jax_ragrl.cli.common import MODEL_FORMS, AddCommand, parse_numbers, print_json
from jax_ragrl.config.schema import local
from jax_ragrl.config.shipped_configs import shipped_configs
from jax_ragrl.errors import UserError
from jax_ragrl.run.overrides import load_config

PLAN = (
    "Compute the memory that --config=FILE needs per device, the operations and the traffic of its "
    "programs, and their least time by the data sheet, without the devices. Counted are the "
    "policies (of --shape, unless config.policies names others), an exact index, its encoder, and "
    "language models and judges of kind 'local' whose folders are on this machine. Anything else "
    "that the config places on the devices is listed under 'uncounted', and 'fits' is then null "
    "instead of true. 'index_memory' has every index that exists: its bytes on a device, in the "
    "memory of a host, and memory-mapped. --simulate estimates a whole step."
)


def add_config(command: AddCommand) -> None:
    summary = "print all keys of a config with value, default, type and meaning"
    sub = command("config show", run_config, summary, takes_config=True)
    file = "config file (default: print the files that ship with the package)"
    sub.add_argument("file", nargs="?", metavar="FILE[:ARGUMENT]", help=file)
    section = "print the keys below this one only, such as optimizer"
    sub.add_argument("key", nargs="?", default="", metavar="KEY", help=section)
    sub.add_argument("--json", action="store_true", help="print one JSON object per key")
    sub.epilog = "--config.a.b=VALUE overrides a key of the file."

    summary = "check a config and all that it names, before anything is spent"
    sub = command("config validate", run_validate, summary, takes_config=True)
    workdir = "folder of the run, whose index is checked (default: that of index.folder)"
    sub.add_argument("--workdir", type=local, help=workdir)
    quick = "leave out the checks that ask endpoints or load models"
    sub.add_argument("--quick", action="store_true", help=quick)
    sub.add_argument("--json", action="store_true", help="print one JSON object per finding")

    summary = "compute the memory that a config needs per device, and its least times"
    sub = command("config plan", run_plan, summary, takes_config=True)
    sub.description = PLAN
    shape = f"architecture of the policies: a published name, or {MODEL_FORMS}"
    sub.add_argument("--shape", help=f"{shape} (default: config.policy)")
    sub.add_argument("--topology", required=True, help="devices, such as v5e:4x4 or h100:8")
    text = "try meshes, remat and batch sizes; print the first that fits, the least work first"
    sub.add_argument("--fit", action="store_true", help=text)
    text = "estimate the seconds of a step on these numbers of devices, such as 32,256"
    sub.add_argument("--simulate", default="", metavar="DEVICES[,...]", help=text)
    text = "the work of a simulated step, such as questions=48,actions=20,rounds=12,tokens=110"
    sub.add_argument("--workload", default="", metavar="NAME=NUMBER[,...]", help=text)
    sub.add_argument("--json", action="store_true", help="print all numbers as JSON")


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
    if not (options.file or options.config):
        for name, summary in shipped_configs().items():
            print(f"{name:<36}  {summary}")
        return
    if options.file and any(text.startswith("--config=") for text in options.config):
        raise UserError(f"{options.file} and --config=FILE are two config files: give one of them")
    values = load_config(options.file and local(options.file), options.config)
    from jax_ragrl.validation.config import config_problems, keys_of

    # Others, such as a missing value, are no fault of a config that is being written.
    if unknown := [text for text in config_problems(values) if text.startswith("unknown")]:
        raise UserError("; ".join(unknown))
    prefix = f"{options.key}." if options.key else ""
    keys = [key for key in keys_of(values) if f"{key.name}.".startswith(prefix)]
    if not keys:
        raise UserError(
            f"{options.file} has no key {options.key!r}: leave it out to print all keys"
        )
    for key in keys:
        if options.json:
            print(json.dumps(key._asdict(), default=list))
            continue
        default = f"default: {key.default}" if key.default else "required"
        print(f"{key.name} = {key.value!r}  ({key.type}; {default})")
        text = key.meaning or "(no description)"
        print(textwrap.fill(text, 92, initial_indent="    ", subsequent_indent="    "))


def run_plan(options: argparse.Namespace) -> None:
    import os

    # JAX reads these when it starts: describing devices must not search for real ones.
    quiet = {"TPU_SKIP_MDS_QUERY": "1", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
    os.environ |= {"JAX_PLATFORMS": "cpu"} | quiet
    from jax_ragrl.plan import config_named, plan, policies_of
    from jax_ragrl.plan.fit import fit
    from jax_ragrl.plan.simulate import parse_workload, simulate
    from jax_ragrl.plan.text import plan_text
    from jax_ragrl.run.load import load_job
    from jax_ragrl.runtime.topology import describe_devices
    from jax_ragrl.validation.config import RUN, config_problems, kind_of, with_empty_texts

    values = load_config(None, options.config)
    if (kind := kind_of(values).name) != RUN:
        raise UserError(
            f"--config is one of supervised training ({kind}), but 'ragrl config plan' only plans "
            "runs of 'ragrl train': give the config of the run that continues from its policy. "
            "Supervised training has the policy and its optimizer alone, no critic, reference or "
            "sampler"
        )
    values = with_empty_texts(values)
    if found := config_problems(values):
        raise UserError(*found)
    job = load_job(values)
    if not (name := options.shape or job.policy):
        raise UserError("no policy is named: give --shape NAME, or --config.policy=FOLDER")
    # Wrong numbers are refused before anything is compiled.
    counts = parse_numbers(options.simulate) if options.simulate else []
    if min(counts, default=1) < 1:
        raise UserError(f"--simulate={options.simulate}: give numbers of devices from 1")
    if options.workload and not counts:
        raise UserError("--workload describes a simulated step: give --simulate=DEVICES too")
    given = {"staleness": job.run.staleness, "questions": job.run.questions_per_step}
    work, config = parse_workload(options.workload, **given), config_named(name)
    devices = describe_devices(options.topology)
    if options.fit:
        shapes = [policy.config for policy in policies_of(job, config)[0].values()]
        result = fit(job, shapes, len(devices), lambda job: plan(job, config, devices))
    else:
        result = plan(job, config, devices)
    if counts:
        result |= {"steps": [simulate(result, work, count) for count in counts]}
    if options.json:
        print_json(result)
    else:
        print(plan_text(result), end="")
