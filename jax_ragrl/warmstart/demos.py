"""Demonstrations: a JSONL format for actions to imitate, and supervised training on them.

    {"question": ID, "role": ROLE, "prompt": [{"role": "user", "content": ...}], "reply": ...}

`ragrl warmup demos` (`make_demos.py`) or any other program writes such files. A prompt is a list of
chat messages, or a string. Files hold text instead of token ids, so that any policy can learn from
them.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from flax import nnx

from jax_ragrl.config.ranges import Count, MeshSizes, Natural, Seed
from jax_ragrl.config.schema import build
from jax_ragrl.corpus.formats.files import Record, field, read_records
from jax_ragrl.errors import UserError
from jax_ragrl.learner.imitation import Example, check_one_step_per_batch
from jax_ragrl.learner.optimizer import Optimizer
from jax_ragrl.learner.packing import Layout
from jax_ragrl.learner.state import trained_decoder
from jax_ragrl.models.config import TINY
from jax_ragrl.models.lora import LoRAConfig, add_lora
from jax_ragrl.rollout.context import action_ids, context_ids
from jax_ragrl.rollout.effects import ModelOutput, Observation
from jax_ragrl.run.models import load_policy, mesh_of_shape
from jax_ragrl.runtime.jsonl import write_json
from jax_ragrl.text.tokenizer import ChatTokenizer
from jax_ragrl.types import Message
from jax_ragrl.warmstart.finetune import (
    batches,
    identity_of,
    prepare_imitation,
    save_finetuned,
    train_supervised,
)
from jax_ragrl.warmstart.unfinished import MODEL, claim_folder


class Demo(NamedTuple):
    """One demonstrated action: the `reply` of a role to the conversation `prompt`.

    Fields:
      question: id of the question; may be empty.
      reward: its reward, for information.
      chat: False if everything after the first assistant message of `prompt` is plain text instead
        of chat turns, see `roles.Role`.
    """

    question: str
    role: str
    prompt: tuple[Message, ...]
    reply: str
    reward: float = 1.0
    chat: bool = True

    def row(self) -> dict[str, Any]:
        """Returns the demonstration as a JSON object."""
        row = self._asdict() | {"prompt": [message._asdict() for message in self.prompt]}
        return {k: v for k, v in row.items() if k != "chat" or not v}

    def example(self, tokenizer: ChatTokenizer) -> Example:
        """Encodes the demonstration to the same ids as in a rollout."""
        # Up to the first reply the prompt is a chat; later turns have the format of the role.
        replies = (i for i, message in enumerate(self.prompt) if message.role == "assistant")
        first = next(replies, len(self.prompt))
        history = [
            ModelOutput(action_ids(tokenizer, message.content, self.chat))
            if message.role == "assistant"
            else Observation(message.content)
            for message in self.prompt[first:]
        ]
        prompt = context_ids(tokenizer, self.prompt[:first], history, self.chat)
        return Example(prompt, action_ids(tokenizer, self.reply, self.chat), self.role)


def load_demos(file: pathlib.Path | str, roles: Sequence[str] = ()) -> list[Demo]:
    """Loads the demonstrations of some roles, or of all; raises `UserError` if there are none."""
    demos = [_demo(record) for record in read_records(file)]
    matches = [demo for demo in demos if not roles or demo.role in roles]
    if not matches:
        roles_of_file = ", ".join(sorted({demo.role for demo in demos})) or "nothing"
        names = ", ".join(roles) or "any role"
        raise UserError(
            f"{file} has demonstrations of {roles_of_file}, but none of {names}: choose another "
            "file in data.demos, or generate one with 'ragrl warmup demos'"
        )
    return matches


def _demo(record: Record) -> Demo:
    role, reply = field(record, "role", str), field(record, "reply", str)
    # Parquet has every field in every row: null where the row has none.
    given = {name: value for name, value in record.fields.items() if value is not None}
    row = {"question": "", "reward": 1.0, "chat": True, **given}
    content = row.get("prompt")
    # The file may come from any program, so anything may be in place of the messages.
    try:
        messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
        prompt = tuple(Message(m["role"], m["content"]) for m in messages or ())
    except (KeyError, TypeError):
        prompt = ()
    if not prompt or not all(isinstance(text, str) for message in prompt for text in message):
        raise UserError(
            f"{record.place}: 'prompt' is neither a string nor a list of messages, whose role and "
            "content are strings: correct it"
        )
    chat = field(Record(record.place, row), "chat", bool)
    return Demo(str(row["question"]), role, prompt, reply, row["reward"], chat)


# --- Training -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class DemoData:
    """The demonstrations to learn from.

    Fields:
      demos: the file of demonstrations that `ragrl warmup demos` wrote.
      roles: the roles to train; empty: all.
    """

    demos: str
    roles: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class WarmStart:
    """The config of supervised training on demonstrations.

    Fields:
      data: the demonstrations.
      optimizer: learning rate and schedule.
      policy: directory of the initial policy.
      epochs: how often each demonstration is used.
      steps: the number of steps, in place of `epochs`; 0: from the epochs.
      batch_size: demonstrations per step.
      save_every: steps between checkpoints for resuming; 0: none.
      lora: trains an adapter, which is merged at the end.
      packing: batch shapes.
      mesh, compute_dtype, remat: as in `run.config.Job`.
      seed: seed of the order of demonstrations and of a new adapter.
    """

    data: DemoData
    optimizer: Optimizer
    policy: str = TINY
    epochs: Count = 3
    steps: Natural = 0
    batch_size: Count = 512
    save_every: Natural = 0
    lora: LoRAConfig | None = None
    packing: Layout = Layout()
    mesh: MeshSizes = ()
    compute_dtype: str = "float32"
    remat: str = "none"
    seed: Seed = 0

    def __post_init__(self) -> None:
        check_one_step_per_batch(self.optimizer)


def load_warm_start(values: Mapping[str, Any]) -> WarmStart:
    """Builds a run from the values of a config."""
    return build(WarmStart, values)


def warm_start(run: WarmStart, out: pathlib.Path) -> dict[str, Any]:
    """Trains a policy on demonstrations; the same call resumes an interrupted run.

    Writes `out/checkpoint` (Hugging Face layout), from which `ragrl train` can start, and the
    metrics of every step to `out/metrics.jsonl`. Returns the content of `out/summary.json`.

    Raises:
      UserError: `out` holds a finished model, or a run with other settings.
      Preempted: the process received SIGTERM; the last step is saved.
    """
    if (out / MODEL).exists():
        raise UserError(f"{out / MODEL} exists already: choose another --out")
    demos = load_demos(run.data.demos, run.data.roles)
    # The number of demonstrations is part of the config: a longer file is another run.
    claim_folder(dataclasses.asdict(run) | {"demos": len(demos)}, out)
    counts = collections.Counter(demo.role for demo in demos)
    steps = run.steps or -(-run.epochs * len(demos) // run.batch_size)  # rounded up
    decoder, tokenizer = load_policy(run.policy, mesh_of_shape(run.mesh, [run.policy]))
    if run.lora is not None:
        decoder = add_lora(decoder, run.lora, rngs=nnx.Rngs(run.seed))
    policy = prepare_imitation(run, decoder, sorted(counts), steps)
    del decoder  # frees the weights that training does not share
    encode = functools.partial(Demo.example, tokenizer=tokenizer)
    data = batches(demos, run.batch_size, run.seed)
    identity = identity_of(run.policy, demos)
    policy = train_supervised(policy, data, encode, steps, out, identity, run.save_every)
    rows = [record.fields for record in read_records(out / "metrics.jsonl")]
    losses = [row["loss"] for row in rows if "loss" in row] or [None]
    summary = {
        "demos": len(demos),
        "roles": dict(sorted(counts.items())),
        "steps": steps,
        "loss": {"first": losses[0], "last": losses[-1]},
        "too_long": sum(row["too_long"] for row in rows),
        "checkpoint": str(out / MODEL),
    }
    write_json(out / "summary.json", summary)
    # Last: a folder with a model is finished, and the same command refuses it.
    save_finetuned(trained_decoder(policy), tokenizer, out)
    return summary
