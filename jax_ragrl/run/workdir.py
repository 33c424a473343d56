"""The work folder of a run: it belongs to one config, on all hosts of the run."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax_ragrl.config.snapshot import LOCATION_KEYS, check_saved_config, save_config
from jax_ragrl.corpus.questions import fingerprint
from jax_ragrl.errors import UserError
from jax_ragrl.json_text import loads
from jax_ragrl.retrieval.base import Retriever
from jax_ragrl.retrieval.dense import DenseRetriever
from jax_ragrl.retrieval.recall import corpus_fingerprints, report_gold
from jax_ragrl.run.config import Job, load_job
from jax_ragrl.run.lock import lock_folder
from jax_ragrl.runtime.jsonl import write_json
from jax_ragrl.runtime.multihost import (
    all_gather_object,
    check_shared_folder,
    is_process_zero,
    on_process_zero,
)
from jax_ragrl.runtime.revision import versions
from jax_ragrl.types import Question

VERSIONS = "versions.json"
COMPILERS = ("jax", "jaxlib")  # another version of them may compile other arithmetic


def claim_workdir(values: Mapping[str, Any], workdir: pathlib.Path) -> Job:
    """Returns the job of a config, which becomes the only config of `workdir`.

    Raises:
      UserError: the config is invalid, `workdir` holds results of another config or of another
        version of JAX, or another process uses it.
    """
    job, file = load_job(values), workdir / "config.json"
    # A learning rate that does not depend on the length of a run permits extending the run.
    free = (*LOCATION_KEYS, "config.run.steps") if job.optimizer.steady else LOCATION_KEYS
    # 1. All hosts must see one folder, or each would save a config for itself.
    check_shared_folder(workdir)
    on_process_zero(lambda: lock_folder(workdir))
    # 2. One process writes, because several writers would replace each other's file.
    on_process_zero(lambda: save_config(file, values, free=free, renew=not has_results(workdir)))
    # 3. Every host compares its config with that file: hosts may have been started differently.
    all_gather_object(lambda: check_saved_config(file, values, free))
    _claim_versions(workdir, is_free=job.run.other_versions)
    return job


def _claim_versions(workdir: pathlib.Path, *, is_free: bool) -> None:
    """Records the versions that a run begins or continues with, as entries of a list with its step.

    Raises:
      UserError: `workdir` holds steps of another version of JAX, and the config forbids another.
    """
    file, now = workdir / VERSIONS, versions()
    history = on_process_zero(lambda: _saved_versions(file) if has_results(workdir) else [])

    def check() -> None:
        if not history or is_free or all(history[-1].get(x) == now[x] for x in COMPILERS):
            return
        before, here = (", ".join(f"{x} {v.get(x)}" for x in COMPILERS) for v in (history[-1], now))
        raise UserError(
            f"the last steps of {workdir} are of {before}, but this is {here}, which may compute "
            "other parameters: install the former versions, start a run in another --workdir, or "
            "continue with --config.run.other_versions=True"
        )

    all_gather_object(check)
    on_process_zero(lambda: _append_versions(file, history, now))


def _append_versions(
    file: pathlib.Path, history: Sequence[Mapping[str, Any]], now: Mapping[str, str]
) -> None:
    if not history or {**history[-1], "step": 0} != {**now, "step": 0}:
        steps = [x.name for x in (file.parent / "checkpoints").glob("*") if x.name.isdecimal()]
        write_json(file, [*history, {"step": max(map(int, steps), default=0), **now}])


def _saved_versions(file: pathlib.Path) -> list[dict[str, Any]]:
    history = _record(file) if file.exists() else []
    if not isinstance(history, list) or not all(isinstance(x, dict) for x in history):
        raise UserError(
            f"{file} is damaged (it is no list of objects): delete it to skip the check"
        )
    return history


def version_changes(workdir: pathlib.Path) -> dict[str, float]:
    """Returns `version_changes`, how often a run was continued with others; nothing if never."""
    count = len(_saved_versions(workdir / VERSIONS)) - 1
    return {"version_changes": float(count)} if count > 0 else {}


def has_results(workdir: pathlib.Path) -> bool:
    """Whether `workdir` holds results of its config; until then, the config may still change."""
    patterns = ("baselines.json", "checkpoints/*")  # an index records its own settings
    return any(True for pattern in patterns for _ in workdir.glob(pattern))


def claim_data(
    retriever: Retriever, questions: Mapping[str, Sequence[Question]], workdir: pathlib.Path
) -> None:
    """Records the questions, corpora and indexes of a run, and reports gold that the corpora lack.

    Args:
      retriever: of the run.
      questions: by split.
      workdir: folder of the run.

    Raises:
      UserError: `workdir` holds results of other questions, another corpus or build of an index.
    """
    claim_questions(questions, workdir)
    claim_builds(retriever, workdir)
    # Once per run, because every passage is read.
    if claim_corpus(retriever, workdir) and is_process_zero():
        report_gold(retriever, [*questions["train"], *questions["dev"]])


def claim_questions(questions: Mapping[str, Sequence[Question]], workdir: pathlib.Path) -> None:
    """Records the questions of a run, or checks that a resumed run has the same.

    A file of questions may be edited, and a branch on the Hub may move, under an unchanged config.

    Args:
      questions: by split. A call may lack splits, or add some.
      workdir: folder of the run.

    Raises:
      UserError: `workdir` holds results with other questions.
    """
    file = workdir / "questions.json"
    now = {split: fingerprint(part) for split, part in questions.items()}
    # Apart from the others, because runs of earlier versions have recorded no gold passages.
    now |= {f"{split} (gold)": fingerprint(q, with_gold=True) for split, q in questions.items()}
    # One process reads, because a slow host would see the file that the first one then writes.
    before = on_process_zero(lambda: _saved_questions(file) if has_results(workdir) else {})
    all_gather_object(lambda: _check_questions(file, before, now))
    on_process_zero(lambda: write_json(file, {**before, **now}))


def _saved_questions(file: pathlib.Path) -> dict[str, str]:
    """Returns the fingerprints of a run by split; none for a run of an earlier version."""
    before = _record(file) if file.exists() else {}
    if not isinstance(before, dict):
        raise UserError(
            f"{file} is damaged (it holds no object of splits): delete it to skip the check"
        )
    return before


def _check_questions(file: pathlib.Path, before: Mapping[str, str], now: Mapping[str, str]) -> None:
    for split in sorted(before.keys() & now.keys()):
        if before[split] != now[split]:
            raise UserError(
                f"{file.parent} was begun with other {split} questions ({file.name} has "
                f"{before[split]}, the data {now[split]}): restore the former questions, give "
                f"another --workdir, or delete {file.name} to continue with these"
            )


def _record(file: pathlib.Path) -> Any:
    """Returns the content of a JSON file that only a check reads."""
    try:
        return loads(file.read_bytes())
    except ValueError as error:
        raise UserError(f"{file} is damaged ({error}): delete it to skip the check") from error


def claim_builds(retriever: Retriever, workdir: pathlib.Path) -> None:
    """Records the trained searchers of a run's indexes, or checks that a resumed run has the same.

    A searcher of ScaNN is a function of its vectors for one release of ScaNN and one kind of
    processor. Another one returns other hits, and a resumed run would not end as a whole one.

    Args:
      retriever: of the run.
      workdir: folder of the run.

    Raises:
      UserError: `workdir` holds results that another build of an index gave.
    """
    file, builds = workdir / "index_builds.json", sorted(_builds(retriever))
    if builds:
        on_process_zero(lambda: _claim_builds(file, builds))


def claim_corpus(retriever: Retriever, workdir: pathlib.Path) -> bool:
    """Records the corpora of a run, or checks that a resumed run has the same.

    Returns:
      Whether this call has recorded them, because the run begins.

    Raises:
      UserError: `workdir` holds results with another corpus.
    """
    file, now = workdir / "corpus.json", corpus_fingerprints(retriever)
    # Asked once: a slow host would see the file that the first process has just written, and would
    # miss the collective that follows.
    before = on_process_zero(
        lambda: _saved_corpora(file) if has_results(workdir) and file.exists() else None
    )
    if before is None:
        on_process_zero(lambda: write_json(file, now))
    elif before != now:
        raise UserError(
            f"{workdir} was begun with the corpus {', '.join(before)}, but data.files.corpus holds "
            f"{', '.join(now)}: give the former corpus, or another --workdir"
        )
    return before is None


def _saved_corpora(file: pathlib.Path) -> list[str]:
    before = _record(file)
    if not isinstance(before, list) or not all(isinstance(x, str) for x in before):
        raise UserError(
            f"{file} is damaged (it holds no list of names): delete it to skip the check"
        )
    return before


def _claim_builds(file: pathlib.Path, builds: list[str]) -> None:
    if has_results(file.parent) and file.exists():
        _check_builds(file, builds)
    else:
        write_json(file, builds)


def _check_builds(file: pathlib.Path, builds: list[str]) -> None:
    before = _record(file)
    if before != builds:
        raise UserError(
            f"{file.parent} was begun with another build of its index, which returns other hits "
            f"({file.name} has {before}, the index {builds}): use the former index "
            f"(index.folder) or another --workdir, or delete {file.name} to use this index"
        )


def _builds(retriever: Any) -> Iterator[str]:
    """Yields the builds of a retriever and of those that it fuses or reranks."""
    if isinstance(retriever, DenseRetriever) and retriever.build:
        yield f"{retriever.fingerprint} {retriever.build}"
    inner = getattr(retriever, "retriever", None)
    for part in (*getattr(retriever, "retrievers", ()), *([inner] if inner else [])):
        yield from _builds(part)
