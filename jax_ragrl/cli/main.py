"""`ragrl`: one command a thing to do. What a user can act on is one line and exit code 2."""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import functools
import json
import pathlib
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jax_ragrl.bench import command as bench
from jax_ragrl.config.arguments import CONFIG_HELP, natural, positive
from jax_ragrl.config.overrides import load_config, override
from jax_ragrl.config.schema import local
from jax_ragrl.errors import EffectError, UserError

PAPERS = ("c3po", "mmoa_rag", "coda", "mao_arag", "opera")
CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
MODEL = "a model folder, a .gguf file, OWNER/NAME on the Hugging Face Hub, tiny or smollm2"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns the exit code."""
    warnings.formatwarning = _told_of
    if hasattr(signal, "SIGUSR1") and sys.__stderr__:  # where a process that hangs stands
        faulthandler.register(signal.SIGUSR1, sys.__stderr__)
    try:
        arguments = _parse(argv)
        arguments.run(arguments)
    except (UserError, EffectError) as error:
        print(f"ragrl: {error}", file=sys.stderr)
        return 2
    except (OSError, ValueError) as error:  # a ValueError is what TensorStore raises
        if not (told := _of_disk(error)):
            raise
        print(f"ragrl: {told}", file=sys.stderr)
        return 2
    return 0


def _told_of(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    line: str | None = None,
) -> str:
    """A warning of this package as its errors are told; another with its place in the code."""
    if category is UserWarning and PACKAGE in pathlib.Path(filename).parents:
        return f"ragrl: {message}\n"
    return FORMAT(message, category, filename, lineno, line)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    wrong = [r for r in rest if not (arguments.takes_config and r.startswith("--config"))]
    if wrong:
        parser.error(f"unrecognized arguments: {' '.join(wrong)}")
    arguments.config = rest
    return arguments


PACKAGE = pathlib.Path(__file__).parents[1]
FORMAT = warnings.formatwarning
FULL = ("No space left on device", "Disk quota exceeded")


def _of_disk(error: OSError | ValueError) -> str:
    """What to say of a full disk, or a file that cannot be used; empty for another error."""
    if any(text in str(error) for text in FULL):
        why = " ".join(str(error).split())
        return f"the disk is full ({why}): free some space, and give the same command again"
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}: give a path that can be read, or written"
    return ""


Command = Callable[..., argparse.ArgumentParser]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ragrl", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="command")

    def command(
        run: Callable[[argparse.Namespace], None], text: str, config: bool = False
    ) -> argparse.ArgumentParser:
        """A sub-command named after `run`; with `config` it takes --config=FILE and overrides."""
        name = run.__name__.strip("_").replace("_", "-")
        told = CONFIG_HELP if config else None
        sub = commands.add_parser(
            name, help=text, description=text, epilog=told, allow_abbrev=False
        )
        sub.set_defaults(run=run, takes_config=config)
        return sub

    _training_commands(command)
    _data_commands(command)
    _evaluate_arguments(command(_evaluate, "evaluate systems on questions", True))
    _run_commands(command)
    bench.add_arguments(command(_bench, "measure something and print JSON"))
    return parser


def _training_commands(command: Command) -> None:
    sub = command(_quickstart, "train C-3PO on the generated encyclopedia and report", True)
    sub.add_argument("--seed", type=int, default=0, help="of the world and of training")
    sub.add_argument("--workdir", type=local, help="default: runs/quickstart-<seed>")
    sub = command(_train, "train a system: --config=FILE and --config.a.b=VALUE overrides", True)
    sub.add_argument("--workdir", type=local, required=True)
    _trials_arguments(command(_trials, "the whole job for every system and seed, one table", True))
    sub = command(_warmup, "supervised warm start of the tiny policy", True)
    sub.add_argument("--out", type=local, required=True)
    why = "fine-tune a generator on what is found for questions, or a policy on demonstrations"
    sub = command(_sft, why, True)
    sub.add_argument("--out", type=local, required=True)
    sub = command(_demos, "what a language model writes on the way to right answers", True)
    sub.add_argument("--out", type=local, required=True, help="for data.demos; goes on")
    writers = f"openai:MODEL[@URL], {MODEL}, or labels (of MMOA-RAG; labels:answer)"
    sub.add_argument("--writer", required=True, help=writers)
    baseline = (
        "adaptive_rag or slim_plm: what its classifier learns, instead of the config's system"
    )
    sub.add_argument("--of", default="", help=baseline)
    sub.add_argument("--limit", type=natural, default=0, help="first N questions; 0: all")
    sub.add_argument("--samples", type=positive, default=1, help="rollouts of a question")
    sub.add_argument("--temperature", type=float, help="default: that of each role")
    sub = command(_pool, "write and score actions for OPERA's experts, before training", True)
    sub.add_argument("--out", type=local, required=True, help="for recipe.pool")
    sub.add_argument("--writer", default="policy", help=f"policy, openai:MODEL[@URL], or {MODEL}")
    sub.add_argument("--temperatures", default="0.3,0.5,0.7,0.9")
    sub.add_argument("--limit", type=natural, default=0, help="first N questions; 0: all")


def _trials_arguments(sub: argparse.ArgumentParser) -> None:
    sub.epilog = (
        "--config.a.b=VALUE changes every system that is named; with --config.policy=FOLDER they "
        "start from there, and not from their own warm-up."
    )
    sub.add_argument("--systems", default=",".join(PAPERS), help="names of files in configs/tiny")
    sub.add_argument("--seeds", default="0,1,2")
    sub.add_argument("--out", type=local, default=pathlib.Path("runs/trials"))
    why = "the --out of other trials of these systems and seeds: what is won over each of them"
    sub.add_argument("--against", type=local, metavar="OUT", help=why)


def _data_commands(command: Command) -> None:
    sub = command(_world, "write a generated encyclopedia: passages.jsonl, <split>.jsonl")
    sub.add_argument("--size", type=int, default=240, help="how many people")
    sub.add_argument("--seed", type=int, default=0)
    sub.add_argument("--out", type=local, required=True)
    sub = command(_index, "encode a corpus and build its index")
    sub.add_argument("--corpus", type=local, required=True)
    sub.add_argument("--out", type=local, required=True)
    sub.add_argument(
        "--encoder",
        default="lexical",
        help="lexical, minilm, a model folder, or OWNER/NAME on the Hub",
    )
    sub.add_argument("--kind", default="scann", help="scann or exact")
    why = "of the vectors: float32 or, half as large, bfloat16"
    sub.add_argument("--dtype", default="float32", help=why)
    sub.add_argument("--questions", type=local, help="measure recall on these")
    why = "their gold passages: judgements of TREC (query iteration passage relevance) or BEIR"
    sub.add_argument("--qrels", type=local, help=why)
    why = "of the passages, in their order (flat Faiss, .npy, .memmap): they are not encoded again"
    sub.add_argument("--vectors", type=local, help=why)
    for text in ("query", "passage"):
        why = f"put before every {text}, where the model's folder does not say it"
        sub.add_argument(f"--{text}-prefix", help=why)


def _run_commands(command: Command) -> None:
    """What is done with a run that is there, and a plan of one that is not."""
    sub = command(_ask, "answer one question with a system and show every step", True)
    sub.add_argument("question")
    sub.add_argument("--workdir", type=local, help="of a run: its trained policy answers")
    sub = command(_serve, "answer questions over HTTP with a system, in batches as they come", True)
    sub.add_argument("--workdir", type=local, help="of a run: its trained policy answers")
    sub.add_argument("--host", default="127.0.0.1", help="0.0.0.0: every network of the machine")
    sub.add_argument("--port", type=int, default=8000, help="0: any that is free")
    sub.add_argument("--batch", type=int, default=64, help="questions of a rollout, or a request")
    sub.add_argument("--waiting", type=int, default=256, help="questions; above, requests get 503")
    sub = command(_export, "write the trained policy of a run in Hugging Face layout")
    sub.add_argument("workdir", type=local)
    sub.add_argument("--out", type=local, required=True)
    sub.add_argument("--policy", help="which one, where a run has several")
    sub.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    sub.add_argument("--adapter", action="store_true", help="the LoRA adapter alone, for PEFT")
    sub = command(_report, "write report.html of a run")
    sub.add_argument("workdir", type=local)
    sub = command(_plan, "memory that --config=FILE takes of each device, without one", True)
    sub.description = PLANNED
    sub.add_argument("--shape", help=f"a published name, or {MODEL}; default: config.policy")
    sub.add_argument("--topology", required=True, help="such as v5e:4x4, or h100:8")


PLANNED = (
    "The memory that --config=FILE takes of each device, without one: policies, of --shape where "
    "config.policies gives none of its own; an exact index, its encoder, and a language model or "
    "judge of kind local, of folders on this machine. What else the config has on the devices is "
    "listed as 'uncounted', and 'fits' is then null, not true."
)


def _evaluate_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--systems", default="direct,standard_rag,c3po", help="names, or all")
    sub.epilog = (
        "--config.recipe.b=VALUE, or --config.shapes.b=VALUE, changes the systems of --run."
    )
    why = "of runs: a row for the system that each has trained, with its own policy"
    sub.add_argument("--run", dest="runs", nargs="+", default=(), metavar="WORKDIR", help=why)
    asked = sub.add_mutually_exclusive_group(required=True)
    asked.add_argument("--questions", type=local, help="one set: needs --corpus, --index")
    asked.add_argument(
        "--data",
        nargs="+",
        metavar="[NAME=]QUESTIONS[@CORPUS]",
        help="several sets, one table; a set without passages of its own uses --corpus",
    )
    sub.add_argument("--corpus", type=local)
    sub.add_argument("--index", dest="index_folder", type=local, help="made by ragrl index")
    why = "a server to search instead of both, or the web by the engine serper or searxng"
    sub.add_argument("--retriever", default="", metavar="URL|ENGINE[@URL]", help=why)
    sub.add_argument("--policy", default="tiny", help=MODEL)
    sub.add_argument("--llm", default="tiny", help=f"openai:MODEL[@URL], or {MODEL}")
    sub.add_argument("--judge", default="", help="grades answers as the score judge; as --llm")
    sub.add_argument("--int8", action="store_true", help="eight-bit weights of a local --llm")
    sub.add_argument("--style", default="tiny", help="of the prompts: tiny or full")
    sub.add_argument("--top-k", type=natural, default=5)
    sub.add_argument("--limit", type=natural, default=0, help="first N questions; 0: all")
    sub.add_argument("--train", type=local, help="labelled questions, for skr_knn")
    sub.add_argument("--out", type=local, help="with --questions: write the table as JSON")
    sub.add_argument(
        "--workdir",
        type=local,
        default=pathlib.Path("runs/table"),
        help="with --data: rows, table and indexes; goes on where it stood",
    )
    sub.add_argument("--encoder", default="lexical", help="with --data: of indexes that are made")


def _load_job(values: dict[str, Any], workdir: pathlib.Path) -> Any:
    """The job of a config; a work folder belongs to one config, and to all hosts of a run."""
    from jax_ragrl.config.snapshot import PLACES, check_settled, settle
    from jax_ragrl.run.config import load_job
    from jax_ragrl.runtime.multihost import by_first, check_shared, gathered

    job, file = load_job(values), workdir / "config.json"
    # A rate that does not depend on the length of a run lets it be made longer.
    free = (*PLACES, "config.run.steps") if job.optimizer.steady else PLACES
    check_shared(workdir)
    by_first(lambda: settle(file, values, free=free, renew=not _begun(workdir)))
    gathered(lambda: check_settled(file, values, free))
    return job


def _begun(workdir: pathlib.Path) -> bool:
    """Whether a work folder holds what its config has made; without, a mistake can be put right."""
    made = ("baselines.json", "checkpoints/*")  # an index says itself what it is of
    return any(True for pattern in made for _ in workdir.glob(pattern))


def _quickstart(arguments: argparse.Namespace) -> None:
    workdir = arguments.workdir or pathlib.Path("runs") / f"quickstart-{arguments.seed}"
    values = load_config(CONFIGS / "tiny" / "c3po.py", arguments.config)
    from jax_ragrl.runtime.multihost import first, join

    join()  # before anything asks for a device
    from jax_ragrl.experiments.experiment import quickstart
    from jax_ragrl.runtime.compile_cache import keep_programs

    job = _seeded_job(values, arguments.seed, workdir)
    keep_programs(workdir)
    summary = quickstart(job, workdir)
    if first():
        print(json.dumps(summary, indent=2))


def _seeded_job(values: dict[str, Any], seed: int, workdir: pathlib.Path) -> Any:
    """The job of a config with another seed for training and, where there is one, the world."""
    values["seed"] = seed
    if values["data"].get("world"):
        values["data"]["world"]["seed"] = seed
    return _load_job(values, workdir)


def _trials(arguments: argparse.Namespace) -> None:
    from jax_ragrl.experiments.seeds import run_trials
    from jax_ragrl.runtime.compile_cache import keep_programs
    from jax_ragrl.warmstart.warmup import load_warmup, warm_up

    systems, changes = arguments.systems.split(","), arguments.config
    keys = {change.partition("=")[0] for change in changes}
    if fixed := sorted(keys & {"--config", "--config.seed", "--config.data.world.seed"}):
        raise UserError(f"{fixed[0]} is not for trials: give --systems and --seeds")

    def load(system: str, seed: int, policy: str, workdir: pathlib.Path) -> Any:
        try:
            values = load_config(CONFIGS / "tiny" / f"{system}.py", changes)
            return _seeded_job(values | ({"policy": policy} if policy else {}), seed, workdir)
        except UserError as error:
            raise UserError(f"{system}: {error}") from error

    def warm(config: pathlib.Path, folder: pathlib.Path) -> Any:
        return warm_up(*load_warmup(load_config(config, [])), folder)

    configs = {system: CONFIGS / "tiny" / f"warmup_{system}.py" for system in systems}
    own = {z: functools.partial(warm, config) for z, config in configs.items() if config.exists()}
    # A system's seeds share their programs, which take longer to compile than a seed to evaluate.
    keep_programs(arguments.out, also_cpu=True)
    given = (load, {} if "--config.policy" in keys else own, arguments.out, arguments.against)
    print(run_trials(systems, _numbers(arguments.seeds), *given))


def _numbers(text: str, kind: type[int] | type[float] = int) -> list[Any]:
    """Comma-separated numbers."""
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        named = "integers" if kind is int else "numbers"
        raise UserError(f"{text!r}: give {named} with commas, such as 0,1") from None


def _train(arguments: argparse.Namespace) -> None:
    values = load_config(None, arguments.config)
    from jax_ragrl.runtime.multihost import join

    join()  # before anything asks for a device
    from jax_ragrl.run.components import assemble
    from jax_ragrl.runtime.compile_cache import keep_programs
    from jax_ragrl.train.loop import train

    job = _load_job(values, arguments.workdir)
    keep_programs(arguments.workdir)
    train(job, assemble(job, arguments.workdir), arguments.workdir)


def _warmup(arguments: argparse.Namespace) -> None:
    values = load_config(CONFIGS / "tiny" / "warmup.py", arguments.config)
    from jax_ragrl.runtime.compile_cache import keep_programs
    from jax_ragrl.warmstart.warmup import load_warmup, warm_up

    keep_programs(arguments.out)
    print(json.dumps(warm_up(*load_warmup(values), arguments.out), indent=2))


def _sft(arguments: argparse.Namespace) -> None:
    values = load_config(None, arguments.config)
    from jax_ragrl.runtime.compile_cache import keep_programs
    from jax_ragrl.warmstart.demos import load_warm_start, warm_start
    from jax_ragrl.warmstart.finetune import fine_tune, load_finetune

    keep_programs(arguments.out)
    if "demos" in values.get("data", {}):
        print(json.dumps(warm_start(load_warm_start(values), arguments.out), indent=2))
        return
    print(json.dumps(fine_tune(load_finetune(values), arguments.out), indent=2))


def _demos(arguments: argparse.Namespace) -> None:
    values = load_config(None, arguments.config)
    from jax_ragrl.warmstart.make_demos import Writer, make_demos

    a = arguments
    writer = Writer(a.writer, a.samples, a.temperature)
    print(json.dumps(make_demos(values, a.out, writer, a.limit, a.of), indent=2))


def _pool(arguments: argparse.Namespace) -> None:
    values = load_config(CONFIGS / "tiny" / "opera.py", arguments.config)
    from jax_ragrl.warmstart.expert_pool import make_pool

    a, temperatures = arguments, _numbers(arguments.temperatures, float)
    print(json.dumps(make_pool(values, a.out, a.writer, temperatures, a.limit), indent=2))


def _world(arguments: argparse.Namespace) -> None:
    from jax_ragrl.corpus.formats.flashrag import save_questions
    from jax_ragrl.corpus.passages import Corpus, save_corpus
    from jax_ragrl.corpus.world import generate

    world = generate(arguments.seed, arguments.size)
    arguments.out.mkdir(parents=True, exist_ok=True)
    save_corpus(Corpus(world.passages), arguments.out / "passages.jsonl")
    for split, questions in world.questions.items():
        save_questions(questions, arguments.out / f"{split}.jsonl")
    counts = {split: len(questions) for split, questions in world.questions.items()}
    print(json.dumps({"passages": len(world.passages), **counts, "out": str(arguments.out)}))


def _index(arguments: argparse.Namespace) -> None:
    from jax_ragrl.retrieval.index import run_index

    a = arguments
    prefixes = {"query_prefix": a.query_prefix, "passage_prefix": a.passage_prefix}
    result = run_index(
        a.corpus, a.out, a.encoder, a.kind, a.questions, a.vectors, a.dtype, a.qrels, **prefixes
    )
    print(json.dumps(result, indent=2))


def _evaluate(arguments: argparse.Namespace) -> None:
    from jax_ragrl.evaluation.suite import parse_data, survey
    from jax_ragrl.evaluation.table import RUN, Setting, compare, outage
    from jax_ragrl.runtime.compile_cache import keep_programs

    a = arguments
    given = {name: getattr(a, name) for name in Setting._fields if name != "changes"}
    systems = (*a.systems.split(","), *(f"{RUN}{folder}" for folder in a.runs))
    setting = Setting(**given | {"systems": systems, "changes": tuple(a.config)})
    if a.data:
        keep_programs(a.workdir)
        sets = [parse_data(text) for text in a.data]
        page, filled = survey(setting, sets, a.workdir, a.encoder)
        print(page)
        if not filled:
            raise UserError(
                "every cell failed: the lines below the table say why; the next call tries again"
            )
        return
    table = compare(setting)
    print(json.dumps(table, indent=2))
    if a.out:
        a.out.write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")
    if why := outage(table):
        raise UserError(f"every question of every system failed, most with: {why}")


def _ask(arguments: argparse.Namespace) -> None:
    from jax_ragrl.run.inference import ask

    with _acting(arguments) as (_, job, parts):
        print(ask(job, parts, arguments.question))


@contextlib.contextmanager
def _acting(arguments: argparse.Namespace) -> Iterator[tuple[dict[str, Any], Any, Any]]:
    """The config, job and parts of --workdir as it has trained, or of --config as it begins.

    Overrides go with either: a server may have moved since.
    """
    import tempfile

    from jax_ragrl.config.snapshot import settled
    from jax_ragrl.run.components import assemble
    from jax_ragrl.run.config import load_job
    from jax_ragrl.run.inference import trained_policies
    from jax_ragrl.runtime.compile_cache import keep_programs

    def parts(folder: pathlib.Path) -> Any:
        made = assemble(job, folder)
        if not run:
            return made
        policies = trained_policies(job, made.policies, folder)
        return made._replace(policies=policies)

    run, given = arguments.workdir, arguments.config
    if run and not all(a.startswith("--config.") for a in given):
        raise UserError("--workdir uses the config of its run: leave --config=FILE out")
    default = CONFIGS / "tiny" / "c3po.py"
    values = settled(run / "config.json") if run else load_config(default, given)
    if run:
        override(values, given)
        keep_programs(run)
    job = load_job(values)
    with tempfile.TemporaryDirectory() as folder:
        yield values, job, parts(run or pathlib.Path(folder))


def _serve(arguments: argparse.Namespace) -> None:
    from jax_ragrl.run.inference import greedy_environment
    from jax_ragrl.serve.app import Limits, serve
    from jax_ragrl.serve.replies import Served

    a = arguments
    with _acting(a) as (values, job, parts):
        environment = greedy_environment(job, parts, parts.models())
        warm = parts.questions["dev"][0].text
        names = (str(values["system"]), str(a.workdir or job.policy))
        served = Served(*names, job.recipe.evaluated, environment, warm)
        del parts  # what the environment does not hold is free
        serve(served, a.host, a.port, Limits(a.batch, a.waiting))


def _export(arguments: argparse.Namespace) -> None:
    from jax_ragrl.config.snapshot import settled
    from jax_ragrl.export import export, export_adapter
    from jax_ragrl.models.by_name import local_model
    from jax_ragrl.run.components import load_policies, policy_folder
    from jax_ragrl.run.config import load_job
    from jax_ragrl.run.inference import trained_policies

    job = load_job(settled(arguments.workdir / "config.json"))
    # On one device: the run's mesh may be of a larger machine. An adapter is merged in float32.
    policies = trained_policies(job, load_policies(job, None, "float32")[0], arguments.workdir)
    name = arguments.policy or (next(iter(policies)) if len(policies) == 1 else None)
    if name not in policies:
        raise UserError(f"--policy is {name!r}: the run has {', '.join(policies)}")
    named = dict(job.policies).get(name, job.policy)
    base = policy_folder(named)
    if arguments.adapter:
        # A name on the Hub is valid on other machines; its folder in the cache is not.
        public = local_model(named) is None
        done = export_adapter(policies[name], arguments.out, named if public else str(base))
    else:
        done = export(policies[name], arguments.out, base, dtype=arguments.dtype)
    print(json.dumps(done._asdict(), default=str))


def _bench(arguments: argparse.Namespace) -> None:
    print(json.dumps(arguments.measure(arguments), indent=None if arguments.json else 2))


def _report(arguments: argparse.Namespace) -> None:
    from jax_ragrl.report.build import build_report

    print(build_report(arguments.workdir))


def _plan(arguments: argparse.Namespace) -> None:
    import os

    # Read when JAX starts: who describes devices must not look for them.
    quiet = {"TPU_SKIP_MDS_QUERY": "1", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
    os.environ |= {"JAX_PLATFORMS": "cpu"} | quiet
    from jax_ragrl.config.schema import build
    from jax_ragrl.plan import Plan, plan, plan_of, shape_of
    from jax_ragrl.runtime.topology import describe_devices

    values = load_config(None, arguments.config)
    run, name = build(Plan, plan_of(values)), arguments.shape or values.get("policy")
    if not name:
        raise UserError("no policy is named: give --shape NAME, or --config.policy=FOLDER")
    devices = describe_devices(arguments.topology)
    print(json.dumps(plan(run, shape_of(name), devices), indent=2))


if __name__ == "__main__":
    sys.exit(main())
