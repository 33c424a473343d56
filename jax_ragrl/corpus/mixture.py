"""Reads the questions of files: of one, or a mixture of several."""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
import random
from collections.abc import Mapping, Sequence

from jax_ragrl.corpus.data_path import data_path, set_name
from jax_ragrl.corpus.fields import NO_FIELDS
from jax_ragrl.corpus.formats import load_questions
from jax_ragrl.errors import UserError
from jax_ragrl.types import Question


def load_answered(
    path: pathlib.Path | str, fields: Mapping[str, str] = NO_FIELDS
) -> list[Question]:
    """Reads the questions of a file, all of which have an answer, see `load_questions`.

    Raises:
      UserError: as `load_questions`, and if a question has no answer: every reply would score 0.
    """
    questions = load_questions(path, fields=fields)
    # Blanks normalize to an empty answer, which no useful reply matches.
    unanswered = [n for n, q in enumerate(questions) if not any(map(str.strip, q.answers))]
    if unanswered:
        first = unanswered[0]
        raise UserError(
            f"{path}: {len(unanswered)} of {len(questions)} questions have no answer, the first is "
            f"{questions[first].id!r} (record {first + 1}), and every reply to them scores 0: "
            "remove them, or name the field of the answers with --fields answer=NAME (in a config, "
            "data.files.fields)"
        )
    return questions


def load_mixture(
    paths: str, each: int = 0, counts: Sequence[int] = (), fields: Mapping[str, str] = NO_FIELDS
) -> list[Question]:
    """Reads the questions of one or several files, interleaved.

    With several files the name of the data set precedes each id (`nq/train_0`), because sets may
    use the same ids. `each` is the maximum number of questions per file, drawn at random with a
    fixed seed, or `counts` has the number of each file; 0 takes all of them.

    Raises:
      UserError: as `load_answered`; two files have the same name; the numbers of counts and of
        files differ; or a file has fewer questions than its count.
    """
    files = [path.strip() for path in paths.split(",")]
    sets = [load_answered(data_path(file), fields) for file in files]
    if len(counts) not in (0, len(files)) or min(counts, default=0) < 0:
        raise UserError(
            f"train_per_file is {tuple(counts)}, but train names {len(files)} files: give one "
            "number of questions per file, 0 for all of a file"
        )
    for count, file, questions in zip(counts, files, sets, strict=False):
        if count > len(questions):
            raise UserError(
                f"train_per_file asks for {count} questions of {file}, which has {len(questions)}: "
                "the mixture would change, so ask for fewer, or 0 for all"
            )
    # A fixed seed: the same subset in every run, on every host, and after a resume.
    sets = [
        random.Random(0).sample(questions, limit) if 0 < limit < len(questions) else questions
        for questions, limit in zip(sets, counts or [each] * len(sets), strict=True)
    ]
    if len(files) == 1:
        return sets[0]
    names = [set_name(file) for file in files]
    if repeated_names := [name for name in names if names.count(name) > 1]:
        raise UserError(
            f"two of {paths} are named {repeated_names[0]!r}, and their questions may share an id: "
            "rename a file, or its folder"
        )
    renamed_sets = (
        [dataclasses.replace(q, id=f"{name}/{q.id}") for q in questions]
        for name, questions in zip(names, sets, strict=True)
    )
    # Interleaved, because an evaluation takes the first N questions: they must include every set.
    return [q for group in itertools.zip_longest(*renamed_sets) for q in group if q is not None]
