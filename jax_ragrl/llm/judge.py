"""A language model that grades answers, as in C-3PO's reward and evaluation."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from jax_ragrl.errors import EffectError
from jax_ragrl.json_text import loads_or_none
from jax_ragrl.llm.base import FrozenLLM, ask
from jax_ragrl.text.prompts import user_turn
from jax_ragrl.types import LLMRequest, Message, Question

# Names of the verdict in JSON and before a colon; the second ones count without one of the first.
_NAMES = ("verdict|judge?ment|grade|correctness|(?:is_?)?correct", "answer|result|decision|label")
_MARKUP = re.compile(r"</?\w+>|\\(?:boxed|text\w*)|[*_`#>\"“”‘{}$\[\]]|(?<!\w)'|'(?!\w)")
# "the answer is", "this isn't", but not "the correct answer is".
_SUBJECT = (
    r"(?:(?:so|thus|therefore|hence),?\s+)?(?:it|this|that|(?:the|this)\s+"
    r"(?:(?!true|correct|right|reference|gold|expected|actual)\w+\s+){1,6}?)\s*(?:is|was|'s)"
)
_CLAIM = re.compile(
    rf"(?:(?P<subject>{_SUBJECT})\s*)?(?P<not>not\s+|n't\s+)?"
    r"(?:(?:clearly|definitely|certainly|entirely|completely|fully|absolutely|actually)\s+)?"
    r"(?:(?P<right>true|correct|(?(subject)(?!)|yes))|false|untrue|incorrect|wrong|"
    r"(?(subject)(?!)|no))\b"
    # A noun ("correct answer: .."), a choice ("true or false") and a question are no verdict.
    r"(?=\s*(?:$|[.,;:!()\n–—]|-+\s|(?:because|since|as|it|this|the|given)\b))",
    re.IGNORECASE,
)


def grade_answers(
    judge: FrozenLLM, questions: Sequence[Question], answers: Sequence[str | None]
) -> np.ndarray:
    """Returns the grades of answers by a language model, one answer or None per question.

    They are float64 `[Q]`: 1 for a right answer, 0 for a wrong one (None is wrong without a
    request), nan if the judge gave no verdict. Equal requests are sent once.
    """
    verdicts = judge_answers(judge, questions, answers)
    return np.array([np.nan if isinstance(v, EffectError) else v for v in verdicts], np.float64)


def judge_answers(
    judge: FrozenLLM, questions: Sequence[Question], answers: Sequence[str | None]
) -> list[float | EffectError]:
    """Returns 1 or 0 per answer, or the reason why there is no verdict; see `grade_answers`.

    A judge whose reply has no verdict is asked once more, for one word.
    """
    requests: list[LLMRequest | None] = []
    for question, answer in zip(questions, answers, strict=True):
        values = {"question": question.text, "answers": " | ".join(question.answers)}
        prompt = user_turn("judge", "judge", **values, prediction=answer or "")
        requests.append(LLMRequest("judge", prompt) if answer else None)
    distinct = list(dict.fromkeys(request for request in requests if request is not None))
    replies = ask(judge, distinct)
    replied = dict(zip(distinct, replies, strict=True))
    unread = [request for request, reply in replied.items() if _verdict(reply) is None]
    if unread:
        # A greedy model would answer an equal request with an equal reply.
        order = user_turn("judge", "again")
        # Templates may refuse an empty turn.
        turns = [Message("assistant", str(replied[r]).strip() or "...") for r in unread]
        further = [
            request._replace(messages=(*request.messages, turn, *order))
            for request, turn in zip(unread, turns, strict=True)
        ]
        again = ask(judge, further)
        replied |= dict(zip(unread, again, strict=True))
    verdicts = {request: _verdict(reply) for request, reply in replied.items()}
    return [
        0.0
        if request is None
        else EffectError(f"no verdict, also when asked again: {replied[request]!r:.100}")
        if (verdict := verdicts[request]) is None
        else verdict
        for request in requests
    ]


def read_verdict(reply: str) -> bool | None:
    """Reads the verdict of a judge; None if there is none, or two that contradict each other.

    A reply is JSON with a field such as `verdict`, or a text that begins with a verdict, has a line
    such as "Verdict: True", or a last line that is a verdict. It has no thoughts.
    """
    found = loads_or_none(reply[reply.find("{") : reply.rfind("}") + 1])
    if isinstance(found, dict):
        for names in _NAMES:
            values = [v for k, v in found.items() if re.fullmatch(names, k.strip(), re.I)]
            if values:
                return _agreed([_field(value) for value in values])
    text = _MARKUP.sub("", reply.replace("’", "'")).strip()
    labeled: list[bool | None] = []
    for names in _NAMES:
        label = (
            rf"^[^\w\n]*(?:(?:my|the|final|overall)\s+)*(?:{names})\s*(?:is\b:?|[:=\n]|[-–—]+\s)"
        )
        values = [_claim(text[m.end() :]) for m in re.finditer(label, text, re.I | re.M)]
        labeled = labeled if set(labeled) - {None} else values
    last = _claim(text.rpartition("\n")[2].rstrip(".! "), whole=True)
    claims = [_claim(text), *labeled, last]
    sentences = [_claim(part, whole=True) for part in re.split(r"[\n.,;!?]+", text)]
    # Another sentence may contradict a verdict, but alone it may be about anything.
    return None if set(claims) == {None} else _agreed(claims + sentences)


def _claim(text: str, *, whole: bool = False) -> bool | None:
    """Returns what the beginning of a text claims, or the whole text; None if it is no claim."""
    claim = (_CLAIM.fullmatch if whole else _CLAIM.match)(text.strip())
    return None if claim is None else bool(claim["right"]) != bool(claim["not"])


def _field(value: Any) -> bool | None:
    """Returns the verdict that a value of a JSON object is."""
    if isinstance(value, str):
        return _claim(_MARKUP.sub("", value))
    return bool(value) if value in (0, 1) else None


def _agreed(claims: Sequence[bool | None]) -> bool | None:
    distinct = set(claims) - {None}
    return distinct.pop() if len(distinct) == 1 else None


def _verdict(reply: str | EffectError) -> float | EffectError | None:
    if isinstance(reply, EffectError):
        return reply
    verdict = read_verdict(reply)
    return None if verdict is None else float(verdict)
