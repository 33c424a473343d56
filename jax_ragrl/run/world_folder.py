"""The folder of `ragrl data world`: the generated corpus, its questions, and the settings of both.

The settings are enough to generate the world again, whose facts its rule-based reader needs.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

from jax_ragrl.config.schema import build, local
from jax_ragrl.corpus.formats.flashrag import save_questions
from jax_ragrl.corpus.passages import Corpus, save_corpus
from jax_ragrl.corpus.world import World, generate
from jax_ragrl.errors import UserError
from jax_ragrl.llm.base import FrozenLLM
from jax_ragrl.llm.kinds import WorldReaderConfig
from jax_ragrl.run.config import WorldData
from jax_ragrl.run.models import load_llm
from jax_ragrl.run.short_names import json_object
from jax_ragrl.runtime.caches import new_files
from jax_ragrl.runtime.jsonl import write_json
from jax_ragrl.sampling.sampler import Shapes

FILE = "world.json"
READER = "world:"  # the prefix of a reader among the names of language models
# The documents of all tiny styles have one form; this style also has the form of answers.
STYLE = "mao_arag_tiny"


def make_world(settings: WorldData) -> World:
    return generate(
        settings.seed,
        settings.size,
        famous=settings.famous_fraction,
        hops=settings.hops,
        outdated_relations=settings.outdated_relations,
    )


def save_world(settings: WorldData, out: pathlib.Path) -> dict[str, Any]:
    """Writes passages, the questions of each split, and the settings; returns the counts.

    `UserError` if `out` has other files of these names.
    """
    world = make_world(settings)
    with new_files(out) as draft:
        save_corpus(Corpus(world.passages), draft / "passages.jsonl")
        for split, questions in world.questions.items():
            save_questions(questions, draft / f"{split}.jsonl")
        write_json(draft / FILE, dataclasses.asdict(settings))
    counts = {split: len(questions) for split, questions in world.questions.items()}
    return {"passages": len(world.passages), **counts, "out": str(out)}


def load_reader(text: str) -> FrozenLLM:
    """Loads the reader `world:FOLDER[#SETTINGS]` of a world; `UserError` if there is none.

    SETTINGS is a JSON object with keys of `WorldReaderConfig`, such as `{"noise": 0.3}`.
    """
    folder, _, changes = text.removeprefix(READER).partition("#")
    file = local(folder) / FILE
    if not file.is_file():
        raise UserError(f"{file} does not exist: give the --out folder of 'ragrl data world'")
    settings = build(WorldData, json.loads(file.read_text(encoding="utf-8")), FILE)
    reader = build(WorldReaderConfig, json_object(changes or "{}"), "llm")
    return load_llm(reader, make_world(settings), STYLE, Shapes())
