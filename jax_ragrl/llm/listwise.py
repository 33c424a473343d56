"""A listwise reranker: a frozen language model orders numbered passages (Sun et al. 2023).

The model replies with an order such as `3 > 1 > 2`. More passages than fit one prompt are ordered
in windows that slide from the last hits to the first, so that a relevant passage can rise through
all of them.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

import numpy as np

from jax_ragrl.errors import EffectError
from jax_ragrl.llm.base import FrozenLLM, ask
from jax_ragrl.retrieval.rerank import Pair
from jax_ragrl.runtime.dispatch import is_on_device
from jax_ragrl.text.prompts import user_turn
from jax_ragrl.text.words import word_spans
from jax_ragrl.types import LLMRequest, Passage, Sampling

STYLE = "listwise"
# Numbers with or without brackets, such as `[3] > [1]`.
CHAIN = re.compile(r"\[?\d+\]?(?:\s*>\s*\[?\d+\]?)+")
NUMBER = re.compile(r"\d+")
TOKENS_PER_PASSAGE = 8  # of the reply: a number, brackets and a sign


def parse_order(reply: str, count: int) -> list[int]:
    """Parses an order of `count` passages, from 0; a reply counts from 1.

    The longest chain of the reply is read, the last one of equal length. Passages that it leaves
    out follow in their former order; repeated and unknown numbers are ignored.
    """
    chains = [[int(n) for n in NUMBER.findall(chain)] for chain in CHAIN.findall(reply)]
    # A single number is the best passage.
    if not chains and (alone := NUMBER.fullmatch(reply.strip(" []\n."))):
        chains = [[int(alone[0])]]
    numbers = max(reversed(chains), key=len, default=[])
    return list(dict.fromkeys([*(n - 1 for n in numbers if 1 <= n <= count), *range(count)]))


def windows(count: int, width: int, stride: int) -> list[slice]:
    """Returns the windows over `count` places, from the last to the first, which starts at 0."""
    stops = range(count, min(width, count) - 1, -stride) if count > 1 else range(0)
    result = [slice(max(0, stop - width), stop) for stop in stops]
    # The distance of the first places from a window is rarely a multiple of the stride.
    return result if not result or result[-1].start == 0 else [*result, slice(0, width)]


@dataclasses.dataclass(frozen=True)
class ListwiseReranker:
    """Orders passages with a frozen language model; equal requests get equal replies.

    Fields:
      llm: the language model.
      width: passages per prompt, 20 in the paper.
      stride: 10 in the paper; less than `width`, so that windows overlap.
      words: words of each passage in the prompt, 300 in the paper's code.
    """

    llm: FrozenLLM
    width: int = 20
    stride: int = 10
    words: int = 300

    @property
    def on_device(self) -> bool:
        """Returns whether the language model computes on the devices of the run."""
        return is_on_device(self.llm)

    def scores_of(self, pairs: Sequence[Pair]) -> list[np.ndarray | EffectError]:
        """Returns the reciprocal ranks of each pair's passages, float32 [K], or an error."""
        orders: list[list[int] | EffectError] = [list(range(len(p))) for _, p in pairs]
        slides = [windows(len(passages), self.width, self.stride) for _, passages in pairs]
        for step in range(max(map(len, slides), default=0)):
            places = {q: s[step] for q, s in enumerate(slides) if step < len(s)}
            self._slide(pairs, orders, places)
        scores: list[np.ndarray | EffectError] = []
        for order in orders:
            if not isinstance(order, EffectError):
                score_K = np.zeros(len(order), np.float32)
                score_K[order] = 1.0 / np.arange(1, len(order) + 1)
            scores.append(order if isinstance(order, EffectError) else score_K)
        return scores

    def _slide(
        self,
        pairs: Sequence[Pair],
        orders: list[list[int] | EffectError],
        places: dict[int, slice],
    ) -> None:
        """Orders one window per query, in place; a query whose request failed gets the error."""
        live = [(q, order, w) for q, w in places.items() if isinstance(order := orders[q], list)]
        requests = [self._request(*pairs[q], order[window]) for q, order, window in live]
        replies = ask(self.llm, requests)
        for (q, order, window), reply in zip(live, replies, strict=True):
            if isinstance(reply, EffectError):
                orders[q] = reply
                continue
            numbers = order[window]
            order[window] = [numbers[n] for n in parse_order(reply, len(numbers))]

    def _request(
        self, query: str, passages: Sequence[Passage], numbers: Sequence[int]
    ) -> LLMRequest:
        lines = []
        for i, n in enumerate(numbers, start=1):
            title, text = passages[n].title, " ".join(passages[n].text.split())
            text = text[: max((end for _, end in word_spans(text)[: self.words]), default=0)]
            lines.append(f"[{i}] {title}: {text}" if title else f"[{i}] {text}")
        values = {"query": query, "passages": "\n".join(lines), "count": str(len(numbers))}
        sampling = Sampling(temperature=0.0, max_tokens=TOKENS_PER_PASSAGE * len(numbers))
        return LLMRequest("rerank", user_turn(STYLE, "order", **values), sampling)
