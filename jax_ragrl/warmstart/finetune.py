"""Baselines whose generator is fine-tuned: the answer to a question, from what a search found.

Vanilla RAG + SFT, RetRobust and InstructRAG are one run on three kinds of rows
(`systems/baselines/rows.py`). What it ends with is a language model in a folder, to be given back
to `ragrl evaluate` with `--llm`, beside the system that asks as its rows do.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import pathlib
import random
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from flax import nnx
from tqdm import tqdm

from jax_ragrl.config.schema import build, one_of
from jax_ragrl.corpus.passages import Corpus
from jax_ragrl.corpus.world import World
from jax_ragrl.errors import UserError
from jax_ragrl.learner.checkpoint import Checkpoints
from jax_ragrl.learner.imitation import IMITATION, Example, example, imitate
from jax_ragrl.learner.optimizer import Optimizer
from jax_ragrl.learner.packing import Layout
from jax_ragrl.learner.state import Models, Trainer, acting, prepare, trained
from jax_ragrl.llm.local import LocalLLM
from jax_ragrl.models.decoder import Decoder
from jax_ragrl.models.hf import save_decoder
from jax_ragrl.models.lora import merge_lora
from jax_ragrl.retrieval.base import Retriever, search_all
from jax_ragrl.rollout.collect import Environment
from jax_ragrl.run.components import index_folder, load_data, load_llm, load_policy, load_retriever
from jax_ragrl.run.config import LLM, TINY, Data, Index
from jax_ragrl.run.evaluate import NoSampler, evaluate
from jax_ragrl.runtime.jsonl import append, keep_until, write_json
from jax_ragrl.runtime.portable_random import shuffled
from jax_ragrl.sampling.sampler import Shapes
from jax_ragrl.systems.baselines.instruct_rag import InstructRAG
from jax_ragrl.systems.baselines.rows import (
    ANSWER,
    Row,
    explained_rows,
    robust_rows,
    vanilla_rows,
)
from jax_ragrl.systems.baselines.standard import StandardRAG
from jax_ragrl.text.tokenizer import ChatTokenizer
from jax_ragrl.types import Hits, Question

T = TypeVar("T")
METRIC = "f1"
DEEPER = 3  # RetRobust's low ranks: how much deeper than shown its searches go


@dataclasses.dataclass(frozen=True)
class Finetune:
    """A run; the fields are the keys and sections of its config.

    `rows` is one of `ROWS`. A step is `batch` rows, drawn without repetition until all were seen.
    The model is tried before and after on the first `test_questions`. `writer` writes what is to be
    learnt by rows that are `explained`: in the paper, the policy itself before it is trained. A
    reply, be it one of a local writer, has at most `shapes.steps` tokens.
    """

    rows: str
    steps: int
    optimizer: Optimizer
    data: Data
    index: Index = Index()
    policy: str = TINY
    writer: LLM = LLM()
    style: str = "baselines_tiny"
    top_k: int = 5
    batch: int = 32
    test_questions: int = 300
    shapes: Shapes = Shapes()
    layout: Layout = Layout()
    compute: str = "float32"
    remat: str = "none"
    seed: int = 0

    def __post_init__(self) -> None:
        one_of("config.rows", self.rows, ROWS)


def load_finetune(values: Mapping[str, Any]) -> Finetune:
    """A run from the values of a config."""
    return build(Finetune, values)


class Source(NamedTuple):
    """What rows are made from; `world` where the data are generated."""

    questions: Sequence[Question]
    retriever: Retriever
    corpus: Corpus
    world: World | None

    def found(self, k: int) -> list[Hits]:
        """The `k` passages that each question itself finds."""
        return search_all(self.retriever, [q.text for q in self.questions], k)


def _vanilla(run: Finetune, source: Source) -> list[Row]:
    return vanilla_rows(run.style, source.questions, source.found(run.top_k), run.top_k)


def _robust(run: Finetune, source: Source) -> list[Row]:
    found, rng = source.found(DEEPER * run.top_k), random.Random(run.seed)
    passages = source.corpus.passages
    if not passages:
        raise UserError("rows robust draws passages to mislead with: name data.files.corpus")
    return robust_rows(run.style, source.questions, found, passages, run.top_k, rng)


def _explained(run: Finetune, source: Source) -> list[Row]:
    writer = load_llm(run.writer, source.world, run.style, run.shapes)
    found = source.found(run.top_k)
    return explained_rows(run.style, source.questions, found, run.top_k, writer)


class Kind(NamedTuple):
    """How rows are made, and the system (of a style and `top_k`) that asks as they do."""

    rows: Callable[[Finetune, Source], list[Row]]
    system: Callable[[str, int], Any]


ROWS: Mapping[str, Kind] = {
    "vanilla": Kind(_vanilla, StandardRAG),
    "robust": Kind(_robust, StandardRAG),
    "explained": Kind(_explained, InstructRAG),
}


def fine_tune(run: Finetune, out: pathlib.Path) -> dict[str, Any]:
    """Trains on the rows: `out/checkpoint` (Hugging Face layout), `out/metrics.jsonl`.

    Returns what it writes to `out/summary.json`; accuracies are F1 in percent, of the system of the
    rows with the model as its reader. Raises `UserError` where `out` holds a model already.
    """
    if (out / "checkpoint").exists():
        raise UserError(f"{out / 'checkpoint'} is there already: give another --out")
    out.mkdir(parents=True, exist_ok=True)
    corpus, questions, world = load_data(run.data, index_folder(run.index, out))
    retriever = load_retriever(corpus, run.index, out)
    policy, tokenizer = load_policy(run.policy)
    rows = ROWS[run.rows].rows(run, Source(questions["train"], retriever, corpus, world))
    tested = questions["test"][: run.test_questions]
    before = _accuracy(run, nnx.split(policy, nnx.Param), tokenizer, retriever, tested)
    choices = (IMITATION, run.optimizer, run.layout, (ANSWER,), 1.0, run.steps)
    trainer, models = prepare(policy, *choices, compute=run.compute, remat=run.remat)
    drawn = batches(rows, run.batch, run.seed)

    def encode(row: Row) -> Example:
        return example(tokenizer, *row)

    models, metrics = learn(trainer, models, drawn, encode, run.steps, out)
    finish(trained(trainer, models), tokenizer, out)
    after = _accuracy(run, acting(trainer, models), tokenizer, retriever, tested)
    summary = {
        "rows": run.rows,
        "examples": len(rows),
        "steps": run.steps,
        "loss": metrics.get("loss"),
        "metric": "F1, percent",
        "questions": len(tested),
        "accuracy": {"before": before, "after": after},
        "checkpoint": str(out / "checkpoint"),
    }
    write_json(out / "summary.json", summary)
    return summary


def learn(
    trainer: Trainer,
    models: Models,
    drawn: Iterator[Sequence[T]],
    encode: Callable[[T], Example],
    steps: int,
    out: pathlib.Path,
    save_every: int = 0,
) -> tuple[Models, dict[str, float]]:
    """The models after `steps` batches of what is drawn, and the metrics of the last.

    Items are encoded as they come: the ids of all would not fit into memory. `out/metrics.jsonl` is
    the curve: the metrics of `imitate`, and how many items of a batch were `too_long` for a row. A
    run that was saved in `out/unfinished` goes on from there.
    """
    metrics: dict[str, float] = {}
    with contextlib.closing(Checkpoints(out / "unfinished", keep=1)) as saved:
        start = saved.latest() or 0
        if start:
            models, _ = saved.restore(start, models)
        keep_until(out / "metrics.jsonl", start)
        rest = itertools.islice(drawn, start, steps)
        bar = tqdm(rest, unit="step", initial=start, total=steps)
        for step, batch in enumerate(bar, start + 1):
            examples = [encode(item) for item in batch]
            models, metrics = imitate(trainer, models, examples)
            longest = trainer.layout.lengths[-1]
            long = sum(len(e.prompt) + len(e.target) > longest for e in examples)
            append(out / "metrics.jsonl", {"step": step, **metrics, "too_long": long})
            if save_every and step % save_every == 0:
                saved.save(step, models, {})
    return models, metrics


def finish(model: Decoder, tokenizer: ChatTokenizer, out: pathlib.Path) -> None:
    """Writes `out/checkpoint`, with an adapter merged, and forgets what `learn` saved."""
    plain = model if model.adapter is None else merge_lora(model)
    tokenizer.save(out / "tokenizer")
    save_decoder(plain, out / "checkpoint", out / "tokenizer", dtype="bfloat16")
    shutil.rmtree(out / "unfinished")


def batches(examples: Sequence[T], size: int, seed: int) -> Iterator[list[T]]:
    """Endless batches: all examples in a new random order, again and again."""
    if not examples:
        raise UserError(
            "there is nothing to learn from: no training question has an answer, or no rationale "
            "holds one (try another writer)"
        )
    waiting: list[T] = []
    epoch = 0
    while True:
        while len(waiting) < size:
            waiting += shuffled(random.Random(f"{seed} {epoch}"), examples)
            epoch += 1
        yield waiting[:size]
        del waiting[:size]


def _accuracy(
    run: Finetune,
    split: tuple[Any, Any],
    tokenizer: ChatTokenizer,
    retriever: Retriever,
    questions: Sequence[Question],
) -> float:
    """The F1 of the system of the rows with a model as its reader, in percent."""
    reader = LocalLLM(*split, tokenizer, run.shapes)
    environment = Environment(NoSampler(), retriever, reader, tokenizer.count)
    result = evaluate(ROWS[run.rows].system(run.style, run.top_k), questions, environment)
    return round(100 * result.mean(METRIC), 2)
