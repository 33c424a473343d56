"""Division of long passages into chunks: whole sentences, with overlap, each with the title.

Sizes are in units of the model that reads the passages: tokens of an encoder, or words. A chunk is
an exact part of the text, and its id is that of the passage with the place of the part in it, as a
fragment of RFC 5147: `guide.md#char=0,812`, `a.pdf#page=3&char=812,1604`.
"""

from __future__ import annotations

import bisect
import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from jax_ragrl.config.ranges import Count, Natural
from jax_ragrl.errors import UserError
from jax_ragrl.text.words import UNSPACED, Span, word_spans
from jax_ragrl.types import Passage

# The white space after a sentence. A period after an initial or an abbreviation ends none, nor one
# before a small letter; a line break always does. CJK sentences have no white space between them.
ABBREVIATIONS = "Mr|Mrs|Ms|Dr|Prof|Sr|Jr|St|vs|No|Fig|Eq|cf|al|[A-Z]"
SENTENCE_END = re.compile(
    r"\n\s*"
    r"|(?<=[.!?\u2026])[\"'\u2019\u201d)\]]*\s+(?![a-z])"
    r"|(?<=[\u3002\uff01\uff1f\uff61\u17d4\u104b])[\u300d\u300f\u201d\u2019\uff09]*\s*"
)
ABBREVIATION = re.compile(rf"(?:^|[\s(])(?:{ABBREVIATIONS})\.$")


class Units(NamedTuple):
    """The units of a model in which sizes are measured."""

    name: str  # the encoder whose tokens these are, or `words`; a part of a cache's identity
    spans: Callable[[str], Sequence[Span]]  # the characters of each unit of a text, in order
    reserved_units: int = 0  # that the model adds to each passage, such as special tokens
    limit: int = 0  # units of a passage that the model reads; later ones are cut; 0: all

    def size(self, passage: Passage) -> int:
        """Returns the size of a passage with its title."""
        return self.reserved_units + sum(len(self.spans(text)) for text in passage[1:])


WORDS = Units("words", word_spans)


@dataclasses.dataclass(frozen=True)
class Chunks:
    """The division of long passages into chunks that end with a sentence; see `corpus.chunks`.

    Fields:
      size: the maximum size of a chunk with its title: tokens of the encoder of the index, or
        words for an index without one. Shorter passages stay whole.
      overlap: the maximum size of the sentences that a chunk repeats from the one before it.
    """

    size: Count = 200
    overlap: Natural = 40

    def __post_init__(self) -> None:
        if not 0 <= self.overlap < self.size:
            raise UserError(
                f"data.chunk.size is {self.size} and data.chunk.overlap {self.overlap}: give a "
                "size above 0, such as 200, and an overlap from 0 to below the size, such as 40"
            )


def parse_chunks(text: str) -> Chunks:
    """Parses `SIZE` or `SIZE,OVERLAP` (by default a fifth of it); `UserError` for other text."""
    match = re.fullmatch(r"(\d+)(?:,(\d+))?", text.replace(" ", ""))
    if match is None:
        raise UserError(f"chunk is {text!r}: give SIZE or SIZE,OVERLAP, such as 200,40")
    size = int(match[1])
    return Chunks(size, size // 5 if match[2] is None else int(match[2]))


def sentence_starts(text: str) -> list[int]:
    """Returns the character at which each sentence of a text begins, the first at 0."""
    starts = [0]
    for match in SENTENCE_END.finditer(text):
        head = text[max(0, match.start() - 8) : match.start()]
        if "\n" in match[0] or not ABBREVIATION.search(head):
            starts.append(match.end())
    return starts


def chunk_spans(text: str, spans: Sequence[Span], size: int, overlap: int) -> list[Span]:
    """Returns the characters of each chunk of a text.

    A chunk ends with a sentence if one ends in it, else with a word, else after `size` units.
    """
    firsts = [start for start, _ in spans]
    # Units at which a sentence or a word begins: a unit of subwords may be the middle of a word.
    sentences = sorted({bisect.bisect_left(firsts, start) for start in sentence_starts(text)})
    words = [
        n
        for n, start in enumerate(firsts)
        if start == 0 or text[start - 1].isspace() or UNSPACED.match(text, start)
    ]
    chunks, first = list[Span](), 0
    while first < len(spans):
        end = min(first + size, len(spans))
        if end < len(spans):
            end = _last(sentences, first + 1, end) or _last(words, first + 1, end) or end
        chunks.append((spans[first][0], spans[end - 1][1]))
        if end == len(spans):
            break
        # Whole sentences are repeated; within a sentence that is longer than a chunk, words.
        at_sentence = sentences[bisect.bisect_left(sentences, end) % len(sentences)] == end
        starts = sentences if at_sentence else words
        n = bisect.bisect_left(starts, max(first + 1, end - overlap))
        first = min(starts[n], end) if n < len(starts) else end
    return chunks


def _last(values: Sequence[int], low: int, high: int) -> int | None:
    n = bisect.bisect_right(values, high) - 1
    return values[n] if n >= 0 and values[n] >= low else None


def divide(passage: Passage, chunks: Chunks, units: Units) -> Iterator[Passage]:
    """Yields the chunks of a passage; a passage that is short enough is its only chunk."""
    title, text = passage.title, passage.text
    spans = units.spans(text)
    # A title that fills a chunk must leave room for text.
    size = max(chunks.size - units.reserved_units - len(units.spans(title)), chunks.size // 2, 1)
    parts = chunk_spans(text, spans, size, min(chunks.overlap, size - 1))
    if len(parts) < 2:
        yield passage
        return
    mark = "&" if "#" in passage.id else "#"
    for start, end in parts:
        yield Passage(f"{passage.id}{mark}char={start},{end}", title, text[start:end])


def divide_all(passages: Iterable[Passage], chunks: Chunks, units: Units) -> Iterator[Passage]:
    """Yields the chunks of passages lazily, see `divide`."""
    for passage in passages:
        yield from divide(passage, chunks, units)
