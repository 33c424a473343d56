"""Commands that use a trained system: `ask`, `serve` and `export`."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import pathlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from jax_ragrl.cli.common import DEFAULT_CONFIG, AddCommand, show
from jax_ragrl.cli.serving import add_serving_options, serving_settings
from jax_ragrl.config.schema import local
from jax_ragrl.errors import UserError
from jax_ragrl.llm.kinds import LLM, OpenAIConfig
from jax_ragrl.run.overrides import load_config, override

if TYPE_CHECKING:
    from jax_ragrl.run.config import Job
    from jax_ragrl.run.parts import Components

WORKDIR = (
    "folder of a run whose trained policy answers, or RUN@best, or RUN@STEP (default: the policy "
    "of --config)"
)
# Otherwise a user with a corpus would take the answers for answers from it.
NO_SOURCE = (
    "ragrl: without --workdir or --config the shipped policy answers from the synthetic corpus "
    "(configs/tiny/c3po.py): give --workdir RUN, or --config FILE with your corpus"
)


def add_ask(command: AddCommand) -> None:
    summary = "answer one question and print each step"
    sub = command("ask", run_ask, summary, takes_config=True)
    sub.add_argument("question", help="text of the question")
    sub.add_argument("--workdir", type=local, help=WORKDIR)


def add_serve(command: AddCommand) -> None:
    summary = "answer questions over HTTP, in batches"
    sub = command("serve", run_serve, summary, takes_config=True)
    sub.add_argument("--workdir", type=local, help=WORKDIR)
    add_serving_options(sub, deadline=600.0)
    sub.add_argument(
        "--batch", type=int, default=64, help="max questions per rollout and per request"
    )
    sub.add_argument(
        "--waiting", type=int, default=256, help="max queued questions before returning 503"
    )


def add_export(command: AddCommand) -> None:
    sub = command("export", run_export, "write a trained policy in Hugging Face format")
    sub.add_argument("workdir", type=local, help="folder of the run, or RUN@best")
    sub.add_argument("--out", type=local, required=True, help="output folder")
    policy = "name of the policy, required if the run has several"
    sub.add_argument("--policy", default="", help=policy)
    dtypes = ("bfloat16", "float16", "float32")
    sub.add_argument("--dtype", default="bfloat16", choices=dtypes, help="dtype of the weights")
    sub.add_argument(
        "--adapter", action="store_true", help="export only the LoRA adapter, in PEFT format"
    )
    gguf = "also write model.gguf, the same weights for llama.cpp and Ollama"
    sub.add_argument("--gguf", action="store_true", help=gguf)
    push = "repository on the Hugging Face Hub that the folder is uploaded to, created if missing"
    sub.add_argument("--push-to", default="", metavar="OWNER/NAME", help=push)
    public = "let everyone read a new repository of --push-to, which is private otherwise"
    sub.add_argument("--public", action="store_true", help=public)


@contextlib.contextmanager
def _open_system(options: argparse.Namespace) -> Iterator[tuple[dict[str, Any], Job, Components]]:
    """The config, job and parts of the run in --workdir, or of --config with its initial policy.

    Overrides apply to both: the address of a server may differ from that during training.
    """
    import tempfile

    from jax_ragrl.config.snapshot import load_saved_config
    from jax_ragrl.run.build import build_components
    from jax_ragrl.run.checkpoint_name import parse_run
    from jax_ragrl.run.inference import trained_policies
    from jax_ragrl.run.load import load_job
    from jax_ragrl.runtime.compile_cache import enable_compile_cache

    run = parse_run(options.workdir) if options.workdir else None
    arguments = options.config
    # The run fixes its config file; a second one could differ from it.
    if run and not all(a.startswith("--config.") for a in arguments):
        raise UserError("--workdir uses the config of its run: leave --config=FILE out")
    if run:
        values = load_saved_config(run.folder / "config.json")
        override(values, arguments)
    else:
        if not arguments:
            print(NO_SOURCE, file=sys.stderr)
        values = load_config(DEFAULT_CONFIG, arguments)
    enable_compile_cache()
    job = load_job(values)
    # Models on servers store no reply: users' questions have no end.
    job = dataclasses.replace(job, llm=_without_cache(job.llm), judge=_without_cache(job.judge))
    # Without a run, the index is built in a temporary folder.
    with tempfile.TemporaryDirectory() as folder:
        parts = build_components(job, run.folder if run else pathlib.Path(folder))
        if run:
            parts = parts._replace(policies=trained_policies(job, parts.policies, run))
        yield values, job, parts


def _without_cache(llm: LLM) -> LLM:
    return dataclasses.replace(llm, cache=False) if isinstance(llm, OpenAIConfig) else llm


def run_ask(options: argparse.Namespace) -> None:
    from jax_ragrl.run.inference import ask

    with _open_system(options) as (_, job, parts):
        show(ask(job, parts, options.question))


def run_serve(options: argparse.Namespace) -> None:
    from jax_ragrl.run.inference import greedy_environment
    from jax_ragrl.serve import app
    from jax_ragrl.serve.replies import ServedSystem

    limits, settings = serving_settings(options)
    with _open_system(options) as (values, job, parts):
        system = ServedSystem(
            name=str(values["system"]),
            policy=str(options.workdir or job.policy),
            system=job.recipe.evaluation_system,
            environment=greedy_environment(job, parts, parts.models()),
            warmup_question=parts.questions["dev"][0].text,
        )
        del parts  # frees everything that the environment does not refer to
        app.serve(system, limits, settings)


def run_export(options: argparse.Namespace) -> None:
    if options.public and not options.push_to:
        raise UserError("--public is for an upload: give --push-to OWNER/NAME, or leave it out")
    if options.adapter and options.gguf:
        raise UserError("an adapter alone is no GGUF file: give --adapter or --gguf, not both")
    from jax_ragrl.export.run import export_run

    names = ("workdir", "out", "policy", "dtype", "adapter", "gguf", "push_to", "public")
    result = export_run(**{name: getattr(options, name) for name in names})
    print(json.dumps(result, default=str))
