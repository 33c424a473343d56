"""Strings that end an action, as a table which a sampler reads a token at a time.

Aho and Corasick 1975: a state is how much of some string has just been written, so that a string is
found however tokens divide it, and nothing that was written is read again.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jax_ragrl.errors import UserError

STATES = 32  # tables have a multiple of so many: few shapes are compiled


def stop_table(stops: Sequence[str], pieces: Sequence[str]) -> np.ndarray:
    """uint8 `[S, V + 1]`: the state after a token in a state; 0 at first, S - 1 at the end of one.

    Args:
      stops: at least one, none of them empty, in ASCII: a token may hold a part of any other
        character.
      pieces: the text of every token; column V is of ids beyond, which have none.

    Raises:
      UserError: stops of another form.
    """
    if not stops or not all(stop and stop.isascii() for stop in stops):
        raise UserError(f"stops {tuple(stops)}: give strings of ASCII characters")
    step_SC, classes = _automaton(stops)
    longest = max(map(len, pieces))
    other = step_SC.shape[1] - 1
    table_SV = np.tile(np.arange(len(step_SC), dtype=np.uint8)[:, None], len(pieces) + 1)
    # Long tokens are few: only those that go on are looked at.
    live = np.arange(len(pieces))
    for i in range(longest):
        live = live[[len(pieces[v]) > i for v in live.tolist()]]
        class_L = np.array([classes.get(pieces[v][i], other) for v in live.tolist()])
        table_SV[:, live] = step_SC[table_SV[:, live], class_L]
    return table_SV


def _automaton(stops: Sequence[str]) -> tuple[np.ndarray, dict[str, int]]:
    """The state after a character in a state `[S, C]`, and the column of each character; the last
    column is that of all others."""
    prefixes = sorted({stop[:n] for stop in stops for n in range(len(stop))}, key=len)
    size = -(-(len(prefixes) + 1) // STATES) * STATES
    if size > 256:
        raise UserError(f"stops {tuple(stops)} are too long together: give fewer or shorter ones")
    number = {prefix: i for i, prefix in enumerate(prefixes)}
    classes = {c: i for i, c in enumerate(sorted(set("".join(stops))))}
    step_SC = np.zeros((size, len(classes) + 1), np.uint8)
    step_SC[-1] = size - 1
    for prefix, i in number.items():
        for char, column in classes.items():
            text = prefix + char
            suffixes = (text[n:] for n in range(len(text) + 1))
            found = any(text.endswith(stop) for stop in stops)
            state = size - 1 if found else next(number[s] for s in suffixes if s in number)
            step_SC[i, column] = state
    return step_SC, classes
