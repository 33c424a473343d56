"""Laws of chunks: parts of a text within their size, which cover it and end with sentences."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_ragrl.corpus.chunks import (
    WORDS,
    Chunks,
    Units,
    chunk_spans,
    divide,
    sentence_starts,
    word_spans,
)
from jax_ragrl.errors import UserError
from jax_ragrl.models.encoder import _without_leading_space
from jax_ragrl.types import Passage

TEXT = st.lists(st.sampled_from(["a", "Bc", "d.", "E?", "f,", "g.\n", "\n\n"]), max_size=60)
SIZES = st.tuples(st.integers(1, 12), st.integers(0, 11)).filter(lambda pair: pair[1] < pair[0])


def halves(text):
    """Units of subwords: each word in two pieces."""
    return [
        span
        for start, end in word_spans(text)
        for span in ((start, (start + end) // 2), ((start + end) // 2, end))
        if span[0] < span[1]
    ]


def with_spaces(text):
    """Units as byte-level tokenizers give them before their leading spaces are removed."""
    spans = [(start - (text[start - 1 : start] == " "), end) for start, end in halves(text)]
    return [_without_leading_space(text, *span) for span in spans]


@pytest.mark.parametrize("spans", [word_spans, halves, with_spaces])
@given(words=TEXT, sizes=SIZES)
def test_chunks_cover_a_text_within_their_size(spans, words, sizes):
    text, (size, overlap) = " ".join(words), sizes
    units = spans(text)
    parts = chunk_spans(text, units, size, overlap)
    covered = set()
    for n, (start, end) in enumerate(parts):
        inside = [span for span in units if start <= span[0] and span[1] <= end]
        assert inside and (inside[0][0], inside[-1][1]) == (start, end)
        assert len(inside) <= size
        repeated = sum(span in covered for span in inside)
        assert repeated <= overlap and (n == 0 or start > parts[n - 1][0])
        covered.update(inside)
    assert covered == set(units)


def test_a_chunk_ends_with_a_sentence_and_repeats_whole_ones():
    text = "One two three. Four five. Six seven eight nine. Ten."
    parts = [text[a:b] for a, b in chunk_spans(text, word_spans(text), 6, 2)]
    assert parts == ["One two three. Four five.", "Four five. Six seven eight nine.", "Ten."]


def test_a_chunk_of_a_byte_level_tokenizer_ends_with_a_sentence():
    text = "One two. Three four. Five six."
    spans = with_spaces(text)
    parts = [text[a:b] for a, b in chunk_spans(text, spans, size=8, overlap=0)]
    assert parts == ["One two. Three four.", "Five six."]
    assert _without_leading_space(" \n ", 0, 3) == (0, 3), "white space alone"


def test_a_sentence_that_is_too_long_is_divided_between_words():
    text = "abcd " * 9
    for a, b in chunk_spans(text, halves(text), 5, 3):
        assert set(text[a:b].split()) == {"abcd"}


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("A b. C d! E?", ["A b. ", "C d! ", "E?"]),
        ('He said "no." Then left.', ['He said "no." ', "Then left."]),
        ("Dr. Who met J. R. Ewing vs. Bob.", ["Dr. Who met J. R. Ewing vs. Bob."]),
        ("approx. three of 2.5 m", ["approx. three of 2.5 m"]),
        ("Head\nText one. \n\nTwo", ["Head\n", "Text one. \n\n", "Two"]),
        ("一二。三四！五", ["一二。", "三四！", "五"]),
    ],
)
def test_sentences_begin_where_a_reader_says(text, sentences):
    starts = [*sentence_starts(text), len(text)]
    parts = [text[a:b] for a, b in zip(starts, starts[1:], strict=False)]
    assert parts == sentences


def test_a_chunk_keeps_the_title_and_names_its_place_and_a_short_passage_stays():
    text = "One two. Three four. Five six."
    chunks = list(divide(Passage("a#page=2", "My title", text), Chunks(7, 2), WORDS))
    assert [(c.id, c.title, c.text) for c in chunks] == [
        ("a#page=2&char=0,20", "My title", "One two. Three four."),
        ("a#page=2&char=9,30", "My title", "Three four. Five six."),
    ]
    for chunk in chunks:
        start, end = map(int, chunk.id.partition("char=")[2].split(","))
        assert text[start:end] == chunk.text and WORDS.size(chunk) <= 7
        assert chunk.names == {chunk.id, "My title", "a#page=2"}
    passage = Passage("a", "T", "  one two \n")
    assert list(divide(passage, Chunks(3, 0), WORDS)) == [passage]
    assert passage.names == {"a", "T"}


@pytest.mark.parametrize(
    ("key", "file"),
    [
        ("a/b.md#install", "a/b.md"),
        ("a/b.PDF#page=2&char=0,20", "a/b.PDF"),
        ("c#/x.html#part", "c#/x.html"),
        ("b.txt#char=0,20", "b.txt"),
        ("C#1", "C#1"),  # of a data set
    ],
)
def test_gold_may_name_the_file_of_a_passage(key, file):
    names = Passage(key, "T", "text").names
    assert file in names and names - {key, "T", file, key.partition("&")[0]} == set()


def test_units_that_a_model_adds_count():
    text = "One two. Three four. Five six."
    units = Units("mine", word_spans, reserved_units=2)
    for chunk in divide(Passage("a", "", text), Chunks(6, 0), units):
        assert units.size(chunk) <= 6


@pytest.mark.parametrize(("size", "overlap"), [(0, 0), (-1, 0), (5, 5), (5, -1)])
def test_sizes_that_divide_nothing_are_refused(size, overlap):
    with pytest.raises(UserError, match=r"data\.chunk\.size is .* data\.chunk\.overlap"):
        Chunks(size, overlap)


@pytest.mark.parametrize(
    "text",
    [
        "科隆位于莱茵河畔，以“科隆大教堂”闻名。" * 200,
        "東京は日本の首都で、隅田川が流れている" * 200,
        "กรุงเทพมหานครตั้งอยู่ริมแม่น้ำเจ้าพระยา " * 100,
        "ភ្នំពេញជារាជធានីនៃកម្ពុជា។" * 100,
        "The city of 科隆 is old. " * 100,
    ],
)
def test_a_long_text_without_blanks_is_divided_between_characters(text):
    chunks = list(divide(Passage("a", "", text), Chunks(50, 10), WORDS))
    assert len(chunks) > 10 and all(20 <= WORDS.size(chunk) <= 50 for chunk in chunks[:-1])
    ends = [int(chunk.id.rpartition(",")[2]) for chunk in chunks[:-1]]
    cuts = {start for start, _ in word_spans(text)}
    assert all(end in cuts or text[end] == " " for end in ends)
    if "。" in text or "។" in text:
        assert all(chunk.text.endswith(("。", "។")) for chunk in chunks)
