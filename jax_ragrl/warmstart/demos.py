"""Demonstrations: actions worth imitating, one a line of a file, and a policy that learns them.

    {"question": ID, "role": ROLE, "prompt": [{"role": "user", "content": ...}], "reply": ...}

`ragrl demos` writes such files (`make_demos.py`), anyone else may: a prompt is the messages of a
chat, or the text of one. What a file holds is text, so that any policy can learn it.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from flax import nnx

from jax_ragrl.config.schema import build
from jax_ragrl.config.snapshot import settle
from jax_ragrl.corpus.formats.files import Record, field, read_records
from jax_ragrl.errors import UserError
from jax_ragrl.learner.imitation import IMITATION, Example
from jax_ragrl.learner.optimizer import Optimizer
from jax_ragrl.learner.packing import Layout
from jax_ragrl.learner.state import prepare, trained
from jax_ragrl.models.lora import LoRAConfig, add_lora
from jax_ragrl.rollout.context import context_ids, written_ids
from jax_ragrl.rollout.effects import Said, Segment, Told
from jax_ragrl.run.components import load_policy
from jax_ragrl.run.config import TINY
from jax_ragrl.runtime.jsonl import write_json
from jax_ragrl.runtime.sharding import make_mesh
from jax_ragrl.text.tokenizer import ChatTokenizer
from jax_ragrl.types import Message
from jax_ragrl.warmstart.finetune import batches, finish, learn


class Demo(NamedTuple):
    """An action of a role on a question: what it read, what it wrote, and what that earned.

    Without `chat` what follows the first assistant's message in `prompt` is plain text, see
    `roles.Role`.
    """

    question: str
    role: str
    prompt: tuple[Message, ...]
    reply: str
    reward: float = 1.0
    chat: bool = True

    def row(self) -> dict[str, Any]:
        """The demonstration as a row of a file."""
        row = self._asdict() | {"prompt": [message._asdict() for message in self.prompt]}
        return {k: v for k, v in row.items() if k != "chat" or not v}

    def example(self, tokenizer: ChatTokenizer) -> Example:
        """Its ids, those that a rollout with this context and action has."""
        said = (i for i, message in enumerate(self.prompt) if message.role == "assistant")
        first = next(said, len(self.prompt))
        after = [_segment(tokenizer, message, self.chat) for message in self.prompt[first:]]
        prompt = context_ids(tokenizer, self.prompt[:first], after, self.chat)
        return Example(prompt, written_ids(tokenizer, self.reply, self.chat), self.role)


def _segment(tokenizer: ChatTokenizer, message: Message, chat: bool) -> Segment:
    if message.role == "assistant":
        return Said(written_ids(tokenizer, message.content, chat))
    return Told(message.content)


def load_demos(file: pathlib.Path | str, roles: Sequence[str] = ()) -> list[Demo]:
    """The demonstrations of some roles, or of all; `UserError` where there are none."""
    demos = [_demo(record) for record in read_records(file)]
    chosen = [demo for demo in demos if not roles or demo.role in roles]
    if not chosen:
        held = ", ".join(sorted({demo.role for demo in demos})) or "nothing"
        wanted = ", ".join(roles) or "any role"
        raise UserError(
            f"{file} holds demonstrations of {held}, but those of {wanted} are to be learnt: name "
            "another file in data.demos, or write some with 'ragrl demos'"
        )
    return chosen


def _demo(record: Record) -> Demo:
    role, reply = field(record, "role", str), field(record, "reply", str)
    row = {"question": "", "reward": 1.0, "chat": True, **record.fields}
    said = row.get("prompt")
    try:
        turns = [{"role": "user", "content": said}] if isinstance(said, str) else said
        prompt = tuple(Message(str(turn["role"]), str(turn["content"])) for turn in turns or ())
    except (KeyError, TypeError):
        prompt = ()
    if not prompt:
        raise UserError(f"{record.place}: 'prompt' is neither a text nor messages: make it one")
    return Demo(str(row["question"]), role, prompt, reply, row["reward"], row["chat"])


# --- Learning them --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Taught:
    """A file of demonstrations, and the `roles` whose are learnt; empty: all."""

    demos: str
    roles: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class WarmStart:
    """A supervised run of a policy; the fields are the keys and sections of its config.

    A step is `batch` demonstrations, and a run sees each `epochs` times. With `lora` an adapter is
    trained, and merged in the end. Every `save_every` steps (0: never) the run is saved, to go on
    from there. `mesh`, `compute` and `remat` are as in `job.Job`.
    """

    data: Taught
    optimizer: Optimizer
    policy: str = TINY
    epochs: int = 3
    batch: int = 512
    save_every: int = 0
    lora: LoRAConfig | None = None
    layout: Layout = Layout()
    mesh: tuple[int, ...] = ()
    compute: str = "float32"
    remat: str = "none"
    seed: int = 0


def load_warm_start(values: Mapping[str, Any]) -> WarmStart:
    """A run from the values of a config."""
    return build(WarmStart, values)


def warm_start(run: WarmStart, out: pathlib.Path) -> dict[str, Any]:
    """Trains a policy on demonstrations: `out/checkpoint` (Hugging Face layout) is the policy that
    `ragrl train` begins with, `out/metrics.jsonl` the curve.

    Returns what it writes to `out/summary.json`. The same run goes on from where it was saved;
    `UserError` where `out` holds a model already, or another run.
    """
    if (out / "checkpoint").exists():
        raise UserError(f"{out / 'checkpoint'} is there already: give another --out")
    demos = load_demos(run.data.demos, run.data.roles)
    settle(out / "config.json", dataclasses.asdict(run) | {"demos": len(demos)}, place="--out")
    counts = collections.Counter(demo.role for demo in demos)
    steps = -(-run.epochs * len(demos) // run.batch)
    policy, tokenizer = load_policy(run.policy, make_mesh(run.mesh) if run.mesh else None)
    if run.lora is not None:
        policy = add_lora(policy, run.lora, rngs=nnx.Rngs(run.seed))
    choices = (IMITATION, run.optimizer, run.layout, sorted(counts), 1.0, steps)
    trainer, models = prepare(policy, *choices, compute=run.compute, remat=run.remat)
    del policy
    encode = functools.partial(Demo.example, tokenizer=tokenizer)
    drawn = batches(demos, run.batch, run.seed)
    models, _ = learn(trainer, models, drawn, encode, steps, out, run.save_every)
    finish(trained(trainer, models), tokenizer, out)
    summary = {
        "demos": len(demos),
        "roles": dict(sorted(counts.items())),
        "steps": steps,
        **_course(out / "metrics.jsonl"),
        "checkpoint": str(out / "checkpoint"),
    }
    write_json(out / "summary.json", summary)
    return summary


def _course(file: pathlib.Path) -> dict[str, Any]:
    """The loss of the first and of the last step, and how often a demonstration was too long."""
    rows = [record.fields for record in read_records(file)]
    losses = [row["loss"] for row in rows if "loss" in row]
    first, last = (losses[0], losses[-1]) if losses else (None, None)
    return {"loss": {"first": first, "last": last}, "too_long": sum(r["too_long"] for r in rows)}
