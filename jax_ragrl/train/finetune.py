"""Baselines whose generator is fine-tuned: the answer to a question, from what a search found.

Vanilla RAG + SFT and RetRobust are one run on two kinds of rows (`systems/baselines/rows.py`). What
it ends with is a language model in a folder, for `ragrl evaluate --systems standard_rag --llm`.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from flax import nnx
from tqdm import tqdm

from jax_ragrl.batch import Layout
from jax_ragrl.config import build
from jax_ragrl.corpus.passages import Corpus
from jax_ragrl.draws import shuffled
from jax_ragrl.errors import UserError
from jax_ragrl.evaluate import NoSampler, evaluate
from jax_ragrl.llm.local import LocalLLM
from jax_ragrl.models.decoder import Decoder
from jax_ragrl.models.hf import save_decoder
from jax_ragrl.retrieval.base import Retriever
from jax_ragrl.rollout.collect import Environment
from jax_ragrl.sampling.sampler import Shapes
from jax_ragrl.systems.baselines.rows import ANSWER, Row, robust_rows, vanilla_rows
from jax_ragrl.systems.baselines.standard import StandardRAG
from jax_ragrl.text.tokenizer import ChatTokenizer
from jax_ragrl.train.assemble import TINY, Data, Index, load_data, load_policy, search
from jax_ragrl.train.optimizer import Optimizer
from jax_ragrl.train.sft import IMITATION, Example, imitate
from jax_ragrl.train.trainer import acting, prepare
from jax_ragrl.types import Question

METRIC = "f1"
DEEPER = 3  # RetRobust's low ranks: how much deeper than shown its searches go


@dataclasses.dataclass(frozen=True)
class Finetune:
    """A run; the fields are the keys and sections of its config.

    `rows` is `vanilla` or `robust`. A step is `batch` rows, drawn without repetition until all were
    seen. The model is tried before and after on the first `test_questions`.
    """

    rows: str
    steps: int
    optimizer: Optimizer
    data: Data
    index: Index = Index()
    policy: str = TINY
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
        if self.rows not in ROWS:
            raise UserError(f"config.rows is {self.rows!r}: use {' or '.join(ROWS)}")


def load_finetune(values: Mapping[str, Any]) -> Finetune:
    """A run from the values of a config."""
    return build(Finetune, values)


def _vanilla(
    run: Finetune, questions: Sequence[Question], retriever: Retriever, corpus: Corpus
) -> list[Row]:
    found = retriever.search([q.text for q in questions], run.top_k)
    return vanilla_rows(run.style, questions, found, run.top_k)


def _robust(
    run: Finetune, questions: Sequence[Question], retriever: Retriever, corpus: Corpus
) -> list[Row]:
    found = retriever.search([q.text for q in questions], DEEPER * run.top_k)
    rng = random.Random(run.seed)
    return robust_rows(run.style, questions, found, corpus.passages, run.top_k, rng)


ROWS: Mapping[str, Callable[[Finetune, Sequence[Question], Retriever, Corpus], list[Row]]] = {
    "vanilla": _vanilla,
    "robust": _robust,
}


def fine_tune(run: Finetune, out: pathlib.Path) -> dict[str, Any]:
    """Trains on the rows: `out/checkpoint` (Hugging Face layout), `out/metrics.jsonl`.

    Returns what it writes to `out/summary.json`; accuracies are F1 in percent, of Standard RAG with
    the model as its reader. Raises `UserError` where `out` holds a model already.
    """
    if (out / "checkpoint").exists():
        raise UserError(f"{out / 'checkpoint'} is there already: give another --out")
    out.mkdir(parents=True, exist_ok=True)
    corpus, questions, _ = load_data(run.data)
    retriever = search(corpus, run.index, out)
    policy, tokenizer = load_policy(run.policy)
    rows = ROWS[run.rows](run, questions["train"], retriever, corpus)
    examples = [example_of(row, tokenizer) for row in rows]
    tested = questions["test"][: run.test_questions]
    before = _accuracy(run, nnx.split(policy, nnx.Param), tokenizer, retriever, tested)
    choices = (IMITATION, run.optimizer, run.layout, (ANSWER,), 1.0, run.steps)
    trainer, models = prepare(policy, *choices, compute=run.compute, remat=run.remat)
    metrics: dict[str, float] = {}
    with (out / "metrics.jsonl").open("w", encoding="utf-8") as file:
        drawn = batches(examples, run.batch, run.seed)
        for step, batch in zip(tqdm(range(run.steps), unit="step"), drawn, strict=False):
            models, metrics = imitate(trainer, models, batch)
            file.write(json.dumps({"step": step + 1, **metrics}) + "\n")
    trained = acting(trainer, models)
    tokenizer.save(out / "tokenizer")
    save_decoder(_plain(trained), out / "checkpoint", out / "tokenizer", dtype="bfloat16")
    after = _accuracy(run, trained, tokenizer, retriever, tested)
    summary = {
        "rows": run.rows,
        "examples": len(examples),
        "steps": run.steps,
        "loss": metrics.get("loss"),
        "metric": "F1, percent",
        "questions": len(tested),
        "accuracy": {"before": before, "after": after},
        "checkpoint": str(out / "checkpoint"),
    }
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    return summary


def example_of(row: Row, tokenizer: ChatTokenizer) -> Example:
    """The ids of a row; the target ends with the stop token."""
    target = (*tokenizer.encode(row.target), tokenizer.stop_ids[0])
    return Example(tuple(tokenizer.chat(row.messages)), target, row.role)


def batches(examples: Sequence[Example], size: int, seed: int) -> Iterator[list[Example]]:
    """Endless batches: all examples in a new random order, again and again."""
    if not examples:
        raise UserError("no training question has an answer: there is nothing to learn from")
    waiting: list[Example] = []
    epoch = 0
    while True:
        while len(waiting) < size:
            waiting += shuffled(random.Random(f"{seed} {epoch}"), examples)
            epoch += 1
        yield waiting[:size]
        del waiting[:size]


def _plain(split: tuple[Any, Any]) -> Decoder:
    decoder: Decoder = nnx.merge(*split)
    return decoder


def _accuracy(
    run: Finetune,
    split: tuple[Any, Any],
    tokenizer: ChatTokenizer,
    retriever: Retriever,
    questions: Sequence[Question],
) -> float:
    """The F1 of Standard RAG with a model as its reader, in percent."""
    reader = LocalLLM(*split, tokenizer, run.shapes)
    environment = Environment(NoSampler(), retriever, reader, tokenizer.count)
    result = evaluate(StandardRAG(run.style, run.top_k), questions, environment)
    return round(100 * result.mean(METRIC), 2)
