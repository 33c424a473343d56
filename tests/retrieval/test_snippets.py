"""A snippet shows where a passage matches, and never sends a control character to a terminal."""

import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from jax_ragrl.retrieval.snippets import BOLD, PLAIN, clean, lines, query_words, snippet
from jax_ragrl.types import Hits, Passage


def test_words_of_the_query_are_marked_in_any_case_and_script_common_ones_alone():
    text = "The film Silent Harbor was DIRECTED by Adela Brandt."
    expected = "The film **Silent** Harbor was **DIRECTED** by Adela Brandt."
    assert snippet(text, "who directed a silent film?".replace("film", "")) == expected
    assert BOLD.start + "Silent" + BOLD.end in snippet(text, "silent", BOLD)
    assert snippet("who is it", "who is Ann") == "who is it"
    assert query_words("To be") == {"to", "be"}
    assert snippet("乌尔姆位于多瑙河畔。", "多瑙河") == "乌尔姆位于**多瑙河**畔。"
    assert snippet("กรุงเทพมหานคร", "กรุง") == "**กรุง**เทพมหานคร"


def test_a_long_text_is_cut_to_the_part_with_the_most_words_of_the_query():
    filler = "nothing " * 100
    text = f"{filler}harbor {filler}silent harbor {filler}"
    part = snippet(text, "silent harbor", width=80)
    assert "**silent** **harbor**" in part and len(part.replace("**", "")) <= 82
    assert part.startswith("…") and part.endswith("…")
    assert snippet(text, "absent", width=80).startswith("nothing")


@given(st.text(), st.text())
def test_no_control_character_reaches_a_terminal(text, query):
    hits = Hits((Passage(text, text, text),), (0.5,))
    for line in lines(hits, query, PLAIN):
        assert not [c for c in line if unicodedata.category(c).startswith("C")]


@given(st.text())
def test_a_snippet_without_marks_is_a_part_of_the_text(text):
    part = snippet(text, text).replace("**", "").removeprefix("…").removesuffix("…")
    assert part in clean(text).replace("**", "")


def test_escape_sequences_and_reversed_text_are_removed():
    assert clean("a\x1b]0;title\x07b\u202ec\n\nd") == "a]0;titlebc d"
