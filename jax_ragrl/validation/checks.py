"""All checks of a set-up, in the order of their cost."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax_ragrl.config.schema import build, convert
from jax_ragrl.errors import UserError
from jax_ragrl.retrieval.kinds import BM25Index, Index
from jax_ragrl.run.config import Data, Job
from jax_ragrl.run.data import load_data
from jax_ragrl.run.load import load_job, with_default_index
from jax_ragrl.types import Question
from jax_ragrl.validation.config import RUN, config_problems, kind_of
from jax_ragrl.validation.data import (
    DataSample,
    check_gold,
    check_index,
    check_lengths,
    check_overlap,
    check_questions,
    read_corpus,
)
from jax_ragrl.validation.findings import Finding
from jax_ragrl.validation.models import (
    check_endpoints,
    check_memory,
    check_models,
    check_tokenizers,
)
from jax_ragrl.validation.roles import check_roles


def validate(
    values: Mapping[str, Any], workdir: pathlib.Path | None = None, *, quick: bool = False
) -> Iterator[Finding]:
    """Checks a config and everything that it names; yields findings as soon as they are known.

    An error of one part does not hide the errors of other parts. Nothing is trained, built or
    written, and each endpoint is asked once. `workdir`, the folder of the run, may hold an index;
    `quick` leaves out the checks that ask endpoints or load models.
    """
    # The whole list at once: a user mends all of them before the next call.
    found = config_problems(values)
    yield from (Finding("error", "config", text) for text in found)
    kind = kind_of(values)
    if not found:
        yield Finding("ok", "config", f"all keys of this config ({kind.name}) are valid")
    # Warm starts have no retriever and no language model to check.
    if kind.name != RUN:
        return
    sample = DataSample({})
    data, index = _section(values, "data", Data), _section(values, "index", Index)
    if data is not None:
        data_findings, sample = _check_data(data, index, workdir)
        yield from data_findings
    if found:
        return
    job = load_job(values)
    if job.recipe.priced and job.objective.advantage == "group_normalised":
        text = (
            f"objective.advantage {job.objective.advantage!r} divides by the deviation of a group: "
            "where the answers of a question are equally good, the price alone decides, at any "
            "size: use group_centred or leave_one_out, or remove the price"
        )
        yield Finding("warning", "config", text)
    findings = list(check_tokenizers(job))
    yield from findings
    yield from check_models(job, sample.world is not None)
    if quick:
        return
    yield from check_endpoints(job)
    # Without a tokenizer that fits, sampled actions would mean nothing.
    if any(finding.level == "error" for finding in findings):
        return
    yield from check_memory(job)
    yield from check_roles(job, sample)


def _section(values: Mapping[str, Any], name: str, hint: Any) -> Any:
    """Returns a section of a config; None if it has errors, which are known already."""
    section = with_default_index(values).get(name)
    try:
        # Sections are read one by one, so that one with errors does not hide the others.
        if name == "data":
            return build(Data, section or {}, "config.data")
        return Job.__dataclass_fields__[name].default if section is None else convert(
            hint, section, f"config.{name}"
        )  # fmt: skip
    except UserError:
        return None


def _check_data(
    data: Data, index: Index | None, workdir: pathlib.Path | None
) -> tuple[list[Finding], DataSample]:
    """Returns findings about data and index (None has errors), and the data for later checks."""
    if data.files is None:
        try:
            corpus, generated, world = load_data(data)
        except UserError as error:
            return [Finding("error", "data", str(error))], DataSample({})
        counts = ", ".join(f"{len(part)} {split}" for split, part in generated.items())
        text = f"a generated world of {len(corpus)} passages, questions: {counts}"
        return [Finding("ok", "data", text)], DataSample(generated, corpus.passages, True, world)
    questions: dict[str, Sequence[Question]] = {}
    findings = list(check_questions(data.files, questions))
    # The passages can be read without a valid index; words are its simplest units.
    reader = index or BM25Index()
    more, sample = read_corpus(data, reader, DataSample(questions))
    findings += [*more, *check_lengths(sample, reader)]
    findings += [*check_gold(sample), *check_overlap(sample)]
    return findings + (list(check_index(index, workdir, sample)) if index else []), sample
