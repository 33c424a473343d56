"""What a run was begun with, in its work folder: versions, data, indexes, models."""

from __future__ import annotations

import pathlib
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from jax_ragrl.corpus.questions import fingerprint
from jax_ragrl.errors import UserError
from jax_ragrl.json_text import loads
from jax_ragrl.llm.kinds import LLM, LocalLLMConfig
from jax_ragrl.models.safetensors_io import weights_checksum
from jax_ragrl.retrieval.base import Retriever
from jax_ragrl.retrieval.recall import (
    corpus_fingerprints,
    model_checksums,
    report_gold,
    trained_builds,
)
from jax_ragrl.run.config import Job
from jax_ragrl.run.models import initial_models, policy_folder
from jax_ragrl.runtime.jsonl import write_json
from jax_ragrl.runtime.multihost import all_gather_object, is_process_zero, on_process_zero
from jax_ragrl.runtime.revision import versions
from jax_ragrl.text.prompts import conversations
from jax_ragrl.text.tokenizer import tokenizer_checksum
from jax_ragrl.types import Question

VERSIONS = "versions.json"
BASES, TOKENIZERS, FROZEN = "bases.json", "tokenizers.json", "frozen.json"
SEARCH_MODELS, FILES, PROMPTS = "search_models.json", "files.json", "prompts.json"
DECISIONS = "decisions.jsonl"  # of an audit of credit, see `bench.credit`
COMPILERS = ("jax", "jaxlib")  # another version of them may compile other arithmetic


def claim_versions(workdir: pathlib.Path, *, is_free: bool) -> None:
    """Appends the versions that a run begins or continues with, and its step, to a list.

    `UserError` if `workdir` holds steps of another version of JAX, unless any is allowed.
    """
    file, now = workdir / VERSIONS, versions()
    history = on_process_zero(lambda: _record(file, list, dict, "list of objects") or [])

    def check() -> None:
        if not history or is_free or all(history[-1].get(x) == now[x] for x in COMPILERS):
            return
        before, here = (", ".join(f"{x} {v.get(x)}" for x in COMPILERS) for v in (history[-1], now))
        raise UserError(
            f"the last steps of {workdir} are of {before}, but this is {here}, which may compute "
            "other parameters: install the former versions, start a run in another folder, or "
            "continue with --config.run.other_versions=True"
        )

    def append() -> None:
        if not history or {**history[-1], "step": 0} != {**now, "step": 0}:
            write_json(file, [*history, {"step": steps_taken(workdir), **now}])

    all_gather_object(check)
    on_process_zero(append)


def version_changes(workdir: pathlib.Path) -> dict[str, float]:
    """Returns `version_changes`, how often a run was continued with others; nothing if never."""
    count = len(_record(workdir / VERSIONS, list, dict, "list of objects") or ()) - 1
    return {"version_changes": float(count)} if count > 0 else {}


def steps_taken(workdir: pathlib.Path) -> int:
    """Returns the step of the newest checkpoint, which may be less than `run.steps`; 0: none."""
    folder = workdir / "checkpoints"
    return max((int(path.name) for path in folder.glob("*") if path.name.isdecimal()), default=0)


def has_results(workdir: pathlib.Path) -> bool:
    """Whether `workdir` holds results of its config; until then, the config may still change."""
    patterns = ("baselines.json", "checkpoints/*", DECISIONS)  # an index records its own settings
    return any(True for pattern in patterns for _ in workdir.glob(pattern))


def claim_data(
    retriever: Retriever, questions: Mapping[str, Sequence[Question]], workdir: pathlib.Path
) -> None:
    """Records the questions, corpora and retriever of a run, and reports gold that they lack.

    `UserError` if `workdir` holds results of others.
    """
    claim_questions(questions, workdir)
    claim_builds(retriever, workdir)
    # Once per run, because every passage is read.
    if claim_corpus(retriever, workdir) and is_process_zero():
        report_gold(retriever, [*questions["train"], *questions["dev"]])


def claim_questions(questions: Mapping[str, Sequence[Question]], workdir: pathlib.Path) -> None:
    """Records the questions of a run by split; `UserError` if `workdir` has results with others.

    A file of questions may be edited, and a branch on the Hub may move, under an unchanged config.
    A call may lack splits, or add some.
    """
    file = workdir / "questions.json"
    now = {split: fingerprint(part) for split, part in questions.items()}
    # One process reads, because a slow host would see the file that the first one then writes.
    before = on_process_zero(lambda: _record(file, dict, str, "object of splits") or {})

    def check() -> None:
        for split in sorted(before.keys() & now.keys()):
            if before[split] != now[split]:
                raise UserError(
                    f"{workdir} was begun with other {split} questions ({file.name} has "
                    f"{before[split]}, the data {now[split]}): restore the former questions, give "
                    f"another folder, or delete {file.name} to continue with these"
                )

    all_gather_object(check)
    on_process_zero(lambda: write_json(file, {**before, **now}))


def claim_builds(retriever: Retriever, workdir: pathlib.Path) -> None:
    """Records trained searchers, encoders and rerankers; `UserError` if `workdir` has others.

    A searcher of ScaNN is a function of its vectors for one release of ScaNN and one kind of
    processor. Another one returns other hits, and a resumed run would not end as a whole one.
    """
    if builds := trained_builds(retriever):
        _claim(
            workdir / "index_builds.json",
            builds,
            "another build of its index, which returns other hits,",
            "use the former index (index.folder) or another folder, or delete the file to use "
            "this index",
        )
    if models := model_checksums(retriever):
        what = "the encoders and rerankers"
        remedy = "restore them and the former index (index.folder), or give another folder"
        _claim(workdir / SEARCH_MODELS, models, what, remedy)


def claim_corpus(retriever: Retriever, workdir: pathlib.Path) -> bool:
    """Records the corpora of a run; `UserError` if `workdir` holds results with others.

    Returns whether the run begins.
    """
    remedy = "give the former data.files.corpus, or another folder"
    now = corpus_fingerprints(retriever)
    return _claim(workdir / "corpus.json", now, "the corpus", remedy)


def content_of(
    questions: Sequence[Question], retriever: Retriever, models: Sequence[str]
) -> dict[str, str]:
    """Returns checksums of what equal names in a config may stand for, for results that resume."""
    return {
        "questions": fingerprint(questions),
        "corpora": " ".join(corpus_fingerprints(retriever)),
        "weights": " ".join(
            [
                *(weights_checksum(policy_folder(model)) for model in models),
                *model_checksums(retriever),
            ]
        ),
    }


def local_models(*llms: LLM) -> list[str]:
    """Returns the names of the frozen language models whose weights are on this machine."""
    return [llm.model for llm in llms if isinstance(llm, LocalLLMConfig)]


def claim_models(
    job: Job, workdir: pathlib.Path, *, is_reader: bool = False, is_trained: bool = True
) -> None:
    """Records what a run takes from its models, prompts and files, and not from checkpoints.

    These are the tokenizers and chat templates of its policies, the weights below its adapters (of
    a policy that is not trained, all weights), the weights of its frozen language models, and the
    prompts of its styles.
    `UserError` if the results in `workdir` were made with others: a folder may be written again,
    and a branch on the Hub may move, under an unchanged config. A reader compares what it reads,
    and records nothing.
    """
    models = initial_models(job).items()
    policies = "config.policy (config.policies)"
    # The weights of a trained policy are in its checkpoints: its folder may lack them.
    now = [f"{name} {tokenizer_checksum(policy_folder(x, weights=False))}" for name, x in models]
    claims = [(TOKENIZERS, "the tokenizers", policies, now)]
    if job.lora is not None or not is_trained:
        what = "the weights below its adapters" if job.lora else "the weights"
        now = [f"{name} {weights_checksum(policy_folder(x))}" for name, x in models]
        claims.append((BASES, what, policies, now))
    parts = {} if is_reader else {"llm": job.llm, "judge": job.judge}
    frozen = [(name, model) for name, part in parts.items() for model in local_models(part)]
    if frozen:
        now = [f"{name} {weights_checksum(policy_folder(x))}" for name, x in frozen]
        claims.append((FROZEN, "the frozen models", "config.llm and config.judge", now))
    if job.recipe.files and not is_reader:
        now = [f"{zlib.crc32(pathlib.Path(x).read_bytes()):08x}" for x in job.recipe.files]
        claims.append((FILES, "the files", "config.recipe", now))
    if not is_reader:
        styles = sorted({job.recipe.system.style, job.recipe.evaluation_system.style})
        sums = {style: zlib.crc32(repr(conversations(style)).encode()) for style in styles}
        now = [f"{style} {value:08x}" for style, value in sums.items()]
        claims.append((PROMPTS, "the prompts", "the folder of their style", now))
    for file, what, key, now in claims:
        remedy = f"restore them in {key}, or train in another folder"
        _claim(workdir / file, now, what, remedy, is_reader=is_reader)


def _claim(
    file: pathlib.Path, now: list[str], what: str, remedy: str, *, is_reader: bool = False
) -> bool:
    # Asked once: a slow host would see the file that the first process has just written, and would
    # miss the collective that follows.
    before = on_process_zero(lambda: _record(file, list, str, "list of names"))
    if before is None:
        on_process_zero(lambda: None if is_reader else write_json(file, now))
    elif before != now and not (is_reader and {*now} <= {*before}):  # it may read some alone
        raise UserError(
            f"{file.parent} was begun with {what} {', '.join(before)} ({file.name}), but this run "
            f"has {', '.join(now)}: {remedy}"
        )
    return before is None


def _record(file: pathlib.Path, kind: type[list] | type[dict], item: type, what: str) -> Any:
    """Returns the content of a JSON file, which a run without results, or an old one, lacks."""
    if not (has_results(file.parent) and file.exists()):
        return None
    try:
        value = loads(file.read_bytes())
        if not isinstance(value, kind) or not all(isinstance(x, item) for x in value):
            raise ValueError(f"it holds no {what}")
    except ValueError as error:
        raise UserError(f"{file} is damaged ({error}): delete it to skip the check") from error
    return value
