"""Reads passages with the gold of a question: which are useful, and which answer they contain."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from jax_ragrl.text.metrics import cover_match_tokens
from jax_ragrl.types import Passage, Question

MAX_QUOTE_WORDS = 20
_SENTENCE = re.compile(r"(?<=[.!?])\s+")
# Words of questions that say nothing about a topic.
_QUESTION_WORDS = frozenset(
    "a an and are as at by did do does for from had has have how in is it its of on or that the "
    "there this to was were what when where which who whom whose why will with".split()
)


class Evidence(NamedTuple):
    """The knowledge of a labeler about a question.

    `passages` are those that a search for the text of the question returns; `is_known` says whether
    the frozen language model answers it right without passages; `titles` are those of the gold
    passages of the corpus, by the names in `question.gold`.
    """

    question: Question
    passages: tuple[Passage, ...] = ()
    is_known: bool = False
    titles: Mapping[str, str] = {}

    @property
    def takes_several_searches(self) -> bool:
        """Whether a search for the question finds some, or none, of several gold passages."""
        gold = self.question.gold
        return len(gold) > 1 and len(self.missing(self.passages)) > 0

    def missing(self, passages: Sequence[Passage]) -> tuple[str, ...]:
        """Returns the names of the gold passages that are not among some passages."""
        found = {name for passage in passages for name in passage.names}
        return tuple(name for name in self.question.gold if name not in found)

    def missing_title(self, passages: Sequence[Passage], searched: Collection[str] = ()) -> str:
        """Returns the title of a missing gold passage to search for next; or ''.

        It is named by the question or one of the passages: a title that no text names cannot be
        known without the gold. It is not one of `searched`, the queries so far.
        """
        known = " ".join([self.question.text, *(p.text for p in passages)])
        titles = (self.titles.get(name, "") for name in self.missing(passages))
        named = (t for t in titles if t and t not in searched and cover_match_tokens(known, (t,)))
        return next(named, "")


def useful_numbers(question: Question, passages: Sequence[Passage]) -> tuple[int, ...]:
    """Returns the numbers, from 1, of the passages to read.

    These are the gold passages. Without one of them it is the first passage with an answer.
    """
    gold = {*question.gold}
    numbers = [i for i, p in enumerate(passages, 1) if gold & p.names]
    answering = [i for i, p in enumerate(passages, 1) if answer_in(question, [p])]
    return tuple(numbers or answering[:1])


def answer_in(question: Question, passages: Sequence[Passage]) -> str:
    """Returns the shortest gold answer that occurs in a passage as whole words; or ''."""
    texts = [passage.text for passage in passages]
    answers = sorted(filter(None, question.answers), key=len)
    return next((a for a in answers if any(cover_match_tokens(t, (a,)) for t in texts)), "")


def quote(answer: str, passages: Sequence[Passage]) -> str:
    """Returns the first words of the first sentence with an answer, up to `MAX_QUOTE_WORDS`.

    If the answer is beyond these words, the words end with the answer instead.
    """
    sentences = (s for p in passages for s in _SENTENCE.split(" ".join(p.text.split())))
    words = next((s for s in sentences if cover_match_tokens(s, (answer,))), answer).split()
    head = " ".join(words[:MAX_QUOTE_WORDS])
    if cover_match_tokens(head, (answer,)):
        return head
    ends = range(MAX_QUOTE_WORDS, len(words) + 1)
    windows = (" ".join(words[end - MAX_QUOTE_WORDS : end]) for end in ends)
    return next((w for w in windows if cover_match_tokens(w, (answer,))), answer)


def keywords(text: str) -> str:
    """Returns a text without common words, as another query; unchanged if nothing else remains."""
    words = [word for word in text.split() if word.lower().strip("?,.") not in _QUESTION_WORDS]
    return " ".join(words) or text
