"""Commands that measure: `plan` (memory and time per device) and `bench` (speed and memory)."""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import Any

from jax_ragrl.cli.common import MODEL_FORMS, AddCommand, parse_numbers, print_json
from jax_ragrl.config.arguments import CONFIG_HELP, natural, positive
from jax_ragrl.config.overrides import PREFIX, load_config, override
from jax_ragrl.config.schema import local
from jax_ragrl.corpus.data_path import data_path
from jax_ragrl.errors import UserError

Numbers = Sequence[tuple[str, int, str]]  # name, default and help of options

MODEL = "published model whose architecture is used, or smollm2, or tiny"
PLAN = (
    "Compute the memory that --config=FILE needs per device, the operations and the traffic of its "
    "programs, and their least time by the data sheet, without the devices. Counted are the "
    "policies (of --shape, unless config.policies names others), an exact index, its encoder, and "
    "language models and judges of kind 'local' whose folders are on this machine. Anything else "
    "that the config places on the devices is listed under 'uncounted', and 'fits' is then null "
    "instead of true. 'index_memory' has every index that exists: its bytes on a device, in the "
    "memory of a host, and memory-mapped. --simulate estimates a whole step."
)


def add_commands(command: AddCommand) -> None:
    summary = "compute the memory that a config needs per device, and its least times"
    sub = command("plan", run_plan, summary, takes_config=True)
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
    summary = "measure loading, training, sampling, embedding, search, a whole step or a server"
    _add_measurements(command("bench", run_bench, summary))


def _add_measurements(sub: argparse.ArgumentParser) -> None:
    """One sub-command per measurement; its `measure` computes the JSON to print."""
    kinds = sub.add_subparsers(required=True, metavar="MEASUREMENT")

    def add(name: str, measure: Any, summary: str, **defaults: Any) -> argparse.ArgumentParser:
        kind = kinds.add_parser(
            name,
            help=summary,
            description=f"Measure {summary}.",
            epilog=CONFIG_HELP if defaults else None,
            formatter_class=sub.formatter_class,
        )
        kind.set_defaults(measure=measure, **defaults)
        kind.add_argument("--json", action="store_true", help="print the result on one line")
        return kind

    load = add("load", measure_load, "the host memory for loading a checkpoint")
    load.add_argument("--shape", default="qwen2.5-0.5b", help="published model")
    _add_train_options(add("train", measure_train, "a training step"))
    _add_sample_options(add("sample", measure_sample, "sampling from prompts"))
    summary = "wasted work of sampling: a tape of ragged conversations, in batches and in slots"
    _add_tape_options(add("tape", measure_tape, summary))
    _add_embed_options(add("embed", measure_embed, "how fast a text encoder embeds passages"))
    _add_search_options(add("search", measure_search, "the search for the nearest passages"))
    summary = "how well and how fast retrievers find the gold passages of question sets"
    _add_retrieval_options(add("retrieval", measure_retrieval, summary))
    summary = "a server under load: good clients next to hostile ones, then SIGTERM"
    _add_serve_options(add("serve", measure_serve, summary))
    _add_run_measurements(add)


def _add_run_measurements(add: Callable[..., argparse.ArgumentParser]) -> None:
    """The measurements of training runs."""
    summary = "fresh, stale and early rollouts of --config=FILE with a language model that sleeps"
    _add_overlap_options(add("overlap", measure_overlap, summary, takes_config=True))
    summary = "what the training guard sees in the logs of finished runs"
    _add_guard_options(add("guard", measure_guard, summary))
    summary = "whether memory, files and threads stay flat over many steps of --config=FILE"
    _add_soak_options(add("soak", measure_soak, summary, takes_config=True))
    summary = "a whole step of --config=FILE: rollout and updates"
    _add_step_options(add("step", measure_step, summary, takes_config=True))


def _add_retrieval_options(kind: argparse.ArgumentParser) -> None:
    data = (
        "question sets that name gold passages, each with its corpus; or folders that hold a set "
        "per subfolder, or one in BEIR's layout"
    )
    form = "[NAME=]QUESTIONS@CORPUS|NAME=CORPUS:QUESTIONS|FOLDER"
    kind.add_argument("--data", nargs="+", required=True, metavar=form, help=data)
    names = "comma-separated: hashed, bm25, minilm, hybrid, hybrid+rerank"
    kind.add_argument("--retrievers", default="hashed,bm25,minilm,hybrid", help=names)
    reranker = "reranker of hybrid+rerank: name or folder of a cross-encoder, or llm (listwise)"
    kind.add_argument("--reranker", default="", help=reranker)
    llm = f"language model of --reranker llm: openai:MODEL[@URL], or {MODEL_FORMS}"
    kind.add_argument("--llm", default="", help=llm)
    candidates = "hits that hybrid fuses and reranks; 0 = 100"
    kind.add_argument("--candidates", type=natural, default=0, help=candidates)
    kind.add_argument("--limit", type=natural, default=0, help="questions per set; 0 = all")
    out = "write the table to OUT.json and OUT.md"
    kind.add_argument("--out", type=local, metavar="OUT", help=out)
    kind.add_argument(
        "--workdir",
        type=local,
        default=pathlib.Path("runs/retrieval"),
        help="folder of indexes and finished cells (resumable)",
    )


def _add_serve_options(kind: argparse.ArgumentParser) -> None:
    url = "address of a running server (default: starts one of the tiny policy, and ends it)"
    kind.add_argument("--url", help=url)
    kind.add_argument("--retriever", action="store_true", help="--url is a server of a retriever")
    kind.add_argument("--seconds", type=float, default=10.0, help="duration of the load")
    numbers = (
        ("clients", 16, "good clients, each with one request at a time"),
        ("half-open", 400, "connections without complete headers"),
        ("held", 16, "requests whose body stays incomplete"),
        ("leaving", 4, "clients that leave during their body"),
        ("huge", 2, "clients that send too much"),
    )
    for name, default, text in numbers:
        kind.add_argument(f"--{name}", type=natural, default=default, help=text)


def _add_tape_options(kind: argparse.ArgumentParser) -> None:
    numbers = (
        ("conversations", 0, "conversations of the tape (default: all)"),
        ("new", 512, "maximum of new tokens per reply"),
        ("decode-rows", 32, "rows that are decoded together in slots"),
        ("kept-contexts", 256, "contexts whose keys and values are kept"),
    )
    for name, default, text in numbers:
        kind.add_argument(f"--{name}", type=natural, default=default, help=text)


def _add_guard_options(kind: argparse.ArgumentParser) -> None:
    for outcome, text in (("collapsed", "runs that collapsed"), ("healthy", "runs that did not")):
        kind.add_argument(
            f"--{outcome}", nargs="+", type=local, default=[], metavar="RUN", help=text
        )
    text = "thresholds other than the defaults, such as kl=0.5 entropy=0.2"
    kind.add_argument("--thresholds", nargs="+", default=[], metavar="INDICATOR=NUMBER", help=text)


def _add_soak_options(kind: argparse.ArgumentParser) -> None:
    steps = "number of steps, of one question each"
    kind.add_argument("--steps", type=positive, default=1000, help=steps)
    kind.add_argument(
        "--workdir",
        type=local,
        default=pathlib.Path("runs/soak"),
        help="folder of the run; the same command continues an interrupted one",
    )
    kind.add_argument(
        "--plot", type=local, metavar="FILE.svg", help="write the curves to this file"
    )


def _add_step_options(kind: argparse.ArgumentParser) -> None:
    kind.add_argument("--workdir", type=local, help="folder with an index (default: a new folder)")
    repeats = "number of timed steps, after one that compiles"
    kind.add_argument("--repeats", type=positive, default=2, help=repeats)
    kind.add_argument("--shape", help=f"{MODEL}; its weights are random (default: the policies)")


def _add_overlap_options(kind: argparse.ArgumentParser) -> None:
    latency = "seconds that the language model sleeps per request before it answers"
    kind.add_argument("--latency", type=float, default=1.0, help=latency)
    exponential = "distribute the seconds exponentially, with --latency as mean"
    kind.add_argument("--exponential", action="store_true", help=exponential)
    _add_number_options(kind, (("steps", 6, "steps per run; the first two are not counted"),))


def _add_model_options(kind: argparse.ArgumentParser, numbers: Numbers) -> None:
    """Options of a model with random weights, and numbers."""
    kind.add_argument("--shape", default="qwen2.5-0.5b", help=MODEL)
    _add_number_options(kind, numbers)
    dtypes = ("bfloat16", "float32")
    kind.add_argument("--dtype", default="bfloat16", choices=dtypes, help="dtype of computation")
    attention = ("auto", "cudnn", "splash", "xla")
    kind.add_argument("--attention", default="auto", choices=attention, help="attention kernel")


def _add_number_options(kind: argparse.ArgumentParser, numbers: Numbers) -> None:
    """Integer options; 0 is valid only if it is the default."""
    for name, default, text in numbers:
        minimum = positive if default else natural
        kind.add_argument(f"--{name}", type=minimum, default=default, help=text)


def _add_embed_options(kind: argparse.ArgumentParser) -> None:
    kind.add_argument("--corpus", type=data_path, required=True, help="file of passages")
    encoder = "text encoder: minilm, a folder, or OWNER/NAME (default: minilm)"
    kind.add_argument("--encoder", default="minilm", help=encoder)
    numbers = (
        ("count", 1000, "number of passages, from the start of the corpus"),
        ("repeats", 2, "number of timed calls, after one that compiles"),
    )
    _add_number_options(kind, numbers)
    baseline = "another library to measure with the same passages"
    kind.add_argument("--baseline", choices=("sentence-transformers",), help=baseline)


def _add_search_options(kind: argparse.ArgumentParser) -> None:
    kind.add_argument("--kind", default="exact", help="kind of search: exact (on devices) or scann")
    dtype = "dtype of the vectors: float32, or bfloat16 or int8 for an exact index"
    kind.add_argument("--dtype", default="float32", help=dtype)
    numbers = (
        ("count", 0, "number of passages; 0 = 100,000, or 200,000 with --against"),
        ("dimension", 0, "dimension of a vector; 0 = 768, or 384 with --against"),
        ("queries", 0, "queries per search; 0 = 256, or 2,000 with --against, which halves them"),
        ("k", 10, "hits per query; --against measures 10"),
        ("repeats", 3, "number of timed searches, after one that compiles"),
    )
    _add_number_options(kind, numbers)
    against = "measure scann and this library at equal recall (needs faiss-cpu)"
    kind.add_argument("--against", choices=("faiss",), help=against)


def _add_sample_options(kind: argparse.ArgumentParser) -> None:
    numbers = (
        ("prompts", 64, "number of prompts"),
        ("siblings", 8, "continuations per prompt"),
        ("prompt", 512, "tokens per prompt"),
        ("new", 1024, "max new tokens per continuation"),
        ("mean", 0, "mean new tokens per continuation, exponentially distributed; 0 = all --new"),
        ("batch", 64, "prompts sampled together"),
        ("slots", 128, "initial cache size in new tokens; with --new or more it never grows"),
        ("turns", 1, "turns per conversation"),
        ("observation", 256, "tokens between two turns"),
        ("decode-rows", 0, "rows that are decoded together in slots; 0 = batches"),
        ("repeats", 3, "number of timed rollouts, after one that compiles"),
    )
    _add_model_options(kind, numbers)
    baseline = "another library to measure with the same work"
    kind.add_argument("--baseline", choices=("transformers",), help=baseline)


def _add_train_options(kind: argparse.ArgumentParser) -> None:
    numbers = (
        ("prompts", 32, "number of prompts"),
        ("siblings", 8, "actions per prompt"),
        ("prompt", 1024, "tokens per prompt"),
        ("new", 128, "tokens per action"),
        ("layers", 0, "number of layers; 0 = that of --shape"),
        ("vocabulary", 0, "vocabulary size; 0 = that of --shape"),
        ("tokens", 65536, "tokens per batch of rows; gradients of several batches are accumulated"),
        ("repeats", 3, "number of timed steps, after one that compiles"),
    )
    _add_model_options(kind, numbers)
    remat = ("none", "full", "dots")
    kind.add_argument("--remat", default="full", choices=remat, help="gradient checkpointing")
    _add_layout_options(kind)
    libraries = ("transformers", "tunix")
    baseline = "another library to measure with the same work"
    kind.add_argument("--baseline", choices=libraries, help=baseline)
    kind.add_argument(  # old name
        "--against", dest="baseline", choices=libraries, help=argparse.SUPPRESS
    )


def _add_layout_options(kind: argparse.ArgumentParser) -> None:
    rows = kind.add_mutually_exclusive_group()
    # Both options suppress their default, so that help does not show "True" for --ungrouped.
    kind.set_defaults(grouped=True)
    for option, action, text in (
        ("--grouped", "store_true", "pack the siblings of a prompt into shared rows (default)"),
        ("--ungrouped", "store_false", "put each action into its own row"),
    ):
        rows.add_argument(
            option, dest="grouped", action=action, default=argparse.SUPPRESS, help=text
        )
    kind.add_argument("--compare", action="store_true", help="measure the other row layout too")


def run_plan(options: argparse.Namespace) -> None:
    import os

    # JAX reads these when it starts: describing devices must not search for real ones.
    quiet = {"TPU_SKIP_MDS_QUERY": "1", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
    os.environ |= {"JAX_PLATFORMS": "cpu"} | quiet
    from jax_ragrl.config.schema import build
    from jax_ragrl.plan import PlanConfig, config_named, plan, plan_values
    from jax_ragrl.plan.fit import fit
    from jax_ragrl.plan.simulate import parse_workload, simulate
    from jax_ragrl.plan.text import plan_text
    from jax_ragrl.runtime.topology import describe_devices
    from jax_ragrl.validation.config import RUN, kind_of

    values = load_config(None, options.config)
    if (kind := kind_of(values).name) != RUN:
        raise UserError(
            f"--config is one of supervised training ({kind}), but 'ragrl plan' only plans runs of "
            "'ragrl train': give the config of the run that continues from its policy. Supervised "
            "training has the policy and its optimizer alone, no critic, reference or sampler"
        )
    run, name = build(PlanConfig, plan_values(values)), options.shape or values.get("policy")
    if not name:
        raise UserError("no policy is named: give --shape NAME, or --config.policy=FOLDER")
    # Wrong numbers are refused before anything is compiled.
    counts = parse_numbers(options.simulate) if options.simulate else []
    work, config = parse_workload(options.workload), config_named(name)
    devices = describe_devices(options.topology)
    if options.fit:
        result = fit(run, config, len(devices), lambda run: plan(run, config, devices))
    else:
        result = plan(run, config, devices)
    if counts:
        result |= {"steps": [simulate(result, work, count) for count in counts]}
    if options.json:
        print_json(result)
    else:
        print(plan_text(result), end="")


def run_bench(options: argparse.Namespace) -> None:
    result = options.measure(options)
    if isinstance(result, str):
        print(result, end="")
    else:
        print(json.dumps(result, indent=None if options.json else 2))


def measure_load(options: argparse.Namespace) -> dict[str, Any]:
    from jax_ragrl.bench.load import bench_load

    return bench_load(options.shape)


def measure_serve(options: argparse.Namespace) -> dict[str, Any]:
    import os

    from jax_ragrl.bench.serve import ServeWork, Target, bench_serve

    work = _from_options(ServeWork, options)
    if not options.url:
        return bench_serve(work)
    path = "/retrieve" if options.retriever else "/answer"
    return bench_serve(work, Target(options.url, path, os.environ.get("RAGRL_API_KEY", "")))


def measure_guard(options: argparse.Namespace) -> dict[str, Any]:
    from jax_ragrl.bench.guard import bench_guard, parse_thresholds

    thresholds = parse_thresholds(options.thresholds)
    return bench_guard(options.collapsed, options.healthy, thresholds)


def measure_soak(options: argparse.Namespace) -> dict[str, Any]:
    from jax_ragrl.bench.soak import bench_soak, small

    file = [text for text in options.config if not text.startswith(PREFIX)]
    values = small(load_config(None, file), options.steps)
    # After the small sizes, so that an option can change them.
    override(values, [text for text in options.config if text.startswith(PREFIX)])
    return bench_soak(values, options.workdir, options.plot)


def measure_step(options: argparse.Namespace) -> dict[str, Any]:
    import tempfile

    from jax_ragrl.bench.step import bench_step
    from jax_ragrl.models.published import published_config
    from jax_ragrl.run.load import load_job

    job = load_job(load_config(None, options.config))
    config = None if options.shape is None else published_config(options.shape)
    # A new folder has no index, so building one adds to the start, not to the measured steps.
    with tempfile.TemporaryDirectory() as folder:
        workdir = options.workdir or pathlib.Path(folder)
        return bench_step(job, workdir, options.repeats, config)


def measure_overlap(options: argparse.Namespace) -> dict[str, Any]:
    from jax_ragrl.bench.overlap import bench_overlap

    values = load_config(None, options.config)
    return bench_overlap(values, options.latency, options.steps, is_exponential=options.exponential)


def measure_sample(options: argparse.Namespace) -> dict[str, Any]:
    from jax_ragrl.bench.sample import SampleWork, bench_sample

    work = _from_options(SampleWork, options)
    if not options.baseline:
        return bench_sample(work)
    from jax_ragrl.bench.peers import compare_rollouts, measure_peer

    theirs, ours = measure_peer(options.baseline, work), bench_sample(work)
    return ours | {options.baseline: theirs | compare_rollouts(ours, theirs)}


def measure_tape(options: argparse.Namespace) -> dict[str, Any]:
    from jax_ragrl.bench.tape import TapeWork, bench_tape

    return bench_tape(_from_options(TapeWork, options))


def measure_embed(options: argparse.Namespace) -> dict[str, Any]:
    from jax_ragrl.bench.embed import EmbedWork, bench_embed

    work = _from_options(EmbedWork, options)
    if not options.baseline:
        return bench_embed(work)
    from jax_ragrl.bench.peers import compare_embeddings, measure_peer

    theirs = measure_peer(options.baseline, work)
    ours = bench_embed(work, theirs.pop("vectors_XD"))
    return ours | {options.baseline: theirs | compare_embeddings(ours, theirs)}


def measure_search(options: argparse.Namespace) -> dict[str, Any]:
    # 0 is the default of the measurement.
    defaults = {name for name in ("count", "dimension", "queries") if not getattr(options, name)}
    options = argparse.Namespace(**{k: v for k, v in vars(options).items() if k not in defaults})
    if options.against:
        if (options.kind, options.dtype, options.k) != ("exact", "float32", 10):
            raise UserError(
                f"--kind {options.kind}, --dtype {options.dtype} and --k {options.k} are not read "
                "with --against, which measures scann in float32 at k 10: leave them out"
            )
        from jax_ragrl.bench.against_faiss import FaissWork, bench_faiss

        return bench_faiss(_from_options(FaissWork, options))
    from jax_ragrl.bench.search import SearchWork, bench_search

    return bench_search(_from_options(SearchWork, options))


def measure_retrieval(options: argparse.Namespace) -> dict[str, Any] | str:
    from jax_ragrl.bench import retrieval

    sets = [data for text in options.data for data in retrieval.parse_set(text)]
    names = options.retrievers.split(",")
    retrievers = retrieval.sections(names, options.reranker, options.llm, options.candidates)
    rows = retrieval.bench_retrieval(sets, retrievers, options.workdir, options.limit, options.llm)
    # Tables are published: absolute folders mean nothing on another machine.
    data = [re.sub(r"(?<![^=@:])/[^@:]*/", "", text.rstrip("/")) for text in options.data]
    words = ["ragrl bench retrieval --data", *data, "--retrievers", options.retrievers]
    for name in ("reranker", "llm", "candidates", "limit"):
        if value := getattr(options, name):
            words += [f"--{name}", str(value)]
    table = retrieval.table(rows, " ".join(words))
    if options.out:
        retrieval.write_table(table, options.out)
    if not table["rows"]:
        raise UserError(f"every cell failed, the first with: {table['errors'][0]['error']}")
    return table if options.json else retrieval.markdown(table)


def measure_train(options: argparse.Namespace) -> dict[str, Any]:
    from jax_ragrl.bench.train import TrainWork, bench_train

    work = _from_options(TrainWork, options)
    if not options.baseline:
        return bench_train(work, share_rows=options.grouped, compare=options.compare)
    from jax_ragrl.bench.peers import compare_steps, measure_peer

    # The peer runs first, while this process has not allocated device memory yet.
    theirs = measure_peer(options.baseline, work)
    result = bench_train(work, share_rows=options.grouped, compare=options.compare)
    ours = result["grouped" if options.grouped else "ungrouped"]
    return result | {options.baseline: theirs | compare_steps(ours, theirs)}


def _from_options(cls: Any, options: argparse.Namespace) -> Any:
    """An instance of a dataclass from the options of a command; absent ones keep defaults."""
    given = vars(options)
    return cls(**{f.name: given[f.name] for f in dataclasses.fields(cls) if f.name in given})
