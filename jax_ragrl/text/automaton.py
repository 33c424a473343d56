"""A regular expression as a finite automaton over the tokens of a vocabulary.

`outlines-core` compiles the expression to an automaton over bytes; every token then walks its own
bytes from every state. Tokens with equal columns of the table share one *class*: a table of states
and all tokens would be large (200 states of 151,936 tokens: 58 MiB).

The language is one of whole actions: a stop token is allowed exactly in accepting states. A token
also has a *cost*: the fewest tokens, itself included, that finish the action through it. A sampler
that allows only tokens whose cost its remaining tokens can pay never cuts an action.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jax_ragrl.errors import UserError
from jax_ragrl.types import Tensor

FREE, START = 0, 1  # in state FREE, which is never left, every token is allowed
UNPAYABLE = int(np.iinfo(np.int16).max)  # the cost of a forbidden token; no action is that long
MULTIPLE = 64  # tables are padded to multiples of this, so that few shapes are compiled
_DEAD, _STOP = -1, -2


class TokenAutomaton(NamedTuple):
    """The tables of an automaton, on the host or on the devices.

    A state is a row number: `FREE`, `START`, or another one after some tokens of an action. An
    action is accepted if its tokens lead to a state in which a stop token has the cost 1.

    Fields:
      class_V: int16, the class of each token of the tokenizer.
      next_SC: int16, the state after a token of a class; `FREE` after a stop token, and also where
        the token is forbidden.
      cost_SC: int16, the fewest tokens, the one of this class included, that finish the action;
        `UNPAYABLE` if the token is forbidden.
    """

    class_V: Tensor
    next_SC: Tensor
    cost_SC: Tensor

    def tokens_left(self, state: int = START) -> int:
        """Returns the fewest tokens that finish an action, its stop token not included."""
        # Only a stop token leads to FREE at a cost of 1.
        may_stop = (self.next_SC[state] == FREE) & (self.cost_SC[state] == 1)
        return 0 if may_stop.any() else int(self.cost_SC[state].min())

    @property
    def nbytes(self) -> int:
        """The size of the tables in bytes."""
        return sum(int(table.nbytes) for table in self)


def compile_regex(
    regex: str, pieces: Sequence[bytes | None], stop_ids: Sequence[int]
) -> TokenAutomaton:
    """Compiles a regular expression over a vocabulary; the tables are on the host.

    The `regex` describes whole actions, in the syntax of Rust's `regex` crate: Unicode, without
    look-around and back-references. `pieces` are the bytes of each token; None for control tokens,
    which are forbidden.

    Raises:
      UserError: the expression cannot be compiled, or no sequence of tokens matches it.
    """
    step_SB, accepts_S = byte_automaton(regex)
    # The longest token sets the number of steps; states are int16.
    if len(step_SB) >= UNPAYABLE - 1:
        raise UserError(
            f"the grammar {_shown(regex)} has {len(step_SB)} states: use fewer repetitions"
        )
    # The last row is the dead state: a byte -1 selects it.
    dead_1B = np.full((1, 256), _DEAD, np.int16)
    next_SV = walk(np.vstack([step_SB, dead_1B]), [piece or b"" for piece in pieces])[:-1]
    next_SV[:, [not piece for piece in pieces]] = _DEAD
    next_SV[:, list(stop_ids)] = np.where(accepts_S, _STOP, _DEAD)[:, None]
    next_SC, class_V = _share_columns(next_SV)
    left_S = _tokens_left(next_SC, accepts_S)
    if left_S[0] >= UNPAYABLE:
        raise UserError(
            f"no sequence of the tokenizer's tokens matches the grammar {_shown(regex)}: it lacks "
            "some bytes of it; use another grammar or a tokenizer with all bytes"
        )
    return _tables(next_SC, class_V, left_S)


def byte_automaton(regex: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the smallest automaton over bytes of a regular expression.

    It is int16 `[S, 256]`, the state after a byte, -1 if no match begins so, and bool `[S]`,
    whether a state accepts. State 0 is the first one. No match contains the character NUL.

    Raises:
      UserError: the expression cannot be compiled.
    """
    # outlines-core 0.2.14 loses the steps from an accepting state to one that does not accept:
    # `(?:ab)*` becomes an automaton of the empty text. Therefore NUL ends every match here: a state
    # accepts if NUL leads to an accepting one.
    from outlines_core import Index, Vocabulary  # here: only runs with strict grammars need it

    bytes_alone = Vocabulary(256, {bytes([byte]): [byte] for byte in range(256)})
    try:
        index = Index(f"(?:{regex})\\x00", bytes_alone)
    except Exception as error:  # the compiler in Rust raises no more specific class
        why = " ".join(str(error).split())[:200]
        raise UserError(
            f"the grammar {_shown(regex)} cannot be compiled ({why}): use the syntax of Rust's "
            "regex crate, without look-around and back-references"
        ) from error
    transitions, first = index.get_transitions(), index.get_initial_state()
    targets = (state for steps in transitions.values() for state in steps.values())
    number = {s: i for i, s in enumerate(dict.fromkeys([first, *transitions, *targets]))}
    step_SB = np.full((len(number), 257), _DEAD, np.int32)
    for state, steps in transitions.items():
        step_SB[number[state], list(steps)] = [number[target] for target in steps.values()]
    accepts_S = np.isin(step_SB[:, 0], [number[state] for state in index.get_final_states()])
    step_SB[:, 0] = _DEAD
    # The steps of the token that outlines-core appends in accepting states are not needed.
    return _smallest(*_reachable(step_SB[:, :256], accepts_S))


def _reachable(step_SB: np.ndarray, accepts_S: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Drops the states that no text leads to; the first state stays the first."""
    order = [0]
    for state in order:  # grows while it is read
        order += sorted(set(step_SB[state].tolist()) - {_DEAD, *order})
    number_S = np.full(len(step_SB) + 1, _DEAD)  # the last entry is for _DEAD
    number_S[order] = np.arange(len(order))
    return number_S[step_SB[order]], accepts_S[order]


def _smallest(step_SB: np.ndarray, accepts_S: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Merges states that accept the same rest (Moore 1956)."""
    (_, block_S), count = np.unique(accepts_S, return_inverse=True), 0
    while block_S.max() + 1 > count:
        count = int(block_S.max()) + 1
        # States of one block stay together if their successors are in the same blocks.
        after_SB = np.where(step_SB >= 0, block_S[step_SB], _DEAD)
        _, block_S = np.unique(np.c_[block_S, after_SB], axis=0, return_inverse=True)
    # The block of the first state becomes number 0.
    order_S = np.where(block_S == block_S[0], 0, block_S + (block_S < block_S[0]))
    _, some_S = np.unique(order_S, return_index=True)
    after_SB = np.where(step_SB[some_S] >= 0, order_S[step_SB[some_S]], _DEAD)
    return after_SB.astype(np.int16), accepts_S[some_S]


def walk(step_SB: np.ndarray, pieces: Sequence[bytes]) -> np.ndarray:
    """Returns the state after each token in each state, `[S, V]`, from that after each byte."""
    next_SV = np.tile(np.arange(len(step_SB), dtype=step_SB.dtype)[:, None], len(pieces))
    # All tokens advance by one byte at a time. Few tokens are long, so each round keeps only those
    # with a further byte.
    live = list(range(len(pieces)))
    for i in range(max(map(len, pieces))):
        live = [v for v in live if len(pieces[v]) > i]
        next_SV[:, live] = step_SB[next_SV[:, live], [pieces[v][i] for v in live]]
    return next_SV


def _share_columns(next_SV: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the distinct columns of a table, `[S, C]`, and the number of each one's column."""
    columns = np.ascontiguousarray(next_SV.T)
    # A column as one opaque value sorts faster than its numbers one by one.
    keys = columns.view(np.dtype((np.void, columns.dtype.itemsize * columns.shape[1]))).ravel()
    _, first, class_V = np.unique(keys, return_index=True, return_inverse=True)
    return np.ascontiguousarray(columns[first].T), class_V.astype(np.int16)


def _tokens_left(next_SC: np.ndarray, accepts_S: np.ndarray) -> np.ndarray:
    """The fewest tokens from each state to an accepting one, int64; `UNPAYABLE` if there is none.

    The entry after the last, which the number -1 selects, is that of a forbidden token.
    """
    left_S = np.append(np.where(accepts_S, 0, UNPAYABLE), [UNPAYABLE, UNPAYABLE])
    while True:
        through_S = np.minimum(1 + left_S[next_SC].min(axis=1), left_S[:-2])
        if (through_S == left_S[:-2]).all():
            return left_S
        left_S[:-2] = through_S


def _tables(next_SC: np.ndarray, class_V: np.ndarray, left_S: np.ndarray) -> TokenAutomaton:
    """Adds the state `FREE` and the costs, and pads the tables."""
    cost_SC = np.minimum(1 + left_S[next_SC], UNPAYABLE)
    cost_SC[next_SC == _STOP] = 1
    next_SC = np.where((cost_SC < UNPAYABLE) & (next_SC >= 0), next_SC + START, FREE)
    states, classes = (-(-n // MULTIPLE) * MULTIPLE for n in (len(next_SC) + 1, len(next_SC[0])))
    # Rows of padding are copies of FREE; columns of padding belong to no token.
    tables = [np.zeros((states, classes), np.int16), np.ones((states, classes), np.int16)]
    for table, values in zip(tables, (next_SC, cost_SC), strict=True):
        table[START : START + len(values), : values.shape[1]] = values
    # A column of padding must not look allowed to a search for the smallest cost.
    tables[1][START : START + len(next_SC), next_SC.shape[1] :] = UNPAYABLE
    return TokenAutomaton(class_V, *tables)


def follow(
    automaton: TokenAutomaton, ids: Sequence[int], budgets: Sequence[int], state: int = START
) -> list[int]:
    """Returns the state before each token of an action, and the state after the last one.

    From the first token that is forbidden, or costs more than its budget (the tokens that the
    action could still have), the state is `FREE`: the text of an expert or a teacher need not
    match.
    """
    states = [state]
    for id_, budget in zip(ids, budgets, strict=True):
        # Ids of a vocabulary that is padded beyond the tokenizer's are forbidden.
        is_known = id_ < len(automaton.class_V)
        column = int(automaton.class_V[id_]) if is_known else 0
        if not is_known or automaton.cost_SC[states[-1], column] > budget:
            states[-1] = FREE
        states.append(int(automaton.next_SC[states[-1], column]))
    return states


def merge(automata: Sequence[TokenAutomaton]) -> tuple[TokenAutomaton, tuple[int, ...]]:
    """Merges automata of one vocabulary, which share `FREE`; returns the start of each, too."""
    classes_ZC, class_V = np.unique([a.class_V for a in automata], axis=1, return_inverse=True)
    tables: list[list[np.ndarray]] = [[], []]
    starts, offset = [], 0
    for automaton, class_C in zip(automata, classes_ZC, strict=True):
        next_SC, cost_SC = (table[:, class_C] for table in automaton[1:])
        moved_SC = np.where(next_SC == FREE, FREE, next_SC + offset)
        # The first table keeps its row FREE, which all share.
        first = START if tables[0] else FREE
        tables[0].append(moved_SC[first:])
        tables[1].append(cost_SC[first:])
        starts.append(START + offset)
        offset += len(next_SC) - START
    next_SC, cost_SC = (np.concatenate(rows).astype(np.int16) for rows in tables)
    return TokenAutomaton(class_V.ravel().astype(np.int16), next_SC, cost_SC), tuple(starts)


def _shown(regex: str) -> str:
    return repr(regex if len(regex) <= 80 else regex[:77] + "...")
