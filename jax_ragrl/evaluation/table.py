"""Results table of several systems on one question set: metrics, malformed outputs, costs."""

from __future__ import annotations

import copy
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import tqdm
from flax import nnx

from jax_ragrl.config.overrides import override
from jax_ragrl.config.schema import one_of
from jax_ragrl.config.snapshot import settled
from jax_ragrl.corpus.questions import load_answered
from jax_ragrl.errors import UserError
from jax_ragrl.evaluation.registry import LEARNERS, SYSTEMS, Bench
from jax_ragrl.llm.base import FrozenLLM
from jax_ragrl.retrieval.base import Retriever
from jax_ragrl.retrieval.index import load_indexed, open_index, read_description
from jax_ragrl.retrieval.recall import recall
from jax_ragrl.rollout.collect import Environment
from jax_ragrl.rollout.policy import PolicySampler
from jax_ragrl.rollout.system import System
from jax_ragrl.run.components import load_llm, load_policies, load_policy, mesh_for, served
from jax_ragrl.run.config import Job, load_job, parse_index, parse_llm
from jax_ragrl.run.evaluate import NoSampler, Result, evaluate, intervals, table
from jax_ragrl.run.inference import trained_policies
from jax_ragrl.sampling.sampler import Shapes
from jax_ragrl.sampling.weights import for_sampling
from jax_ragrl.text.tokenizer import ChatTokenizer
from jax_ragrl.types import Question


class Setting(NamedTuple):
    """What a table is made of.

    `systems` are names in `SYSTEMS`, `all`, or `run:WORKDIR`: what `ragrl train` left there, which
    has policies of its own. `llm` is `tiny`, a model folder, or `openai:MODEL[@URL]`, and so is the
    `judge`, if any; `style` is `tiny` (prompts for the model that ships with the package, actions
    of `TINY_STEPS` tokens at most) or `full`. `train` holds labelled questions for the systems in
    `LEARNERS`; `limit` cuts every question file. `int8` gives an `llm` in this process eight-bit
    weights. `retriever` is a server to ask instead of a corpus and its index, as `parse_index`
    reads it. `changes` are overrides of a run's `recipe` and `shapes`: its policies in another
    system than they learnt in.
    """

    corpus: pathlib.Path | None
    questions: pathlib.Path | None
    index_folder: pathlib.Path | None
    systems: tuple[str, ...]
    policy: str
    llm: str
    style: str
    top_k: int
    limit: int
    train: pathlib.Path | None = None
    judge: str = ""
    int8: bool = False
    retriever: str = ""
    changes: tuple[str, ...] = ()


class Actors(NamedTuple):
    """The models of a table, loaded once: the frozen one, the judge if any, the policy's."""

    llm: FrozenLLM
    judge: FrozenLLM | None
    policy: tuple[Any, Any]
    tokenizer: ChatTokenizer


# Of the `full` style: CoDA's contexts end at 6,656 tokens, and thirty passages of 200 take as many.
LENGTHS = (*Shapes().lengths, 6144, 8192, 12288, 16384)
RUN = "run:"  # before the work folder of a run
TINY_STEPS = 64  # more than any role in `configs/tiny` may write


def compare(setting: Setting) -> dict[str, Any]:
    """Every system on every question, and the recall of the retriever where gold is known."""
    names, retriever = chosen(setting), retriever_of(setting)
    questions = questions_of(setting)
    actors = load_actors(setting)
    bench = open_bench(setting, actors, retriever)
    rows: dict[str, Any] = {"questions": len(questions), "llm": actors.llm.name}
    if any(question.gold for question in questions):
        rows |= recall(retriever, questions)
    for name in (bar := tqdm.tqdm(names, unit="system", disable=None)):
        bar.set_description(name)
        rows[name] = measured(name, bench, actors, questions)
    return rows


def outage(table: Mapping[str, Any]) -> str | None:
    """What most failures of a system said, where no system has answered any question."""
    rows = [row for row in table.values() if isinstance(row, dict)]
    if not rows or any(set(row["ended"]) != {"failed"} for row in rows):
        return None
    return str(rows[-1]["failed_with"])


def retriever_of(setting: Setting) -> Retriever:
    """A server, or an index that is there."""
    corpus, folder = setting.corpus, setting.index_folder
    if setting.retriever and not (corpus or folder):
        return served(parse_index(setting.retriever), None)
    if setting.retriever or not (corpus and folder):
        raise UserError(
            "--questions needs --corpus and --index, or --retriever alone; --data makes its own"
        )
    read_description(folder)  # a wrong folder is left as it is
    return open_index(folder, load_indexed(corpus, folder))


def load_actors(setting: Setting) -> Actors:
    """The models that a setting names."""
    shapes = Shapes() if setting.style == "tiny" else Shapes(LENGTHS)
    # The style is that of a rule-based reader, which no table has.
    llm = load_llm(parse_llm(setting.llm, int8=setting.int8), None, "", shapes)
    judge = load_llm(parse_llm(setting.judge), None, "", shapes) if setting.judge else None
    decoder, tokenizer = load_policy(setting.policy)
    return Actors(llm, judge, nnx.split(decoder, nnx.Param), tokenizer)


def open_bench(setting: Setting, actors: Actors, retriever: Retriever) -> Bench:
    """What the systems are built from, over one index."""
    train = load_answered(setting.train)[: setting.limit or None] if setting.train else ()
    frozen = Environment(NoSampler(), retriever, actors.llm, actors.tokenizer.count)
    return Bench(setting.style, setting.top_k, frozen, retriever, train, setting.changes)


def questions_of(setting: Setting) -> Sequence[Question]:
    """The questions of a table."""
    if setting.questions is None:
        raise UserError("there are no questions: give --questions FILE or --data FILE ...")
    return load_answered(setting.questions)[: setting.limit or None]


def measured(
    name: str, bench: Bench, actors: Actors, questions: Sequence[Question]
) -> dict[str, Any]:
    """The row of one system."""
    if name.startswith(RUN):
        system, sampler = trained(pathlib.Path(name.removeprefix(RUN)), bench.changes)
    else:
        system, sampler = untrained(name, bench, actors)
    environment = bench.environment._replace(sampler=sampler)
    return row(evaluate(system, questions, environment, judge=actors.judge), questions)


def untrained(name: str, bench: Bench, actors: Actors) -> tuple[System, PolicySampler]:
    """A system by name, all of whose roles are played by the policy of the table."""
    system = SYSTEMS[name](bench)
    models = {role.policy: actors.policy for role in system.roles.values()}
    longest = max((role.sampling.max_tokens for role in system.roles.values()), default=1)
    shapes = Shapes(steps=TINY_STEPS) if bench.tiny else Shapes(LENGTHS, steps=longest)
    return system, PolicySampler(models, actors.tokenizer, shapes, greedy=True)


def trained(workdir: pathlib.Path, changes: Sequence[str] = ()) -> tuple[System, PolicySampler]:
    """The system and the policies of a run, as its config and its newest checkpoint have them.

    Retriever and frozen language model are the table's; `changes` are those of a `Setting`.
    """
    values = settled(workdir / "config.json")
    job, acting = load_job(values), changed(values, changes)
    if unknown := sorted({*acting.policy_of.values()} - {*job.policy_of.values()}):
        raise UserError(f"{workdir} has no policy {unknown[0]!r}: change something else")
    policies, tokenizer = load_policies(job, mesh_for(job))
    models = for_sampling(trained_policies(job, policies, workdir))
    return acting.recipe.evaluated, PolicySampler(models, tokenizer, acting.shapes, greedy=True)


def changed(values: Mapping[str, Any], changes: Sequence[str]) -> Job:
    """The job of a config with overrides of its system.

    Raises:
      UserError: the override of another section, of which a table reads nothing.
    """
    for change in changes:
        if not change.startswith(("--config.recipe.", "--config.shapes.")):
            raise UserError(f"{change}: a table changes config.recipe and config.shapes alone")
    # The schedule may name roles that are not there now.
    values = {name: copy.deepcopy(x) for name, x in values.items() if name != "schedule"}
    override(values, changes)
    return load_job(values)


def chosen(setting: Setting) -> tuple[str, ...]:
    """The names of a table's systems; `all` leaves out what has nothing to learn from.

    Raises:
      UserError: a name or a style that is not known, a folder that holds no run, or changes that
        none can have.
    """
    runs = tuple(name for name in setting.systems if name.startswith(RUN))
    for name in runs:
        values = settled(pathlib.Path(name.removeprefix(RUN)) / "config.json")
        if setting.changes:
            changed(values, setting.changes)
    if setting.changes and not runs:
        raise UserError(f"{setting.changes[0]} changes the system of a run: give --run WORKDIR")
    unknown = [name for name in setting.systems if name not in (*SYSTEMS, "all", *runs)]
    if unknown:
        raise UserError(f"unknown system {unknown[0]!r}: known are all, {', '.join(SYSTEMS)}")
    one_of("style", setting.style, ("tiny", "full"))
    if "all" not in setting.systems:
        return setting.systems
    return (*(name for name in SYSTEMS if setting.train or name not in LEARNERS), *runs)


def row(result: Result, questions: Sequence[Question]) -> dict[str, Any]:
    """A system's summary with 95 % intervals, and its scores by hops and kind where known."""
    summary = result.summary()
    summary["ci95"] = intervals(result)
    if any(question.hops for question in questions):
        summary["hops"] = table(result, questions, lambda question: question.hops)
    if any(question.kind for question in questions):
        summary["kinds"] = table(result, questions, lambda question: question.kind)
    return summary
