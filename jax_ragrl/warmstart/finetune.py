"""Supervised fine-tuning of the generator of a baseline: answers from retrieved passages.

Vanilla RAG + SFT, RetRobust and InstructRAG are the same run on three kinds of examples
(`systems/baselines/examples.py`). The result is a model directory for `ragrl evaluate --llm`, with
the system whose prompts are those of the examples.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import pathlib
import random
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from jax_ragrl.config.ranges import Count, Natural, Seed
from jax_ragrl.config.schema import build, one_of
from jax_ragrl.corpus.world import World
from jax_ragrl.errors import UserError
from jax_ragrl.learner.imitation import (
    Example,
    check_one_step_per_batch,
    example,
    imitate,
)
from jax_ragrl.learner.optimizer import Optimizer
from jax_ragrl.learner.packing import Layout
from jax_ragrl.learner.state import Policy, prepare, sampling_model, trained_decoder
from jax_ragrl.learner.update import LIKELIHOOD
from jax_ragrl.llm.kinds import LLM, WorldReaderConfig
from jax_ragrl.llm.local import LocalLLM
from jax_ragrl.models.config import TINY
from jax_ragrl.models.decoder import Decoder
from jax_ragrl.models.hf import save_decoder
from jax_ragrl.models.lora import merge_lora
from jax_ragrl.models.safetensors_io import weights_checksum
from jax_ragrl.models.split import SplitModel
from jax_ragrl.retrieval.base import Retriever, search_all
from jax_ragrl.retrieval.kinds import Index, VectorIndex
from jax_ragrl.rollout.collect import Environment
from jax_ragrl.run.config import Data
from jax_ragrl.run.data import load_data
from jax_ragrl.run.evaluate import NoSampler, evaluate
from jax_ragrl.run.index import index_folder, load_retriever
from jax_ragrl.run.load import with_default_index
from jax_ragrl.run.models import load_llm, load_policy, policy_folder
from jax_ragrl.runtime.jsonl import append_row, drop_after_step, last_row, write_json
from jax_ragrl.runtime.portable_random import shuffled
from jax_ragrl.runtime.progress import progress
from jax_ragrl.sampling.sampler import Shapes
from jax_ragrl.systems.baselines.examples import (
    ANSWER,
    ChatExample,
    rationale_examples,
    robust_examples,
    vanilla_examples,
)
from jax_ragrl.systems.baselines.instruct_rag import InstructRAG
from jax_ragrl.systems.baselines.standard import StandardRAG
from jax_ragrl.text.tokenizer import ChatTokenizer
from jax_ragrl.types import Passage, Question
from jax_ragrl.warmstart.unfinished import MODEL, claim_folder, open_unfinished, remove_unfinished

Item = TypeVar("Item")
METRIC = "f1"
DEPTH = 3  # RetRobust searches for 3 top_k passages; its low-ranked ones are distractors


@dataclasses.dataclass(frozen=True)
class Finetune:
    """The config of a fine-tuning run.

    Fields:
      examples: one of `EXAMPLES`.
      steps: number of optimizer steps.
      optimizer: learning rate and schedule.
      data, index: questions, corpus and retriever.
      policy: directory of the initial model.
      writer: writes the rationales of `explained` examples; in the paper, the initial model.
      style: prompt style.
      top_k: passages per question.
      batch_size: examples per step.
      save_every: steps between checkpoints for resuming; 0: none.
      test_questions: number of test questions for the evaluations before and after.
      shapes: batch shapes of generation; `max_new_tokens` also limits a local writer.
      packing: batch shapes of training.
      compute_dtype, remat: as in `run.config.Job`.
      seed: seed of orders and distractors.
    """

    examples: str
    steps: Count
    optimizer: Optimizer
    data: Data
    index: Index = VectorIndex()
    policy: str = TINY
    writer: LLM = WorldReaderConfig()
    style: str = "baselines_tiny"
    top_k: Count = 5
    batch_size: Count = 32
    save_every: Natural = 0
    test_questions: Natural = 300
    shapes: Shapes = Shapes()
    packing: Layout = Layout()
    compute_dtype: str = "float32"
    remat: str = "none"
    seed: Seed = 0

    def __post_init__(self) -> None:
        one_of("config.examples", self.examples, EXAMPLES)
        check_one_step_per_batch(self.optimizer)


def load_finetune(values: Mapping[str, Any]) -> Finetune:
    """Builds a run from the values of a config."""
    return build(Finetune, with_default_index(values))


# The system with the prompts of each kind of examples, from prompt style and `top_k`.
EXAMPLES: Mapping[str, Callable[[str, int], Any]] = {
    "vanilla": StandardRAG,
    "robust": StandardRAG,
    "explained": InstructRAG,
}


def build_examples(
    run: Finetune,
    questions: Sequence[Question],
    retriever: Retriever,
    passages: Sequence[Passage],
    world: World | None,
) -> list[ChatExample]:
    """Returns the examples of a run; `world` is set if the data are synthetic."""
    is_robust = run.examples == "robust"
    if is_robust and not passages:
        raise UserError(
            "examples robust needs a local corpus, from which it samples distractors: set "
            "data.files.corpus"
        )
    depth = DEPTH * run.top_k if is_robust else run.top_k
    results = search_all(retriever, [q.text for q in questions], depth)
    if is_robust:
        rng = random.Random(run.seed)
        return robust_examples(run.style, questions, results, passages, run.top_k, rng)
    if run.examples == "vanilla":
        return vanilla_examples(run.style, questions, results, run.top_k)
    writer = load_llm(run.writer, world, run.style, run.shapes)
    return rationale_examples(run.style, questions, results, run.top_k, writer)


def fine_tune(run: Finetune, out: pathlib.Path) -> dict[str, Any]:
    """Trains a generator, and evaluates it before and after; the same call resumes.

    Writes `out/checkpoint` (Hugging Face layout) and the metrics of every step to
    `out/metrics.jsonl`. Returns the content of `out/summary.json`. Accuracies are F1 in percent, of
    the system that belongs to the examples, with the model as its generator.

    Raises:
      UserError: `out` holds a finished model, or a run with other settings.
      Preempted: the process received SIGTERM; the last step is saved.
    """
    if (out / MODEL).exists():
        raise UserError(f"{out / MODEL} exists already: choose another --out")
    claim_folder(dataclasses.asdict(run), out)
    corpus, questions, world = load_data(run.data, index_folder(run.index, out), run.index)
    retriever = load_retriever(corpus, run.index, out)
    decoder, tokenizer = load_policy(run.policy)
    examples = build_examples(run, questions["train"], retriever, corpus.passages, world)
    test = questions["test"][: run.test_questions]
    before = _accuracy(run, SplitModel.from_model(decoder), tokenizer, retriever, test)
    policy = prepare_imitation(run, decoder, (ANSWER,), run.steps)

    def encode(item: ChatExample) -> Example:
        return example(tokenizer, *item)

    identity = identity_of(run.policy, examples)
    data = batches(examples, run.batch_size, run.seed)
    policy = train_supervised(policy, data, encode, run.steps, out, identity, run.save_every)
    after = _accuracy(run, sampling_model(policy), tokenizer, retriever, test)
    summary = {
        "rows": run.examples,
        "examples": len(examples),
        "steps": run.steps,
        "loss": last_row(out / "metrics.jsonl").get("loss"),
        "metric": "F1, percent",
        "questions": len(test),
        "accuracy": {"before": before, "after": after},
        "checkpoint": str(out / MODEL),
    }
    write_json(out / "summary.json", summary)
    save_finetuned(trained_decoder(policy), tokenizer, out)
    return summary


def prepare_imitation(run: Any, decoder: Decoder, roles: Sequence[str], steps: int) -> Policy:
    """Returns a policy that imitates actions of some roles; `run` is a config of `warmup sft`."""
    return prepare(
        decoder,
        objective=LIKELIHOOD,
        optimizer=run.optimizer,
        layout=run.packing,
        roles=roles,
        temperature=1.0,
        updates=steps,
        compute=run.compute_dtype,
        remat=run.remat,
    )


def train_supervised(
    policy: Policy,
    data: Iterator[Sequence[Item]],
    encode: Callable[[Item], Example],
    steps: int,
    out: pathlib.Path,
    identity: str,
    save_every: int = 0,
) -> Policy:
    """Trains a policy on batches of items; resumes from `out/unfinished` if it exists.

    The buffers of the policy are donated. Batches never end, and are encoded one by one, since the
    ids of all items may exceed the memory. Writes the metrics of `imitate` and `too_long`, the
    number of items longer than a row, to `out/metrics.jsonl`. The `identity` is that of
    `identity_of`.

    Raises:
      UserError: the finished steps are of another identity.
      Preempted: the process received SIGTERM; the last step is saved.
    """
    with open_unfinished(out, save_every) as unfinished, contextlib.ExitStack() as stack:
        start, state, entries = unfinished.restore(policy.state)
        if entries.get("identity", identity) != identity:
            raise UserError(
                f"{out} was begun with other examples or other weights of the policy, under the "
                "same names: restore them to resume, or choose another --out"
            )
        policy = policy._replace(state=state)
        drop_after_step(out / "metrics.jsonl", start)
        # Skipped batches are generated again, so that a resumed run sees the same batches.
        rest = itertools.islice(data, start, steps)
        bar = stack.enter_context(progress("fine-tune", "step", steps, initial=start))
        for step, batch in enumerate(rest, start + 1):
            begin, examples = time.perf_counter(), [encode(item) for item in batch]
            policy, metrics = imitate(policy, examples)
            seconds = {"time/step_s": round(time.perf_counter() - begin, 3)}
            longest = policy.spec.layout.row_lengths[-1]
            long = sum(len(e.prompt) + len(e.target) > longest for e in examples)
            row = {"step": step, **metrics, "too_long": long, **seconds}
            append_row(out / "metrics.jsonl", row)
            bar.update(1)
            unfinished.end_step(step, policy.state, lambda: {"identity": identity})
    return policy


def identity_of(policy: str, items: Sequence[Any]) -> str:
    """Returns a checksum of the weights of a policy and of examples, which one name may change."""
    crc = functools.reduce(lambda crc, item: zlib.crc32(repr(item).encode(), crc), items, 0)
    return f"{weights_checksum(policy_folder(policy))} {crc:08x}"


def save_finetuned(model: Decoder, tokenizer: ChatTokenizer, out: pathlib.Path) -> None:
    """Writes the model to `out/checkpoint`, its adapter merged, and removes `out/unfinished`."""
    plain = model if model.adapter is None else merge_lora(model)
    tokenizer.save(out / "tokenizer")
    # bfloat16 is the dtype of published models, and half the size on disk.
    save_decoder(plain, out / MODEL, out / "tokenizer", dtype="bfloat16")
    remove_unfinished(out)


def batches(items: Sequence[Item], size: int, seed: int) -> Iterator[list[Item]]:
    """Yields endless batches, which may span two passes; every pass has a new random order."""
    if not items:
        raise UserError(
            "there are no examples: no training question has an answer, or no rationale contains "
            "it; use other questions or another writer"
        )
    waiting: list[Item] = []
    epoch = 0
    while True:
        while len(waiting) < size:
            waiting += shuffled(random.Random(f"{seed} {epoch}"), items)
            epoch += 1
        yield waiting[:size]
        del waiting[:size]


def _accuracy(
    run: Finetune,
    model: SplitModel,
    tokenizer: ChatTokenizer,
    retriever: Retriever,
    questions: Sequence[Question],
) -> float:
    """Returns the F1, in percent, of the system of the examples, with a model as its generator."""
    reader = LocalLLM(model, tokenizer, run.shapes)
    environment = Environment(NoSampler(), retriever, reader, tokenizer.count)
    result = evaluate(EXAMPLES[run.examples](run.style, run.top_k), questions, environment)
    return round(100 * result.mean(METRIC), 2)
