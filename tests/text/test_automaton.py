"""Regular expressions as automata over tokens."""

import itertools
import re

import numpy as np
import pytest

from jax_ragrl.errors import UserError
from jax_ragrl.text.automaton import (
    FREE,
    START,
    UNPAYABLE,
    TokenAutomaton,
    byte_automaton,
    compile_regex,
    follow,
    merge,
)

pytest.importorskip("outlines_core")

STOP = 0
# Tokens that overlap, a control token, and the two bytes of "é" apart.
PIECES: list[bytes | None] = [None, None, b"a", b"b", b"ab", b"ba", b"\xc3", b"\xa9", b"aab"]
FREE_BUDGET = UNPAYABLE - 1


def accepts(automaton: TokenAutomaton, ids: tuple[int, ...], state: int = START) -> bool:
    """Whether an action may consist of some tokens and a stop token."""
    states = follow(automaton, [*ids, STOP], [FREE_BUDGET] * (len(ids) + 1), state)
    return FREE not in states[:-1]


@pytest.mark.parametrize("regex", ["", "a*", "(?:ab)*", "a?b?", "é|ab+", "[^a]b", "(?:ab|ba){1,2}"])
def test_an_automaton_accepts_the_token_sequences_whose_text_matches(regex: str):
    automaton = compile_regex(regex, PIECES, (STOP,))
    for length in range(4):
        for ids in itertools.product(range(2, len(PIECES)), repeat=length):
            text = b"".join(PIECES[i] or b"" for i in ids)
            try:
                matches = re.fullmatch(regex, text.decode()) is not None
            except UnicodeDecodeError:
                matches = False
            assert accepts(automaton, ids) == matches, (regex, text)


def test_control_tokens_are_forbidden():
    automaton = compile_regex(".*", PIECES, (STOP,))
    assert not accepts(automaton, (1,)) and not accepts(automaton, (2, 1))


def test_a_cost_is_the_fewest_tokens_to_the_end():
    automaton = compile_regex("a{3}b", PIECES, (STOP,))
    costs = {i: automaton.cost_SC[START, automaton.class_V[i]] for i in (2, 3, 8)}
    # "a" then "aab"; "aab" cannot begin the text, because three times "a" comes first.
    assert costs == {2: 2, 3: UNPAYABLE, 8: UNPAYABLE} and automaton.tokens_left() == 2
    assert compile_regex("a?", PIECES, (STOP,)).tokens_left() == 0
    states = follow(automaton, (2, 8, STOP), (2, 1, 1))
    assert FREE not in states[:-1] and states[-1] == FREE
    # With a budget of 2 the first "a" may not be followed by another single one.
    assert follow(automaton, (2, 2), (2, 1))[1] == FREE


def test_equal_states_are_merged_and_all_accepting_ones_are_told_apart():
    # Every state of a?b? accepts, and there are three: all left, "b" left, nothing left.
    assert len(byte_automaton("a?b?")[0]) == 3
    assert len(byte_automaton("(?:ab|cb|db)")[0]) == 3
    assert len(byte_automaton("[ab]*")[0]) == 1


def test_a_merged_table_follows_each_of_its_automata():
    regexes = ("(?:ab)*", "é|a", "a?b?")
    automata = [compile_regex(regex, PIECES, (STOP,)) for regex in regexes]
    merged, starts = merge(automata)
    for automaton, start in zip(automata, starts, strict=True):
        for ids in itertools.product(range(2, len(PIECES)), repeat=2):
            assert accepts(merged, ids, start) == accepts(automaton, ids)
    assert (merged.next_SC[FREE] == FREE).all() and (merged.cost_SC[FREE] == 1).all()


def test_a_grammar_that_cannot_be_used_is_an_error():
    with pytest.raises(UserError, match="cannot be compiled"):
        compile_regex("a(?!b)", PIECES, (STOP,))
    with pytest.raises(UserError, match="lacks some bytes"):
        compile_regex("ac", PIECES, (STOP,))


def test_tokens_that_behave_alike_share_a_class():
    pieces: list[bytes | None] = [None, *(bytes([b]) for b in range(256)), *[b"xy"] * 1000]
    automaton = compile_regex("[a-z]+", pieces, (STOP,))
    assert len(np.unique(automaton.class_V)) == 3  # letters, other bytes, the stop token
    assert automaton.next_SC.shape == (64, 64) and automaton.nbytes < 20_000
