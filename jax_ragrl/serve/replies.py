"""What is served, and what becomes of the questions of a rollout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from jax_ragrl.errors import EffectError, UserError
from jax_ragrl.rollout.collect import Environment
from jax_ragrl.rollout.system import System
from jax_ragrl.rollout.trace import end, failure, steps
from jax_ragrl.run.inference import answered


class Served(NamedTuple):
    """A system under its inference algorithm, and what it acts on.

    `name` is the model's name in the OpenAI form, `policy` says where the weights are from, and
    `warm` is a question that is asked before any other, to compile what most questions need.
    """

    name: str
    policy: str
    system: System
    environment: Environment
    warm: str


class Reply(NamedTuple):
    """What became of a question. `answer` is None where the rollout ended without one: `why`."""

    answer: str | None
    why: str
    steps: list[dict[str, Any]]
    tokens: tuple[int, int]  # of the question and of the answer


def replies(served: Served, texts: Sequence[str]) -> list[Reply | Exception]:
    """A reply a text, in order, or what failed of its environment."""
    forest = answered(served.system, served.environment, texts)
    number = {question.text: i for i, question in enumerate(forest.questions)}

    def reply(text: str) -> Reply | Exception:
        i, count = number[text], served.environment.count
        if i in forest.failed:
            return EffectError(failure(forest, i))
        leaf = end(forest, i)
        tokens = (count(text), count(leaf.answer or ""))
        return Reply(leaf.answer, leaf.why, steps(forest, i), tokens)

    return [reply(text) for text in texts]


def told(text: str, reply: Reply | BaseException, trace: bool) -> dict[str, Any]:
    """What became of a question as values that `json.dumps` takes; its steps with `trace`."""
    if isinstance(reply, BaseException):
        return {"question": text, "answer": None, "error": reason(reply)}
    told = {"question": text, "answer": reply.answer, "why": reply.why}
    return told | ({"steps": reply.steps} if trace else {})


def reason(error: BaseException | None) -> str:
    """The message of an expected error; any other is named."""
    expected = isinstance(error, EffectError | UserError)
    return str(error) if expected else f"{type(error).__name__}: {error}"
