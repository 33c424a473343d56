"""Answers of a served system, as values for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from jax_ragrl.errors import EffectError, UserError
from jax_ragrl.rollout.collect import Environment
from jax_ragrl.rollout.system import System
from jax_ragrl.rollout.trace import failure_of, final_leaf, transcript_steps
from jax_ragrl.run.inference import roll_out_texts
from jax_ragrl.types import Passage


class ServedSystem(NamedTuple):
    """A system with its inference algorithm and environment.

    Fields:
      name: name of the model in the OpenAI API.
      policy: source of the weights, for `/health`.
      system: the system that answers questions.
      environment: sampler, retriever and frozen language model.
      warmup_question: is answered before any other, to compile the most frequent programs.
    """

    name: str
    policy: str
    system: System
    environment: Environment
    warmup_question: str


class Answer(NamedTuple):
    """The answer to a question; without an answer, `answer` is None and `finish_reason` says why.

    `steps` is the transcript; `tokens` are the lengths of the question and of the answer;
    `passages` are those that its searches returned, in order.
    """

    answer: str | None
    finish_reason: str
    steps: list[dict[str, Any]]
    tokens: tuple[int, int]
    passages: tuple[Passage, ...]


def answer_questions(served_system: ServedSystem, texts: Sequence[str]) -> list[Answer | Exception]:
    """One answer per text, in order; an exception if the environment failed on the question."""
    forest = roll_out_texts(served_system.system, served_system.environment, texts)
    # A repeated text is rolled out once, so positions in `texts` differ from question numbers.
    number = {question.text: i for i, question in enumerate(forest.questions)}

    def answer_of(text: str) -> Answer | Exception:
        i, count = number[text], served_system.environment.count
        if i in forest.failed_questions:
            return EffectError(failure_of(forest, i))
        leaf = final_leaf(forest, i)
        tokens = (count(text), count(leaf.answer or ""))
        # A passage that several searches returned is listed once.
        passages = tuple(dict.fromkeys(p for call in leaf.calls for p in call.passages))
        steps = transcript_steps(forest, i)
        return Answer(leaf.answer, leaf.finish_reason, steps, tokens, passages)

    return [answer_of(text) for text in texts]


def to_json(
    text: str, answer: Answer | BaseException, trace: bool, passages: bool
) -> dict[str, Any]:
    """The answer or failure of a question as JSON values, with steps and passages if wanted."""
    if isinstance(answer, BaseException):
        return {"question": text, "answer": None, "error": error_message(answer)}
    values = {"question": text, "answer": answer.answer, "why": answer.finish_reason}
    steps = {"steps": answer.steps} if trace else {}
    read = {"passages": [x._asdict() for x in answer.passages]} if passages else {}
    return {**values, **steps, **read}


def error_message(error: BaseException | None) -> str:
    """The message of an expected error; for any other, its type and message."""
    # Expected errors are written for users; others need their type to be understood.
    is_expected = isinstance(error, EffectError | UserError)
    return str(error) if is_expected else f"{type(error).__name__}: {error}"
