"""Commands that prepare a policy for reinforcement learning: those of `warmup`."""

from __future__ import annotations

import argparse

from jax_ragrl.cli.common import (
    CONFIGS,
    MODEL_FORMS,
    AddCommand,
    parse_numbers,
    print_json,
    text_file,
)
from jax_ragrl.config.arguments import amount, natural, positive
from jax_ragrl.config.schema import local
from jax_ragrl.run.overrides import load_config

FIRST_QUESTIONS = "number of questions to use, from the first; 0 = all"


def add_warmup(command: AddCommand) -> None:
    summary = "train the tiny policy on demonstrations of the synthetic corpus"
    sub = command("warmup tiny", run_warmup, summary, takes_config=True)
    sub.add_argument("--out", type=local, required=True, help="output folder (resumable)")
    summary = "write demonstrations with a language model"
    _add_demo_options(command("warmup demos", run_demos, summary, takes_config=True))
    summary = "fine-tune a generator on retrieved passages, or a policy on demonstrations"
    sub = command("warmup sft", run_sft, summary, takes_config=True)
    sub.add_argument("--out", type=local, required=True, help="output folder (resumable)")
    summary = "write OPERA's pool of scored expert actions"
    _add_pool_options(command("warmup pool", run_pool, summary, takes_config=True))


def _add_demo_options(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--out", type=text_file, required=True, help="output file for data.demos (resumable)"
    )
    # `labels` uses rules instead of a model, from gold passages and answers.
    writers = (
        f"author of the demonstrations: openai:MODEL[@URL], {MODEL_FORMS}, or labels (rules from "
        "gold passages and answers; labels:answer is another rule of MMOA-RAG)"
    )
    sub.add_argument("--writer", required=True, help=writers)
    baseline = (
        "baseline whose classifier is demonstrated, adaptive_rag or slim_plm, instead of the "
        "config's system"
    )
    sub.add_argument("--of", default="", help=baseline)
    sub.add_argument("--limit", type=natural, default=0, help=FIRST_QUESTIONS)
    sub.add_argument("--samples", type=positive, default=1, help="rollouts per question")
    sub.add_argument(
        "--temperature", type=amount, help="sampling temperature (default: that of each role)"
    )


def _add_pool_options(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--out",
        type=text_file,
        required=True,
        help="output file for recipe.expert_pool (resumable)",
    )
    sub.add_argument(
        "--writer",
        default="policy",
        help=f"author of the actions: policy, openai:MODEL[@URL], or {MODEL_FORMS}",
    )
    sub.add_argument(
        "--temperatures", default="0.3,0.5,0.7,0.9", help="comma-separated sampling temperatures"
    )
    sub.add_argument("--limit", type=natural, default=0, help=FIRST_QUESTIONS)


def run_warmup(options: argparse.Namespace) -> None:
    # The config is read before JAX is imported, so that a mistake is reported at once.
    values = load_config(CONFIGS / "tiny" / "warmup.py", options.config)
    from jax_ragrl.runtime.compile_cache import enable_compile_cache
    from jax_ragrl.warmstart.warmup import warm_up

    enable_compile_cache(options.out)
    print_json(warm_up(values, options.out))


def run_demos(options: argparse.Namespace) -> None:
    values = load_config(None, options.config)
    from jax_ragrl.runtime.compile_cache import enable_compile_cache
    from jax_ragrl.warmstart.make_demos import WriterConfig, make_demos

    enable_compile_cache()
    writer = WriterConfig(options.writer, options.samples, options.temperature)
    print_json(make_demos(values, options.out, writer, count=options.limit, of=options.of))


def run_sft(options: argparse.Namespace) -> None:
    values = load_config(None, options.config)
    from jax_ragrl.runtime.compile_cache import enable_compile_cache
    from jax_ragrl.warmstart.demos import load_warm_start, warm_start
    from jax_ragrl.warmstart.finetune import fine_tune, load_finetune

    enable_compile_cache(options.out)
    # A config with demonstrations trains a policy; any other config trains a generator.
    if "demos" in values.get("data", {}):
        print_json(warm_start(load_warm_start(values), options.out))
    else:
        print_json(fine_tune(load_finetune(values), options.out))


def run_pool(options: argparse.Namespace) -> None:
    values = load_config(CONFIGS / "tiny" / "opera.py", options.config)
    from jax_ragrl.runtime.compile_cache import enable_compile_cache
    from jax_ragrl.warmstart.expert_pool import make_pool

    enable_compile_cache()
    temperatures = parse_numbers(options.temperatures, float)
    print_json(make_pool(values, options.out, options.writer, temperatures, options.limit))
