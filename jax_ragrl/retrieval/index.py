"""An index: a folder with the vectors of a corpus, built once and opened by every run.

index.json  corpus fingerprint, encoder, kind, dimension, count, dtype, and `reading`, see
            `Corpus`; written last. Of the kind `scann` also `files`, the SHA-256 of the searcher's,
            and `search`, see `tune`
passages/   the corpus, see `corpus.store`, if it was read from a file
vectors/    [count, dimension] in that dtype, or float32 for int8, see `shards`
codes/      for the dtype int8, with `scales/`, see `int8`
encoder/    files of the encoder beyond its description
scann/      the trained searcher, for the kind `scann` above 20,000 passages
"""

from __future__ import annotations

import json
import os
import pathlib
import random
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jax_ragrl.corpus import store
from jax_ragrl.corpus.chunks import WORDS, Chunks, Units
from jax_ragrl.corpus.fields import NO_FIELDS
from jax_ragrl.corpus.formats import load_questions
from jax_ragrl.corpus.formats.qrels import questions_with_gold
from jax_ragrl.corpus.passages import Corpus
from jax_ragrl.corpus.reading import AS_IS, Reading, load_corpus, source_of
from jax_ragrl.corpus.store import StoredPassages
from jax_ragrl.errors import UserError
from jax_ragrl.models.encoder import encoder_units, from_description, load_encoder
from jax_ragrl.retrieval.dense import DenseRetriever, Searcher
from jax_ragrl.retrieval.description import (
    FILE,
    PASSAGES,
    READING,
    check_corpus,
    drop_versions,
    files_folder,
    read_description,
    reading_facts,
)
from jax_ragrl.retrieval.embed import Encoder, KnownVectors, embed
from jax_ragrl.retrieval.exact import ExactSearcher
from jax_ragrl.retrieval.hashed_words import HashedEncoder
from jax_ragrl.retrieval.int8 import Int8Searcher, write_int8
from jax_ragrl.retrieval.kinds import HASHED_WORDS, INT8, check_settings
from jax_ragrl.retrieval.lengths import report_long
from jax_ragrl.retrieval.scann import BRUTE_FORCE, ScannSearcher, Setting, build_scann, hash_files
from jax_ragrl.retrieval.shards import MappedArray, forget_progress, read_array, write_array
from jax_ragrl.retrieval.tune import tune
from jax_ragrl.runtime.jsonl import write_json
from jax_ragrl.runtime.multihost import on_process_zero
from jax_ragrl.types import Question

# Imported vectors are checked by encoding a few passages again. Their relative distance must stay
# below a limit that tolerates formatting but not another passage: a title in quotes moves MiniLM's
# vectors by 0.10, and the next passage of a Wikipedia article differs by 0.70 (E5).
PROBES, MAX_DISTANCE = 16, 0.4


def _check_vectors(vectors: np.ndarray, corpus: Corpus, encoder: Encoder) -> np.ndarray:
    """Returns imported vectors as [X, D], also flat ones, if a few match corpus and encoder."""
    expected = (len(corpus), encoder.dimension)
    if vectors.shape not in (expected, (len(corpus) * encoder.dimension,)):
        raise UserError(
            f"vectors of shape {vectors.shape} do not fit a corpus and encoder of {expected}: "
            "give vectors of the same passages and model"
        )
    vectors_XD = vectors.reshape(expected)
    # Passages from the whole corpus: an offset or another order may begin late.
    sample = random.Random(0).sample(range(len(corpus)), min(PROBES, len(corpus)))
    probes_PD = encoder.encode_passages([corpus.passages[i] for i in sample])
    distance = np.linalg.norm(vectors_XD[sample] - probes_PD) / np.linalg.norm(probes_PD)
    if not distance < MAX_DISTANCE:
        raise UserError(
            f"the vectors of {len(sample)} passages differ from this encoder's by "
            f"{distance:.2f} of their length: give the model, the prefix and the corpus, in the "
            "same order, with which the vectors were computed"
        )
    return vectors_XD


def build_index(
    corpus: Corpus,
    encoder: Encoder,
    kind: str,
    folder: pathlib.Path | str,
    vectors: np.ndarray | None = None,
    dtype: str = "float32",
    recall: float = 0.0,
    known_vectors: KnownVectors | None = None,
) -> DenseRetriever:
    """Encodes a corpus, writes the index and opens it; resumes a build that was killed.

    A collective: the processes of a run divide the shards of the vectors, and the first process
    writes the other files.

    Args:
      encoder: e.g. `HashedEncoder.fit(corpus.passages)` or `models.encoder.load_encoder(folder)`.
      vectors: floats [X, D] that this encoder computed before (see `open_vectors`).
      dtype: of the vectors on disk, and on the devices of an exact searcher; see `DTYPES`.
      recall: the recall for which `tune` tunes a searcher of the kind `scann`; 0: not tuned.
      known_vectors: vectors of some passages, which are copied (see `update_index`).

    Raises:
      UserError: unknown kind or dtype, ScaNN missing, a recall that the kind does not read, or
        vectors that do not fit.
    """
    check_settings(kind, dtype, recall)
    folder = pathlib.Path(folder)

    def begin() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # Removed first and written last, so that its presence proves that the index is complete.
        (folder / FILE).unlink(missing_ok=True)

    on_process_zero(begin)
    # Eight bits come from float32 vectors, which remain for the second scores.
    stored_dtype = "float32" if dtype == INT8 else dtype
    if vectors is None:
        # Before the encoding, which may take hours; an encoder of words cuts nothing.
        on_process_zero(lambda: report_long(corpus.passages, getattr(encoder, "units", WORDS)))
        parts = [corpus.fingerprint, _identity(encoder.describe()), stored_dtype]
        identity = json.dumps(parts, sort_keys=True)
        embed(corpus.passages, encoder, folder / "vectors", identity, stored_dtype, known_vectors)
    else:
        array = _check_vectors(vectors, corpus, encoder)
        on_process_zero(lambda: write_array(array, folder / "vectors", stored_dtype))
    on_process_zero(lambda: _finish(folder, corpus, encoder, (kind, dtype, recall)))
    return _open(folder, read_description(folder), corpus, encoder)


def _finish(
    folder: pathlib.Path, corpus: Corpus, encoder: Encoder, settings: tuple[str, str, float]
) -> None:
    kind, dtype, recall = settings
    encoder.save(folder / "encoder")
    if dtype == INT8:
        write_int8(MappedArray(folder / "vectors"), folder)
    description = {
        "corpus": corpus.fingerprint,
        "encoder": encoder.describe(),
        "dimension": encoder.dimension,
        "count": len(corpus),
        **reading_facts(corpus),
        "kind": kind,
        "dtype": dtype,
        **(_build_scann(folder, recall) if kind == "scann" else {}),
    }
    write_json(folder / FILE, description)
    # After the description: a build that is killed before that point resumes from its progress.
    forget_progress(folder / "vectors")
    drop_versions(folder)


def _build_scann(folder: pathlib.Path, recall: float) -> dict[str, Any]:
    vectors_XD = read_array(folder / "vectors")
    build_scann(vectors_XD, folder / "scann")
    files = hash_files(folder / "scann") if len(vectors_XD) >= BRUTE_FORCE else ""
    facts: dict[str, Any] = {"files": files} if files else {}
    if recall:
        searcher = ScannSearcher.open(folder / "scann", folder / "vectors", len(vectors_XD))
        facts["search"] = tune(searcher, vectors_XD, recall)
    return facts


def _open(
    folder: pathlib.Path, description: Mapping[str, Any], corpus: Corpus, encoder: Encoder
) -> DenseRetriever:
    search = description.get("search", {})  # of `tune`, if it chose a setting
    setting = [search[key] for key in Setting._fields if key in search]
    searcher: Searcher
    if description["kind"] == "scann":
        chosen = Setting(*setting) if setting else None
        searcher = ScannSearcher.open(folder / "scann", folder / "vectors", len(corpus), chosen)
    elif description.get("dtype") == INT8:
        searcher = Int8Searcher.open(folder)
    else:
        searcher = ExactSearcher(MappedArray(folder / "vectors"))
    build = " ".join(map(str, [description.get("files", ""), *setting])).strip()
    return DenseRetriever(corpus, encoder, searcher, build)


def reload_encoder(description: dict[str, Any], folder: pathlib.Path) -> Encoder:
    """Loads the encoder with which an index was built."""
    if description["kind"] == HASHED_WORDS:
        return HashedEncoder.load(folder / "encoder")
    return from_description(description)


def _identity(description: dict[str, Any]) -> dict[str, Any]:
    """The model's path is left out, because a folder may move."""
    return {name: value for name, value in description.items() if name != "source"}


def open_index(
    folder: pathlib.Path | str, corpus: Corpus, encoder: Encoder | None = None
) -> DenseRetriever:
    """Opens an index; raises `UserError` if it is of another corpus or another encoder."""
    folder = pathlib.Path(folder)
    description = read_description(folder)
    check_corpus(folder, description, corpus)
    files = files_folder(folder)
    encoder = reload_encoder(description["encoder"], files) if encoder is None else encoder
    # Vectors of different encoders are not comparable, although a search would return hits.
    if _identity(encoder.describe()) != _identity(description["encoder"]):
        raise UserError(
            f"index {folder} was built with the encoder {description['encoder']}, but "
            f"{encoder.describe()} is loaded: name the encoder of the index, or rerun 'ragrl "
            "data index' in another folder"
        )
    return _open(files, description, corpus, encoder)


def stored_corpus(folder: pathlib.Path) -> Corpus:
    """Opens the passages that an index folder stores; raises `UserError` if it has none."""
    description = read_description(folder)  # a folder without an index is another error
    try:
        passages = StoredPassages(files_folder(folder) / PASSAGES)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{folder} holds no passages ({error}), because its corpus was not read from a file: "
            "give the file (--corpus), or the config that built it (--config)"
        ) from error
    return Corpus(passages, passages.fingerprint, description.get(READING))


def load_indexed(
    path: pathlib.Path,
    folder: pathlib.Path | None,
    reading: Reading | None = None,
    *,
    own_folder: bool = False,
) -> Corpus:
    """Reads the corpus of a file and caches its passages in the folder of an index.

    The index may exist, or be built later. Without a folder the passages are kept in memory. If the
    path is itself the folder of an index, its passages are opened. Without a `reading` the file is
    read as for the index. With `own_folder` a second corpus gets a folder of its own (`folder_of`).

    Raises:
      UserError: as `load_corpus`; or the index was built for another corpus.
    """
    if os.path.isfile(path / FILE):  # `pathlib` fails for a list of files that is too long
        return stored_corpus(path)
    if folder is None:
        return load_corpus(path, reading=reading or AS_IS)
    reading = stored_reading(path, folder) if reading is None else reading
    if own_folder:
        source = source_of(path, reading.describe())
        # Further corpora next to the index: only names of `folder_of`, 16 hex digits after its own.
        pattern = re.compile(re.escape(folder.name) + "-[0-9a-f]{16}")
        near = sorted(folder.parent.iterdir()) if folder.parent.is_dir() else []
        for sibling in (path for path in near if pattern.fullmatch(path.name)):
            if (passages := store.open_passages(sibling / PASSAGES, source)) is not None:
                return Corpus(passages, passages.fingerprint, reading.describe())
    cache = passages_folder(folder)

    def choose(fingerprint: str) -> pathlib.Path:
        if own_folder and (own := folder_of(folder, fingerprint)) != folder:
            return own / PASSAGES
        owner = _owner(folder) if (folder / FILE).exists() else ""
        if owner not in ("", fingerprint):
            raise UserError(
                f"index {folder} was built for corpus {owner}, but {path} holds {fingerprint}: "
                "rerun 'ragrl data index', or give the corpus it was built for"
            )
        return cache

    return load_corpus(path, folder=cache, choose=choose, reading=reading)


def passages_folder(folder: pathlib.Path) -> pathlib.Path:
    """Returns the folder of the passages of an index, which may not exist yet."""
    return (files_folder(folder) if (folder / FILE).exists() else folder) / PASSAGES


def folder_of(folder: pathlib.Path, fingerprint: str) -> pathlib.Path:
    """Returns the folder, or `FOLDER-FINGERPRINT` if it has the index of another corpus."""
    owner = _owner(folder)
    if owner in ("", fingerprint):
        return folder
    return folder.with_name(f"{folder.name}-{fingerprint}")


def _owner(folder: pathlib.Path) -> str:
    """Returns the fingerprint of the corpus of an index, or of its passages; empty: none."""
    if (folder / FILE).exists():
        return str(read_description(folder)["corpus"])
    try:
        return StoredPassages(folder / PASSAGES).fingerprint
    except (OSError, ValueError):
        return ""


def stored_reading(path: pathlib.Path, folder: pathlib.Path) -> Reading:
    """Returns how a file was read for an index, with a line on stderr; `AS_IS` for another file."""
    parts = store.reading_of(passages_folder(folder), source_of(path))
    if not parts:
        return AS_IS
    print(f"ragrl: {path} is read as for the index {folder}: {json.dumps(parts)}", file=sys.stderr)
    return reading_of(parts)


def reading_of(parts: Mapping[str, Any]) -> Reading:
    """Returns the reading that `Reading.describe` described; loads the units of its chunks."""
    chunk = dict(parts.get("chunk", {}))
    units = units_of(chunk.pop("units", WORDS.name))
    return Reading(parts.get("fields", {}), Chunks(**chunk) if chunk else None, units)


def units_of(name: str) -> Units:
    """Returns the units of an encoder's input by its name; hashed words and `words` are words."""
    return WORDS if name in (WORDS.name, HASHED_WORDS) else encoder_units(name)


def make_encoder(name: str, corpus: Corpus, **prefixes: str | None) -> Encoder:
    """Loads an encoder: `hashed`, `minilm`, a folder or a name; `UserError` if there is none."""
    if name != HASHED_WORDS:
        return load_encoder(name, **prefixes)
    if any(prefixes.values()):
        raise UserError("a prefix was given, but hashed words have none: omit it")
    return HashedEncoder.fit(corpus.passages)


def with_gold(
    path: pathlib.Path | str | None,
    qrels: pathlib.Path | str | None,
    fields: Mapping[str, str] = NO_FIELDS,
) -> list[Question]:
    """Returns the questions on which recall is measured: those with gold passages, or an answer.

    Raises:
      UserError: a file cannot be read, or no question has gold passages or an answer.
    """
    if path is None:
        if qrels is not None:
            raise UserError(f"--qrels {qrels} needs the questions that it judges: give --questions")
        return []
    questions = load_questions(path, fields=fields)
    if qrels is not None:
        return questions_with_gold(questions, qrels)
    gold = [question for question in questions if question.gold]
    with_answers = [question for question in questions if question.answers]
    if not (gold or with_answers):
        raise UserError(
            f"{path} names neither gold passages nor answers, one of which recall needs: give "
            "--qrels, or omit --questions"
        )
    return gold or with_answers


def read_corpus(
    path: pathlib.Path | str, folder: pathlib.Path, reading: Reading, units: Callable[[], Units]
) -> Corpus:
    """Reads the corpus of an index that is about to be built."""
    if reading.chunks:
        reading = reading._replace(units=units())
    return load_corpus(path, folder=folder / PASSAGES, reading=reading)
