import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from jax_ragrl.errors import UserError
from jax_ragrl.text.stops import stop_table
from tests.tiny import tokenizer

PIECES = ["<", "/", "a", "</", "a>", "</a>b", ">", "", "<</", "x", "é<", "aa", "b>"]
STOPS = st.lists(st.text("</ab>", min_size=1, max_size=5), min_size=1, max_size=3)


@hypothesis.given(stops=STOPS, written=st.lists(st.integers(0, len(PIECES)), max_size=12))
def test_the_first_token_that_completes_a_stop_ends(stops, written):
    table_SV, state, text = stop_table(stops, PIECES), 0, ""
    assert table_SV.dtype == np.uint8 and table_SV.shape == (32, len(PIECES) + 1)
    for token in written:
        state = table_SV[state, token]
        text += PIECES[token] if token < len(PIECES) else ""
        assert (state == 31) == any(stop in text for stop in stops)


@pytest.mark.parametrize(("length", "states"), [(31, 32), (32, 64), (255, 256)])
def test_a_long_stop_ends_at_its_last_character(length, states):
    """Each prefix of a string is a state, the empty one included, and so is its end."""
    table_SV, state, seen = stop_table(("a" * length,), PIECES), 0, []
    for _ in range(length):
        state = table_SV[state, PIECES.index("a")]
        seen.append(state == states - 1)
    assert len(table_SV) == states and seen == [False] * (length - 1) + [True]


def test_a_stop_ends_however_a_text_is_encoded():
    stops = ("</task>", "</answer>")
    table_SV = tokenizer().stop_transitions(stops)
    for text in ("<task>who é</task> and</answer>", "</answer </tas</task>", "no end <task>"):
        ids, state, ends = tokenizer().encode(text), 0, []
        for i in ids:
            state = table_SV[state, i]
            ends.append(state == len(table_SV) - 1)
        texts = [tokenizer().decode(ids[: n + 1]) for n in range(len(ids))]
        assert ends == [any(stop in t for stop in stops) for t in texts]
    assert tokenizer().stop_transitions(()) is None


@pytest.mark.parametrize("stops", [(), ("",), ("é",), ("x" * 300,)])
def test_invalid_stops_are_refused(stops):
    with pytest.raises(UserError, match="stops"):
        stop_table(stops, PIECES)
