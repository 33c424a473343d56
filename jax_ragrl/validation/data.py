"""Checks of data: question files, the corpus, gold, and an index that exists."""

from __future__ import annotations

import collections
import itertools
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from jax_ragrl.config.functions import imported
from jax_ragrl.corpus import world as worlds
from jax_ragrl.corpus.data_path import data_path
from jax_ragrl.corpus.mixture import load_answered, load_mixture
from jax_ragrl.corpus.passages import fingerprint
from jax_ragrl.errors import UserError
from jax_ragrl.retrieval.bm25 import check_bm25_settings
from jax_ragrl.retrieval.description import encoder_source, read_description
from jax_ragrl.retrieval.index import FILE, folder_of
from jax_ragrl.retrieval.kinds import BM25Index, Index, OwnIndex, ServerIndex, VectorIndex
from jax_ragrl.retrieval.lengths import describe_long
from jax_ragrl.retrieval.measures import example_names, missing_gold
from jax_ragrl.run.config import Data, FileData
from jax_ragrl.run.data import config_reading, section_units
from jax_ragrl.run.index import check_index_settings, has_other_source, index_folder
from jax_ragrl.types import Passage, Question
from jax_ragrl.validation.findings import Finding, Level, guarded

SPLITS = ("train", "dev", "test")
LIMIT = 200_000  # passages: reading a whole Wikipedia would take minutes


class DataSample(NamedTuple):
    """Data that later checks use: questions by split, without splits that cannot be read.

    `passages` are the first `LIMIT` of the corpus, and `complete` says whether these are all.
    """

    questions: Mapping[str, Sequence[Question]]
    passages: Sequence[Passage] = ()
    complete: bool = True
    world: worlds.World | None = None


@guarded("data")
def check_questions(files: FileData, questions: dict[str, Sequence[Question]]) -> Iterator[Finding]:
    """Reads every question file, and puts those that can be read into `questions`."""
    for split in SPLITS:
        names = [name.strip() for name in getattr(files, split).split(",")]
        findings = [finding for name in names for finding in _check_file(split, name, files)]
        yield from findings
        if all(finding.level != "error" for finding in findings):
            # Several files are refused together if their ids may coincide.
            each, counts = (
                (files.max_train_per_file, files.train_per_file) if split == "train" else (0, ())
            )
            questions[split] = load_mixture(getattr(files, split), each, counts, files.fields)


@guarded("data")
def _check_file(split: str, name: str, files: FileData) -> Iterator[Finding]:
    if not name:
        raise UserError(f"data.files.{split} is empty: give a file of questions")
    file_questions = load_answered(data_path(name), files.fields)
    yield Finding("ok", "data", f"data.files.{split}: {len(file_questions)} questions in {name}")
    ids = collections.Counter(question.id for question in file_questions)
    if duplicates := [key for key, count in ids.items() if count > 1]:
        yield Finding(
            "warning",
            "data",
            f"{name}: {len(duplicates)} ids occur more than once, such as {duplicates[0]!r}: make "
            "the ids unique, because results are stored by id",
        )


def read_corpus(data: Data, index: Index, sample: DataSample) -> tuple[list[Finding], DataSample]:
    """Reads the passages of a config, up to `LIMIT`; returns findings, and the sample with them."""
    passages = list[Passage]()
    findings = list(_read_passages(data, index, passages))
    complete = len(passages) <= LIMIT and all(finding.level != "error" for finding in findings)
    return findings, sample._replace(passages=passages[:LIMIT], complete=complete)


@guarded("corpus")
def _read_passages(data: Data, index: Index, passages: list[Passage]) -> Iterator[Finding]:
    assert data.files is not None, "a world has its own passages"
    if not data.files.corpus:
        if isinstance(index, ServerIndex):
            return
        raise UserError(
            "data.files.corpus is empty: name a file of passages, or set index.kind to remote and "
            "index.url to a server that has its own"
        )
    reading = config_reading(data, index)
    path = data_path(data.files.corpus)
    passages += itertools.islice(reading.passages(path), LIMIT + 1)
    ids = collections.Counter(passage.id for passage in passages)
    name, times = ids.most_common(1)[0]
    if times > 1:
        raise UserError(f"{path}: passage id {name!r} occurs {times} times: make the ids unique")
    count = f"the first {LIMIT}" if len(passages) > LIMIT else str(len(passages))
    yield Finding("ok", "corpus", f"{count} passages in {path}")


@guarded("corpus")
def check_lengths(sample: DataSample, index: Index) -> Iterator[Finding]:
    """Counts the passages that the encoder of the index would cut."""
    passages = sample.passages
    if passages and (line := describe_long(passages, section_units(index))):
        yield Finding("warning", "corpus", line)


@guarded("gold")
def check_gold(sample: DataSample) -> Iterator[Finding]:
    """Counts the gold passages that the corpus lacks, per split."""
    for split, questions in sample.questions.items():
        gold = {name for question in questions for name in question.gold}
        if not (gold and sample.passages and sample.complete):
            continue
        missing = missing_gold(questions, sample.passages)
        level: Level = "warning" if missing else "ok"
        text = f"{len(missing)} of {len(gold)} gold passages of {split} are not in the corpus"
        if missing:
            names = example_names(sample.passages)
            remedy = "give the corpus that they are from, or expect recall to count them as misses"
            if len(missing) == len(gold):
                level = "error"
                remedy = f"give {split} questions of this corpus, or the corpus that they are from"
            text = f"{text}, such as {missing[0]!r}, but {names}: {remedy}"
        yield Finding(level, "gold", text)


@guarded("data")
def check_overlap(sample: DataSample) -> Iterator[Finding]:
    """Counts the dev and test questions that are training questions too."""
    train_texts = {question.text for question in sample.questions.get("train", ())}
    for split in ("dev", "test"):
        questions = sample.questions.get(split, ())
        if count := sum(question.text in train_texts for question in questions):
            text = f"{count} of {len(questions)} {split} questions are also training questions"
            remedy = "divide the file, because scores on training questions are too high"
            yield Finding("warning", "data", f"{text}: {remedy}")


@guarded("index")
def check_index(
    index: Index, workdir: pathlib.Path | None, sample: DataSample
) -> Iterator[Finding]:
    """Compares an index that exists with the corpus and with the settings of the config."""
    if isinstance(index, OwnIndex):
        imported("index.retriever", index.retriever)
    names_in_use = getattr(index, "folder", "")
    if not isinstance(index, VectorIndex | BM25Index) or not (names_in_use or workdir):
        return
    folder = index_folder(index, workdir or pathlib.Path())
    if sample.passages and sample.complete:
        own = folder_of(folder, fingerprint(sample.passages))
        if own != folder:
            text = f"{folder} has the index of another corpus: this one will be in {own}"
            yield Finding("warning", "index", f"{text}, unless you give another index.folder")
        folder = own
    if not (folder / FILE).exists():
        yield Finding("ok", "index", f"{folder} has no index yet: the run will build it")
        return
    if isinstance(index, BM25Index):
        check_bm25_settings(index, folder)
    else:
        check_index_settings(index, folder)
        if has_other_source(index, folder):
            source = encoder_source(read_description(folder))
            text = f"{folder} was built with the encoder {source}, but index.encoder is"
            remedy = "a run opens it only if both are the same model"
            yield Finding("warning", "index", f"{text} {index.encoder}: {remedy}")
            return
    yield Finding("ok", "index", f"{folder} fits the corpus and the config")
