"""Stop strings as a transition table that a sampler follows token by token.

The table is an automaton (Aho and Corasick 1975): a state is the longest prefix of a stop string
that the text ends with. A string is therefore recognized however tokens divide it, and no token is
read twice.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jax_ragrl.errors import UserError
from jax_ragrl.text.automaton import walk

STATES = 32  # tables are padded to a multiple of this, so that few shapes are compiled


def stop_table(stops: Sequence[str], pieces: Sequence[str]) -> np.ndarray:
    """Builds the transition table of stop strings.

    Stop strings are in ASCII: a token may contain a part of any other character. `pieces` is the
    text of each token.

    Returns:
      uint8 `[S, V + 1]`: the state after a token in a state. State 0 is the first one; state S - 1
      means that a stop string has ended. Column V is for ids beyond the vocabulary.

    Raises:
      UserError: there is no stop string, or one is empty, not in ASCII, or too long.
    """
    if not stops or not all(stop and stop.isascii() for stop in stops):
        raise UserError(f"stops {tuple(stops)}: give strings of ASCII characters")
    # Half a surrogate pair may be in a piece; no byte of it is in a stop string.
    written = [piece.encode("utf-8", "surrogatepass") for piece in pieces]
    return walk(_automaton(stops), [*written, b""])


def _automaton(stops: Sequence[str]) -> np.ndarray:
    """The state after a byte in a state, uint8 `[S, 256]`."""
    prefixes = sorted({stop[:n] for stop in stops for n in range(len(stop))}, key=len)
    size = -(-(len(prefixes) + 1) // STATES) * STATES
    if size > 256:
        raise UserError(f"stops {tuple(stops)} are too long in total: give fewer or shorter ones")
    number = {prefix: i for i, prefix in enumerate(prefixes)}
    step_SB = np.zeros((size, 256), np.uint8)
    # The last state is final: after a stop string every byte stays in it.
    step_SB[-1] = size - 1
    for prefix, i in number.items():
        for char in set("".join(stops)):
            text = prefix + char
            ended = any(text.endswith(stop) for stop in stops)
            # The next state is the longest suffix of the text that is a prefix of a stop string.
            suffixes = (text[n:] for n in range(len(text) + 1))
            state = size - 1 if ended else next(number[s] for s in suffixes if s in number)
            step_SB[i, ord(char)] = state
    return step_SB
