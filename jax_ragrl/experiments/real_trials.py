"""Trials with a pretrained model: demonstrations from labels, warm start, training, evaluation.

Every stage leaves a file in the output folder, so that an interrupted call resumes:

    standard_rag-K.json       the frozen model with K passages, the same for all systems
    SYSTEM-warm/              demonstrations, and the policy that learned from them
    SYSTEM-untrained.json     the system with the policy before its warm start
    SYSTEM-SEED/              the run, with warm_start.json and trained.json, and trained-NAME.json
                              for another retriever
    trials.md                 the table, rewritten after each trial
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jax_ragrl.config.schema import convert
from jax_ragrl.config.snapshot import LOCATION_KEYS
from jax_ragrl.corpus.questions import fingerprint
from jax_ragrl.experiments.experiment import paired_gain, result_row, stored_row
from jax_ragrl.experiments.seeds import DONE, ensure_warm_up, markdown
from jax_ragrl.experiments.warm_folder import WarmFolder, warm_settings
from jax_ragrl.retrieval.kinds import Index
from jax_ragrl.retrieval.recall import corpus_fingerprints
from jax_ragrl.run.build import build_components
from jax_ragrl.run.config import Job
from jax_ragrl.run.data import load_data
from jax_ragrl.run.evaluate import NoSampler, Result, evaluate
from jax_ragrl.run.index import index_folder, load_retriever
from jax_ragrl.run.inference import evaluate_models
from jax_ragrl.run.load import load_job
from jax_ragrl.run.parts import Components
from jax_ragrl.run.workdir import claim_workdir
from jax_ragrl.runtime.jsonl import read_rows, write_json
from jax_ragrl.runtime.memory import free_memory, peak_bytes, reset_peak
from jax_ragrl.systems.baselines.standard import StandardRAG
from jax_ragrl.text.metrics import METRIC_NAMES
from jax_ragrl.training.loop import train
from jax_ragrl.training.setup import acting_models
from jax_ragrl.types import Question
from jax_ragrl.warmstart.demos import load_warm_start, warm_start
from jax_ragrl.warmstart.make_demos import LABELS, WriterConfig, make_demos

METRICS = ("f1", "em", "cover_em")
OTHER_RETRIEVERS = ("hashed", "bm25", "hybrid")
COLUMNS = (
    *("system", "seed", "policy", *(METRIC_NAMES[m] for m in METRICS)),
    *("minutes", "peak GB", "tokens/s"),
)
# Places of indexes, servers and files of replies, which no score depends on, in any section.
PLACES = frozenset(key.rpartition(".")[2] for key in LOCATION_KEYS)
WRITERS = {"mmoa_rag": f"{LABELS}:answer"}  # the rule of its published code; others: LABELS

Values = dict[str, Any]


class Trial(NamedTuple):
    """A system with a seed.

    Fields:
      system: the name of its config.
      seed: the seed of the training.
      values: the config of the run; its `policy` is the one before the warm start.
      warm: the config of the warm start, without its demonstrations.
      retrievers: names in `OTHER_RETRIEVERS`, with which the trained policy answers as well.
    """

    system: str
    seed: int
    values: Values
    warm: Values
    retrievers: tuple[str, ...] = ()

    @property
    def folder(self) -> str:
        """The name of the folder of its run."""
        return f"{self.system}-{self.seed}"

    @property
    def writer(self) -> str:
        """The author of the demonstrations, see `WriterConfig`."""
        return WRITERS.get(self.system, LABELS)


def run_real_trials(trials: Sequence[Trial], out: pathlib.Path, demo_questions: int) -> str:
    """Runs every trial; rewrites `out/trials.md` after each.

    Args:
      trials: the trials; a system has one warm start for all its seeds.
      out: the output folder.
      demo_questions: training questions that are labeled for a warm start; 0: all.

    Returns:
      The table of all trials in Markdown.

    Raises:
      UserError: a config is invalid, `out` has a warm start of another config, or the environment
        failed on every question.
    """
    places = [warm_folder(trial, demo_questions, out) for trial in trials]
    for trial, place in zip(trials, places, strict=True):
        load_job(trial.values)  # a mistake is reported before the first trial costs time
        load_warm_start(trial.warm | {"data": {"demos": "demos.jsonl"}})
        place.check()
    lines: list[tuple[Any, ...]] = []
    for trial, place in zip(trials, places, strict=True):
        ensure_warm_up(functools.partial(make_warm_start, trial, demo_questions), place)
        lines += trial_lines(trial, run_trial(trial, place.folder / "checkpoint", out))
        (out / "trials.md").write_text(markdown(COLUMNS, lines), encoding="utf-8")
        free_memory()  # the programs of one system are of no use to the next
    return markdown(COLUMNS, lines)


def warm_folder(trial: Trial, questions: int, out: pathlib.Path) -> WarmFolder:
    """Returns the folder of the warm start of a system, with its settings.

    Args:
      trial: the system; its seed does not count, since all seeds share the warm start.
      questions: labeled training questions; 0: all.
      out: folder of all trials.
    """
    more = {"demo_questions": questions, "writer": trial.writer}
    folder = out / f"{trial.system}-warm"
    results = (folder / "demos.jsonl", folder / DONE)
    return WarmFolder(folder, warm_settings(trial.warm, trial.values, **more), results)


def make_warm_start(trial: Trial, questions: int, folder: pathlib.Path) -> dict[str, Any]:
    """Writes demonstrations and trains the policy of a system on them; both resume.

    Args:
      trial: the system.
      questions: labeled training questions; 0: all.
      folder: the output folder.

    Returns:
      The summaries of both stages.
    """
    file = folder / "demos.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    demos = make_demos(trial.values, file, WriterConfig(trial.writer), questions)
    summary = folder / "summary.json"
    if summary.is_file():
        return {"demos": demos, "sft": json.loads(summary.read_text(encoding="utf-8"))}
    run = load_warm_start(trial.warm | {"data": {"demos": str(file)}})
    return {"demos": demos, "sft": warm_start(run, folder)}


def run_trial(
    trial: Trial, checkpoint: pathlib.Path, out: pathlib.Path
) -> dict[str, dict[str, Any]]:
    """Trains one system from its warm start, and evaluates it before and after.

    Args:
      trial: the system and its seed.
      checkpoint: the policy after the warm start.
      out: folder of all trials.

    Returns:
      The rows of `shared_rows` and `own_rows`.
    """
    workdir = out / trial.folder
    job = claim_workdir(trial.values | {"policy": str(checkpoint)}, workdir)
    parts = build_components(job, workdir)
    questions = parts.questions["test"][: job.run.test_questions]
    run = TrialRun(trial, job, parts, out, questions)
    return shared_rows(run) | own_rows(run)


class TrialRun(NamedTuple):
    """A trial that is ready to be evaluated and trained.

    Fields:
      trial: the system and its seed.
      job: its run.
      parts: the components of the run.
      out: folder of all trials.
      questions: the questions that every policy answers.
    """

    trial: Trial
    job: Job
    parts: Components
    out: pathlib.Path
    questions: Sequence[Question]


def shared_rows(run: TrialRun) -> dict[str, dict[str, Any]]:
    """Returns the rows `standard_rag` and `untrained`, which other trials may share."""
    trial, job, parts, out, questions = run
    reader = StandardRAG(job.run.baseline_style, job.recipe.system.top_k)
    # The keys have all that the rows depend on.
    key = {"asked": fingerprint(questions)} | environment_key(job, parts) | {"style": reader.style}
    untrained_key = key | {k: trial.values.get(k) for k in ("policy", "policies", "recipe")}
    return {
        "standard_rag": stage(
            out / f"standard_rag-{reader.top_k}.json",
            key,
            functools.partial(evaluate_reader, parts, reader, questions),
        ),
        "untrained": stage(
            out / f"{trial.system}-untrained.json",
            untrained_key,
            functools.partial(evaluate_untrained, trial, parts, out / trial.folder, questions),
        ),
    }


def own_rows(run: TrialRun) -> dict[str, dict[str, Any]]:
    """Returns the rows `warm_start` and `trained`, and `trained, NAME` for each other retriever."""
    trial, job, parts, out, questions = run
    workdir, key = out / trial.folder, {"asked": fingerprint(questions)}

    def row(name: str, function: Callable[..., Result], *args: Any) -> dict[str, Any]:
        compute = functools.partial(function, *args, questions)
        return stage(workdir / f"{name}.json", key, compute)

    rows = {
        "warm_start": row("warm_start", evaluate_models, job, parts, parts.models()),
        "trained": row("trained", train_and_evaluate, job, parts, workdir)
        | training_speed(workdir),
    }
    for name in trial.retrievers:
        index = other_index(name, trial, out)
        rows[f"trained, {name}"] = row(f"trained-{name}", answer_with, index, job, parts, workdir)
    return rows


def other_index(name: str, trial: Trial, out: pathlib.Path) -> Index:
    """Returns the config of another retriever; a hybrid fuses BM25 with the trial's own.

    Args:
      name: a name in `OTHER_RETRIEVERS`.
      trial: the trial.
      out: holds one folder per retriever.
    """
    sections: Mapping[str, Values] = {
        "hashed": {"kind": "exact", "encoder": "hashed"},
        "bm25": {"kind": "bm25"},
        "hybrid": {
            "kind": "pipeline",
            "retrievers": ("bm25", trial.values["index"]),
            "fuse": "weighted",  # as in `ragrl bench retrieval`
        },
    }
    return convert(Index, sections[name] | {"folder": str(out / f"index-{name}")}, "index")


def environment_key(job: Job, parts: Components) -> dict[str, Any]:
    """Returns what determines passages and replies: settings of index and model, and the corpora.

    Args:
      job: the run.
      parts: its retriever.
    """
    settings = {"llm": dataclasses.asdict(job.llm), "index": dataclasses.asdict(job.index)}
    return {**_without_places(settings), "corpora": corpus_fingerprints(parts.retriever)}


def _without_places(settings: Any) -> Any:
    """Returns settings as JSON without the keys in `PLACES`, at any depth."""

    def rest(section: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in section.items() if key not in PLACES}

    return json.loads(json.dumps(settings), object_hook=rest)


def evaluate_untrained(
    trial: Trial, parts: Components, workdir: pathlib.Path, questions: Sequence[Question]
) -> Result:
    """Evaluates the policy before its warm start.

    Args:
      trial: the system.
      parts: retriever and frozen language model, which are used again.
      workdir: folder of the run.
      questions: the questions.
    """
    job = load_job(trial.values)
    # The policy of `parts` is the one after the warm start.
    initial = build_components(job, workdir, llm=parts.llm, retriever=parts.retriever)
    return evaluate_models(job, parts, initial.models(), questions)


def train_and_evaluate(
    job: Job, parts: Components, workdir: pathlib.Path, questions: Sequence[Question]
) -> Result:
    """Trains the policies of a run, or resumes, and evaluates them.

    Args:
      job: the run.
      parts: its components.
      workdir: its folder.
      questions: the questions.
    """
    return evaluate_models(job, parts, acting_models(train(job, parts, workdir)), questions)


def answer_with(
    index: Index,
    job: Job,
    parts: Components,
    workdir: pathlib.Path,
    questions: Sequence[Question],
) -> Result:
    """Evaluates the trained policies with another retriever.

    Args:
      index: the config of the retriever.
      job: the run, which has been trained.
      parts: its components.
      workdir: its folder.
      questions: the questions.
    """
    corpus = load_data(job.data, index_folder(index, workdir), index).corpus
    retriever = load_retriever(corpus, index, workdir, lambda: parts.llm)
    models = acting_models(train(job, parts, workdir))
    return evaluate_models(job, parts._replace(retriever=retriever), models, questions)


def evaluate_reader(
    parts: Components, system: StandardRAG, questions: Sequence[Question]
) -> Result:
    """Evaluates a system of the frozen language model alone.

    Args:
      parts: retriever and frozen language model.
      system: the system, which has no role.
      questions: the questions.
    """
    return evaluate(system, questions, parts.environment(NoSampler()))


def stage(
    file: pathlib.Path, key: Mapping[str, Any], compute: Callable[[], Result]
) -> dict[str, Any]:
    """Returns the row of a result: that of an earlier call with the same key, or a new one.

    Args:
      file: the JSON file of the row.
      key: all that determines the result; a part of the row.
      compute: computes the result.

    Raises:
      UserError: the environment failed on every question; nothing is written.
    """
    key = json.loads(json.dumps(key))  # tuples become lists, as in the file
    if (row := stored_row(file, key)) is not None:
        return row
    # The peak becomes that of this stage alone, if the system can restart it.
    reset_peak()
    start = time.perf_counter()
    result = compute()
    result.check_answered()
    seconds = round(time.perf_counter() - start, 1)
    row = {**key, **result_row(result), "wall_s": seconds, "peak_bytes": peak_bytes()}
    write_json(file, row)
    return row


def training_speed(workdir: pathlib.Path) -> dict[str, float]:
    """Returns the median of trained tokens per second over the steps of a run."""
    rows = read_rows(workdir / "metrics.jsonl")
    # Steps that compile are slow, which a mean would show and the median does not.
    speeds = [row["tokens_per_sec"] for row in rows if "tokens_per_sec" in row]
    return {"tokens_per_sec": round(float(np.median(speeds)), 1)} if speeds else {}


def trial_lines(trial: Trial, rows: Mapping[str, Mapping[str, Any]]) -> list[tuple[Any, ...]]:
    """Returns the lines of a trial in the table, one per policy.

    A score is in percent. All but the warm start's have their difference from the warm start, with
    its paired 95 % interval.

    Args:
      trial: the system and its seed.
      rows: the rows of `run_trial`.
    """
    warm = rows["warm_start"]["scores"]
    return [
        (
            *(trial.system, trial.seed, name.replace("_", " ")),
            *(score_cell(warm[m], row["scores"][m], name != "warm_start") for m in METRICS),
            round(row["wall_s"] / 60, 1),
            round(row["peak_bytes"] / 1e9, 2),
            row.get("tokens_per_sec", ""),
        )
        for name, row in rows.items()
    ]


def score_cell(warm: Sequence[float], scores: Sequence[float], compare: bool) -> str:
    """Returns the mean of some scores in percent and, on request, its difference from `warm`.

    Args:
      warm: the scores of the warm start, one per question.
      scores: the scores to show, in the same order.
      compare: whether the cell shows the difference.
    """
    gain = paired_gain(warm, scores)
    if gain["trained"] is None or not compare:
        return str(gain["trained"])
    low, high = gain["ci95"]
    return f"{gain['trained']} ({gain['mean']:+}, {low} to {high})"
