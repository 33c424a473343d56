"""The data types that all modules share, and the letters that name array axes.

Axes are suffixes of array names: `logits_BLV` has the axes B, L and V.
  B questions or prompts   N nodes of a forest        A actions             Z roles, or groups
  R rows, or rollouts      L places in a row, leaves  M scored tokens of a row
  P tokens of a prompt     T tokens of an action      V vocabulary          S key positions
  Q questions or queries   X passages of a corpus     K passages or siblings, in a model KV heads
  D width                  H heads, or hosts          G heads of a KV head  F features of a head
  C conversations, or tokens of a chunk               W rows after a prefix, or devices
  I, J blocks of queries, of keys                     1 an axis of that size, to broadcast
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

# The end of a chunk's id: characters of the passage that was divided, as in RFC 5147.
CHUNK = re.compile(r"[#&]char=[0-9]+,[0-9]+$")
# The place in a document, after the path of its file (`corpus.formats.documents`). The suffix
# distinguishes it from the id of a data set that happens to contain a number sign.
PLACE = re.compile(r"(\.(?:txt|md|html?|pdf))#.*", re.IGNORECASE | re.DOTALL)

# A NumPy array while a batch is built on the host, and a JAX array in a jitted step.
Tensor = Any


class Passage(NamedTuple):
    """A retrievable unit of text."""

    id: str
    title: str
    text: str

    @property
    def names(self) -> set[str]:
        """The names by which gold may refer to it.

        These are its id, its title, for a chunk the id of the passage that was divided
        (`corpus.chunks`), and for a part of a document the path of the file.
        """
        names = {self.id, self.title}
        if "#" in self.id:
            whole = CHUNK.sub("", self.id)
            names |= {whole, PLACE.sub(r"\1", whole)}
        return names


@dataclasses.dataclass(frozen=True)
class Question:
    """A question with its gold answers.

    Fields:
      id: unique within a data set.
      text: the question.
      answers: all correct answers.
      gold: the supporting passages, by passage id or, if the data set has no ids, by title; in the
        order of the hops if the data set has one.
      steps: the decomposition, one sub-question per hop; `#1` stands for the first answer.
      hops: how many facts the answer combines; 0 if unknown.
      kind: the type of the question, as the data set names it.
      metadata: other fields of the data set.
    """

    id: str
    text: str
    answers: tuple[str, ...]
    gold: tuple[str, ...] = ()
    steps: tuple[str, ...] = ()
    hops: int = 0
    kind: str = ""
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class Hits(NamedTuple):
    """The result of one search, best first; `passages` and `scores` have equal length."""

    passages: tuple[Passage, ...]
    scores: tuple[float, ...]


class Message(NamedTuple):
    """One chat message; `role` is system, user or assistant."""

    role: str
    content: str


class Sampling(NamedTuple):
    """Sampling parameters. Temperature 0 is greedy; `max_tokens` limits the new tokens."""

    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int = 64


class LLMRequest(NamedTuple):
    """One call to a frozen language model. Equal requests (seed included) get equal replies."""

    purpose: str
    messages: tuple[Message, ...]
    sampling: Sampling = Sampling(temperature=0.0)
    seed: int = 0
