"""Results table of several systems on one question set: metrics, malformed outputs, costs."""

from __future__ import annotations

import copy
import functools
import pathlib
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jax_ragrl.config.schema import one_of
from jax_ragrl.config.snapshot import load_saved_config
from jax_ragrl.corpus.fields import NO_FIELDS
from jax_ragrl.corpus.mixture import load_answered
from jax_ragrl.corpus.questions import sample_in_order
from jax_ragrl.corpus.reading import Reading
from jax_ragrl.errors import UserError
from jax_ragrl.evaluation.registry import (
    EVERY_SYSTEM,
    EVERY_WORKFLOW,
    LEARNERS,
    SYSTEMS,
    WORKFLOWS,
    BuildContext,
)
from jax_ragrl.evaluation.served_policy import served_policy
from jax_ragrl.llm.base import FrozenLLM
from jax_ragrl.models.config import TINY
from jax_ragrl.models.split import SplitModel
from jax_ragrl.retrieval.base import Retriever
from jax_ragrl.retrieval.description import read_description
from jax_ragrl.retrieval.index import load_indexed
from jax_ragrl.retrieval.recall import report_gold, search_quality
from jax_ragrl.rollout.collect import ActionSampler, Environment
from jax_ragrl.rollout.costs import FREE, Prices
from jax_ragrl.rollout.llm_policy import LLMActionSampler
from jax_ragrl.rollout.policy import PolicySampler
from jax_ragrl.rollout.system import System
from jax_ragrl.run.checkpoint_name import RunCheckpoint, parse_run
from jax_ragrl.run.config import Job
from jax_ragrl.run.evaluate import NoSampler, Result, evaluate, intervals, table
from jax_ragrl.run.index import server_retriever
from jax_ragrl.run.index_folder import open_folder
from jax_ragrl.run.inference import trained_policies
from jax_ragrl.run.load import load_job
from jax_ragrl.run.mistakes import count_mistakes
from jax_ragrl.run.models import PolicyLoader, load_llm, load_policies, mesh_for, shared_loader
from jax_ragrl.run.overrides import override
from jax_ragrl.run.pipeline import LoadLLM
from jax_ragrl.run.predictions import file_label, prediction_rows, write_predictions
from jax_ragrl.run.short_names import SERVER, parse_index, parse_llm
from jax_ragrl.run.world_folder import READER, load_reader
from jax_ragrl.runtime.jsonl import write_json
from jax_ragrl.runtime.progress import progress
from jax_ragrl.sampling.sampler import Shapes
from jax_ragrl.sampling.weights import for_sampling
from jax_ragrl.text.metrics import paired_bootstrap
from jax_ragrl.text.tokenizer import ChatTokenizer
from jax_ragrl.types import Question


class TableSettings(NamedTuple):
    """Settings of a results table.

    Fields:
      corpus: file or folder of the passages.
      questions: file of the questions.
      index_folder: search index of `corpus`.
      systems: names in `SYSTEMS` or `WORKFLOWS`, `all`, `workflows`, or `run:WORKDIR` for a run of
        `ragrl train`, which has its own policies.
      policy: policy of the other systems: `tiny`, a Hugging Face folder, or `openai:MODEL[@URL]`,
        which plays all roles greedily. Empty: none, so that systems with trained roles are
        refused, and left out of `all` and `workflows`.
      llm: frozen language model: `tiny`, a model folder, `openai:MODEL[@URL]`, or `world:FOLDER`
        for the rule-based reader of a folder that `ragrl data world` wrote, in the style `tiny`.
      style: `tiny` (prompts for the model that ships with the package, at most `TINY_NEW_TOKENS`
        tokens per action) or `full`.
      top_k: passages per search.
      limit: number of questions of each file, a random sample; 0 = all.
      policy_examples, shots: a file of demonstrations, and how many of them precede each prompt of
        a policy on a server.
      train: labeled questions for the systems in `LEARNERS`.
      judge: language model that grades answers, in the format of `llm`; empty = none.
      int8: whether an `llm` in this process has int8 weights.
      retriever: search server instead of `corpus` and `index_folder`, see `parse_index`.
      predictions: folder for the predictions of every system.
      prices: adds the cost `dollars` to each row, unless all of them are 0.
      overrides: `--config.KEY=VALUE` for the recipe and shapes of runs.
      fields: names of fields in the files, see `corpus.formats.own`.
      cache: file of earlier replies of language models on servers, see `llm.cache`; None: none.
      replies: file of recorded replies of language models on servers, see `OpenAIConfig`.
      replies_only: whether a request without a recorded reply is an error.
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
    overrides: tuple[str, ...] = ()
    predictions: pathlib.Path | None = None
    prices: Prices = FREE
    policy_examples: pathlib.Path | None = None
    shots: int = 2
    fields: Mapping[str, str] = NO_FIELDS
    cache: pathlib.Path | None = None
    replies: pathlib.Path | None = None
    replies_only: bool = False

    @property
    def recorded(self) -> dict[str, Any]:
        """Returns the arguments of `parse_llm` that name the recorded replies."""
        return {"replies": self.replies or "", "replies_only": self.replies_only}


class TableModels(NamedTuple):
    """The models of a table, loaded once.

    `policy` plays all roles; the tokenizer is its own, or for a model on a server that of the
    shipped policy, which only counts tokens.
    """

    llm: FrozenLLM
    judge: FrozenLLM | None
    policy: SplitModel | LLMActionSampler
    tokenizer: ChatTokenizer


# Prompt lengths of the `full` style. CoDA's contexts have up to 6,656 tokens, about as many as
# thirty passages of 200 tokens. A longer bucket is compiled only when a prompt needs it.
LENGTHS = (*Shapes().prompt_lengths, 6144, 8192, 12288, 16384)
RUN = "run:"  # prefix of a work folder among the names of systems
TINY_NEW_TOKENS = 64  # no role in `configs/tiny` may write more


def evaluate_table(settings: TableSettings, out: pathlib.Path | None = None) -> dict[str, Any]:
    """Evaluates each system on all questions; the file `out` is written again after every row.

    Returns:
      One row per system (see `evaluate_row`), the number of questions and, if they have gold
      passages, `search_quality` and the number of gold passages that the corpus lacks.
    """
    # Cheap checks first: a wrong name must not cost the loading of models.
    names, load = select_systems(settings), functools.cache(lambda: load_models(settings))
    retriever = open_retriever(settings, lambda: load().llm)
    questions = load_questions(settings)
    models = load()
    context = build_context(settings, models, retriever)
    rows: dict[str, Any] = {"questions": len(questions), "llm": models.llm.name}
    if any(question.gold for question in questions):
        rows |= search_quality(retriever, questions) | report_gold(retriever, questions)
    done: dict[str, dict[str, Any]] = {}
    with progress("evaluate", "system", len(names)) as bar:
        for name in names:
            bar.describe(name)
            done[name] = evaluate_row(name, context, models, questions)
            rows |= with_differences(done)
            if out is not None:
                write_json(out, rows)
            bar.update(1)
    return rows


def with_differences(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Replaces the scores of each question in the rows of one question set by differences.

    The rows are by system; the first one is the baseline of the others. In the result `difference`
    has the name of the baseline (`to`), and by score the mean difference over the questions that
    both systems answered, `[mean, low, high]` in percent (`paired_bootstrap`).
    """
    baseline = next(iter(rows), "")
    base = rows[baseline].get("by_question", {}) if rows else {}
    new_rows = {}
    for name, row in rows.items():
        new_rows[name] = {key: value for key, value in row.items() if key != "by_question"}
        own, difference = row.get("by_question", {}), {}
        for metric in base.keys() & own.keys() if name != baseline else ():
            pairs_N2 = np.array([base[metric], own[metric]], np.float64).T  # None becomes nan
            before_N, after_N = pairs_N2[np.isfinite(pairs_N2).all(axis=1)].T
            if len(before_N):
                values = paired_bootstrap(after_N, before_N)
                difference[metric] = [round(100 * value, 2) for value in values]
        if difference:
            new_rows[name]["difference"] = {"to": baseline, **dict(sorted(difference.items()))}
    return new_rows


def open_retriever(settings: TableSettings, llm: LoadLLM | None = None) -> Retriever:
    """Opens the search server or the existing index of a table; `llm` is loaded to rerank."""
    corpus, folder = settings.corpus, settings.index_folder
    if settings.retriever and not (corpus or folder):
        return server_retriever(parse_index(settings.retriever), None)
    if settings.retriever or not (corpus and folder):
        raise UserError(
            "--questions needs --index, the folder that 'ragrl data index' wrote, or "
            "--retriever alone; only --data builds its own index"
        )
    # Checked first, because loading the corpus writes a cache into the folder: a folder that holds
    # no index must stay unchanged.
    read_description(folder)
    reading = Reading(settings.fields) if settings.fields else None
    return open_folder(folder, load_indexed(corpus, folder, reading), llm)


def load_models(settings: TableSettings) -> TableModels:
    shapes = Shapes() if settings.style == "tiny" else Shapes(LENGTHS)
    load = shared_loader()
    llm = load_frozen(settings, shapes, load)
    judge = None
    if settings.judge:
        config = parse_llm(settings.judge, **settings.recorded)
        judge = load_llm(config, None, "", shapes, load=load, cache=settings.cache)
    if settings.policy.startswith(SERVER) or settings.policy_examples:
        examples = settings.policy_examples, settings.shots
        served_models = served_policy(
            settings.policy, *examples, settings.cache, **settings.recorded
        )
        return TableModels(llm, judge, *served_models)
    # Without a policy the tokenizer counts tokens.
    decoder, tokenizer = load(settings.policy or TINY, None, "float32")
    return TableModels(llm, judge, SplitModel.from_model(decoder), tokenizer)


def load_frozen(settings: TableSettings, shapes: Shapes, load: PolicyLoader) -> FrozenLLM:
    """Loads the frozen model of a table; `UserError` if a world's reader does not fit the style."""
    if settings.llm.startswith(READER):
        if settings.style == "tiny" and not settings.int8:
            return load_reader(settings.llm)
        raise UserError(
            f"--llm {settings.llm} consists of rules for the prompts of --style tiny, without "
            "weights: leave --style full and --int8 out"
        )
    # The empty style is that of a rule-based reader.
    config = parse_llm(settings.llm, int8=settings.int8, **settings.recorded)
    return load_llm(config, None, "", shapes, load=load, cache=settings.cache)


def build_context(
    settings: TableSettings, models: TableModels, retriever: Retriever
) -> BuildContext:
    """The inputs from which a table builds its systems; they search `retriever`."""
    train: Sequence[Question] = ()
    if settings.train:
        train = sample_in_order(load_answered(settings.train, settings.fields), settings.limit)
    return BuildContext(
        style=settings.style,
        top_k=settings.top_k,
        environment=Environment(NoSampler(), retriever, models.llm, models.tokenizer.count),
        train=train,
        overrides=settings.overrides,
        predictions=settings.predictions,
        prices=settings.prices,
    )


def load_questions(settings: TableSettings) -> Sequence[Question]:
    if settings.questions is None:
        raise UserError("there are no questions: give --questions FILE or --data FILE ...")
    return sample_in_order(load_answered(settings.questions, settings.fields), settings.limit)


def evaluate_row(
    name: str, context: BuildContext, models: TableModels, questions: Sequence[Question]
) -> dict[str, Any]:
    """Evaluates one system and returns its row, whatever happens: other rows must not be lost.

    The row has the key `error` if there is no score: the system could not be evaluated (then there
    is a `traceback` and no other key), or every question failed. See `table_row`.
    """
    try:
        row = table_row(system_result(name, context, models, questions), questions)
    except Exception as error:  # any error
        return error_row(error)
    if set(row["ended"]) == {"failed"}:
        row["error"] = f"every question failed, most often with: {row['failed_with']}"
    return row


def error_row(error: Exception) -> dict[str, Any]:
    """The row of a system that could not be evaluated."""
    message = " ".join(f"{type(error).__name__}: {error}".split())
    return {"error": message, "traceback": traceback.format_exc()}


def system_result(
    name: str, context: BuildContext, models: TableModels, questions: Sequence[Question]
) -> Result:
    """Evaluates one system, see `evaluate_row`, and writes its predictions."""
    system: System
    sampler: ActionSampler
    if name.startswith(RUN):
        system, sampler = load_run_system(parse_run(name.removeprefix(RUN)), context.overrides)
    else:
        system, sampler = build_system(name, context, models)
    environment = context.environment._replace(sampler=sampler)
    result = evaluate(system, questions, environment, judge=models.judge, prices=context.prices)
    if context.predictions is not None:
        write_predictions(context.predictions, name, questions, result)
    return result


def build_system(
    name: str, context: BuildContext, models: TableModels
) -> tuple[System, ActionSampler]:
    """Builds a system all of whose roles use the policy of the table."""
    system = {**SYSTEMS, **WORKFLOWS}[name](context)
    if isinstance(models.policy, LLMActionSampler):
        return system, models.policy
    policies = {role.policy: models.policy for role in system.roles.values()}
    longest = max((role.sampling.max_tokens for role in system.roles.values()), default=1)
    # The tiny policy is trained to write short actions; other models may use each role's limit.
    tiny = Shapes(max_new_tokens=TINY_NEW_TOKENS)
    shapes = tiny if context.is_tiny else Shapes(LENGTHS, max_new_tokens=longest)
    return system, PolicySampler(policies, models.tokenizer, shapes, greedy=True)


def load_run_system(
    run: RunCheckpoint, overrides: Sequence[str] = ()
) -> tuple[System, PolicySampler]:
    """Loads the system of a run's config, and the policies of a checkpoint."""
    values = load_saved_config(run.folder / "config.json")
    # The checkpoint has the policies of the original job; the modified job only acts with them.
    job, acting = load_job(values), job_with_overrides(values, overrides)
    if unknown := sorted({*acting.policy_of.values()} - {*job.policy_of.values()}):
        raise UserError(
            f"{run.folder} has no policy {unknown[0]!r}: leave out the overrides that need it"
        )
    policies, tokenizer = load_policies(job, mesh_for(job))
    models = for_sampling(trained_policies(job, policies, run))
    system = acting.recipe.evaluation_system
    return system, PolicySampler(models, tokenizer, acting.shapes, greedy=True)


def job_with_overrides(values: Mapping[str, Any], overrides: Sequence[str]) -> Job:
    """Returns the job of a config whose system is modified; refuses other overrides."""
    for text in overrides:
        if not text.startswith(("--config.recipe.", "--config.shapes.")):
            raise UserError(f"{text}: a table changes config.recipe and config.shapes alone")
    # The schedule is not used, and may name roles that the modified system does not have.
    values = {name: copy.deepcopy(x) for name, x in values.items() if name != "schedule"}
    override(values, overrides)
    return load_job(values)


def select_systems(settings: TableSettings) -> tuple[str, ...]:
    """The names of a table's systems; `all` excludes `LEARNERS` without training questions.

    `all` and `workflows` stand for several names, each of which is in the result once.

    Raises:
      UserError: a name or a style is unknown, a folder holds no run, overrides apply to no run, or
        the files of two systems would have one name.
    """
    runs = tuple(name for name in settings.systems if name.startswith(RUN))
    for name in runs:
        values = load_saved_config(parse_run(name.removeprefix(RUN)).folder / "config.json")
        if settings.overrides:
            job_with_overrides(values, settings.overrides)
    if settings.overrides and not runs:
        raise UserError(f"{settings.overrides[0]} changes the system of a run: give --run WORKDIR")
    several = {
        EVERY_SYSTEM: [name for name in SYSTEMS if settings.train or name not in LEARNERS],
        EVERY_WORKFLOW: [*WORKFLOWS],
    }
    known_names = {*SYSTEMS, *WORKFLOWS, *several, *runs}
    if unknown := [name for name in settings.systems if name not in known_names]:
        raise UserError(
            f"unknown system {unknown[0]!r}: use {', '.join((*several, *SYSTEMS))}, or a fixed "
            "workflow such as workflow_r_ag"
        )
    one_of("style", settings.style, ("tiny", "full"))
    if not settings.policy:
        unused: Any = None  # by builders, but for those in `LEARNERS`
        builders = {**SYSTEMS, **WORKFLOWS}
        context = BuildContext(settings.style, settings.top_k, unused, ())
        trained = {n for n in builders if n not in LEARNERS and builders[n](context).roles}
        if named := [name for name in settings.systems if name in trained]:
            raise UserError(
                f"{named[0]} has roles that a policy plays, and there is none: give --policy "
                f"(--policy {settings.llm} lets the language model play them), or leave {named[0]} "
                "out"
            )
        several = {key: [n for n in names if n not in trained] for key, names in several.items()}
    names = tuple(
        dict.fromkeys(one for name in settings.systems for one in several.get(name, [name]))
    )
    if settings.predictions:
        labels: dict[str, str] = {}
        for name in names:
            if (first := labels.setdefault(file_label(name), name)) != name:
                raise UserError(
                    f"the files of {first} and {name} would have one name, {file_label(name)}: "
                    "rename one of the folders, or evaluate them in two calls"
                )
    return names


def table_row(result: Result, questions: Sequence[Question]) -> dict[str, Any]:
    """A summary with 95 % intervals, and the scores per hop count and question kind if known.

    `mistakes` counts the kinds of mistakes, see `run.mistakes`. `by_question` has each score of
    each question, from 0 to 1 and None for a failed one, see `with_differences`.
    """
    summary = result.summary()
    summary["mistakes"] = count_mistakes(prediction_rows(questions, result))
    summary["ci95"] = intervals(result)
    summary["by_question"] = {
        name: [round(score, 4) if np.isfinite(score) else None for score in x_Q.tolist()]
        for name, x_Q in result.scores.items()
    }
    if any(question.hops for question in questions):
        summary["hops"] = table(result, questions, lambda question: question.hops)
    if any(question.kind for question in questions):
        summary["kinds"] = table(result, questions, lambda question: question.kind)
    return summary
