"""Stop strings as a transition table that a sampler follows token by token.

The table is an automaton (Aho and Corasick 1975): a state is the longest prefix of a stop string
that the text ends with. A string is therefore recognized however tokens divide it, and no token is
read twice.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jax_ragrl.errors import UserError

STATES = 32  # tables are padded to a multiple of this, so that few shapes are compiled


def stop_table(stops: Sequence[str], pieces: Sequence[str]) -> np.ndarray:
    """Builds the transition table of stop strings.

    Args:
      stops: one or more strings, not empty, in ASCII: a token may contain a part of any other
        character.
      pieces: the text of each token.

    Returns:
      uint8 `[S, V + 1]`: the state after a token in a state. State 0 is the first one; state S - 1
      means that a stop string has ended. Column V is for ids beyond the vocabulary, which have no
      text.

    Raises:
      UserError: there is no stop string, or one is empty, not in ASCII, or too long.
    """
    if not stops or not all(stop and stop.isascii() for stop in stops):
        raise UserError(f"stops {tuple(stops)}: give strings of ASCII characters")
    step_SC, classes = _automaton(stops)
    longest = max(map(len, pieces))
    other = step_SC.shape[1] - 1
    table_SV = np.tile(np.arange(len(step_SC), dtype=np.uint8)[:, None], len(pieces) + 1)
    # All tokens advance by one character at a time. Few tokens are long, so each round keeps only
    # those with a further character.
    live = np.arange(len(pieces))
    for i in range(longest):
        live = live[[len(pieces[v]) > i for v in live.tolist()]]
        class_L = np.array([classes.get(pieces[v][i], other) for v in live.tolist()])
        table_SV[:, live] = step_SC[table_SV[:, live], class_L]
    return table_SV


def _automaton(stops: Sequence[str]) -> tuple[np.ndarray, dict[str, int]]:
    """The state after a character in a state `[S, C]`, and the column of each character.

    The last column is for all other characters.
    """
    prefixes = sorted({stop[:n] for stop in stops for n in range(len(stop))}, key=len)
    size = -(-(len(prefixes) + 1) // STATES) * STATES
    # States are stored as uint8.
    if size > 256:
        raise UserError(f"stops {tuple(stops)} are too long in total: give fewer or shorter ones")
    number = {prefix: i for i, prefix in enumerate(prefixes)}
    classes = {c: i for i, c in enumerate(sorted(set("".join(stops))))}
    step_SC = np.zeros((size, len(classes) + 1), np.uint8)
    # The last state is final: after a stop string every character stays in it.
    step_SC[-1] = size - 1
    for prefix, i in number.items():
        for char, column in classes.items():
            text = prefix + char
            ended = any(text.endswith(stop) for stop in stops)
            # The next state is the longest suffix of the text that is a prefix of a stop string.
            suffixes = (text[n:] for n in range(len(text) + 1))
            state = size - 1 if ended else next(number[s] for s in suffixes if s in number)
            step_SC[i, column] = state
    return step_SC, classes
