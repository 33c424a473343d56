"""Corpus and questions of a run."""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jax_ragrl.corpus import world as worlds
from jax_ragrl.corpus.chunks import WORDS, Units
from jax_ragrl.corpus.data_path import data_path
from jax_ragrl.corpus.mixture import load_mixture
from jax_ragrl.corpus.passages import Corpus
from jax_ragrl.corpus.reading import AS_IS, Reading
from jax_ragrl.errors import UserError
from jax_ragrl.retrieval.index import load_indexed, units_of
from jax_ragrl.retrieval.kinds import HASHED_WORDS, Index, PipelineIndex, VectorIndex
from jax_ragrl.retrieval.measures import example_names
from jax_ragrl.run.config import Data
from jax_ragrl.run.world_folder import make_world
from jax_ragrl.runtime.multihost import is_process_zero, process_zero_first
from jax_ragrl.types import Question

SOME_PASSAGES = 200_000  # passages in which some gold of every split must be


class LoadedData(NamedTuple):
    """Corpus, questions by split, and the synthetic world if the data are generated."""

    corpus: Corpus
    questions: Mapping[str, tuple[Question, ...]]
    world: worlds.World | None


def load_data(
    data: Data, folder: pathlib.Path | None = None, index: Index | None = None
) -> LoadedData:
    """Loads or generates corpus and questions.

    `folder`, that of the index, also stores the passages of a file; without it they are in memory.
    The encoder of `index` counts the size of chunks, which are counted in words without one.
    """
    if data.files is not None:
        files = data.files
        names = f"{files.train},{files.dev},{files.test}".split(",")
        process_zero_first(lambda: [data_path(name.strip()) for name in names])
        counts = files.max_train_per_file, files.train_per_file
        splits = {
            "train": tuple(load_mixture(files.train, *counts, files.fields)),
            "dev": tuple(load_mixture(files.dev, fields=files.fields)),
            "test": tuple(load_mixture(files.test, fields=files.fields)),
        }
        if not files.corpus:
            return LoadedData(Corpus(()), splits, None)
        path = process_zero_first(lambda: data_path(files.corpus))
        # A config that says nothing reads the corpus as an index that exists.
        reading: Reading | None = config_reading(data, index)
        reading = None if reading is AS_IS else reading
        corpus = process_zero_first(lambda: load_indexed(path, folder, reading, own_folder=True))
        _check_gold(splits, corpus, files.corpus)
        return LoadedData(corpus, splits, None)
    if data.world is None:
        raise UserError("the config has no questions: set data.files or data.world")
    world = make_world(data.world)
    return LoadedData(Corpus(world.passages), world.questions, world)


def _check_gold(
    questions: Mapping[str, Sequence[Question]], corpus: Corpus, corpus_name: str
) -> None:
    """Warns of gold that the corpus lacks; raises `UserError` if it has none of a split's."""
    gold = {split: {name for q in part for name in q.gold} for split, part in questions.items()}
    missing = {split: set(names) for split, names in gold.items() if names}
    for n, passage in enumerate(corpus.passages):
        for names in missing.values():
            names -= passage.names
        # Reading all of a large corpus takes minutes, and would only find more of the gold.
        if n >= SOME_PASSAGES and all(len(missing[split]) < len(gold[split]) for split in missing):
            return
        if not any(missing.values()):
            return
    for split, names in missing.items():
        text = f"{len(names)} of {len(gold[split])} gold passages of data.files.{split} are not in"
        text = f"{text} {corpus_name}, such as {min(names, default='')!r}"
        if names == gold[split]:
            raise UserError(
                f"{text}, which has {example_names(corpus.passages)}: give {split} questions of "
                "this corpus, or the corpus that they are from"
            )
        if names and is_process_zero():
            print(f"ragrl: {text}: no search can return them", file=sys.stderr)


def config_reading(data: Data, index: Index | None) -> Reading:
    """Returns how the corpus of a config is read; `AS_IS` if the config does not say."""
    fields = data.files.fields if data.files else {}
    if data.chunk is None:
        return Reading(fields) if fields else AS_IS
    return Reading(fields, data.chunk, section_units(index))


def section_units(index: Index | None) -> Units:
    """Returns the units of the first encoder of an index, or words without one."""
    sections = index.sections if isinstance(index, PipelineIndex) else (index,)
    names = (part.encoder for part in sections if isinstance(part, VectorIndex))
    units = (units_of(name) for name in names if name != HASHED_WORDS)
    return next(units, WORDS)
