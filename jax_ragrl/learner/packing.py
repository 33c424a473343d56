"""A forest becomes rows of prefix trees: what contexts share is in a row once.

A *context* is everything a model had before it, then what it wrote: prompt and action of a turn.
Contexts that begin alike share tokens, whatever the reason: siblings share their prompt, a later
turn of a conversation holds the earlier ones and what was observed between them, two questions
share a role's instructions. The contexts of a row are sorted, so each follows the one it shares
most with, and only what it does not share is written. That is the whole layout: packing is the case
that shares nothing.

A token is seen from its own place up to the place where its last descendant ends (`until_RL`), and
its position is its depth. Only what a turn wrote is scored; prompts and observations are context.
Rows are filled up with padding that sees itself alone and weighs nothing.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jax_ragrl.errors import UserError
from jax_ragrl.rollout.tree import Forest
from jax_ragrl.types import Tensor

# Shorter rows gain too little without a mask to be worth a program of their own.
PLAIN_FROM = 1024


class Turn(NamedTuple):
    """What a role wrote (`ids`) after what stood before it (`prompt`, at least one id).

    `after` is the node of the turn whose context this prompt begins with: the one before it in
    their conversation; -1 where there is none.
    """

    node: int
    role: str
    prompt: tuple[int, ...]
    ids: tuple[int, ...]
    after: int = -1

    def context(self) -> tuple[int, ...]:
        """All of it."""
        return self.prompt + self.ids


class Group(NamedTuple):
    """Turns whose contexts begin with one prompt, sorted by context, and their distinct tokens."""

    turns: tuple[Turn, ...]
    tokens: int

    @property
    def role(self) -> str:
        """Whose instructions the group begins with."""
        return self.turns[0].role

    def scored(self) -> int:
        """Scored tokens: turns that are equal share their tokens, but each is scored."""
        return sum(len(turn.ids) for turn in self.turns)


@dataclasses.dataclass(frozen=True)
class Layout:
    """Static shapes: the lengths of rows, ascending, and the tokens of a batch of rows on a device.

    The last batch of a job may be part empty: its rows are then halved, up to `halvings` times.
    Each length may be compiled once, and once more a halving; twice as often from `PLAIN_FROM` on.
    """

    lengths: tuple[int, ...] = (128, 256, 512, 1024, 2048, 4096)
    tokens: int = 8192
    halvings: int = 0

    def __post_init__(self) -> None:
        ascending = self.lengths and list(self.lengths) == sorted({*self.lengths})
        if not ascending or self.lengths[0] < 1 or self.halvings < 0:
            raise UserError(
                f"layout.lengths is {self.lengths} and layout.halvings {self.halvings}: lengths "
                "ascend from 1 or more, halvings are 0 or more"
            )

    def length(self, size: int) -> int:
        """The smallest row length that holds `size` tokens."""
        return next(n for n in self.lengths if size <= n)

    def count(self, length: int, ways: int = 1) -> int:
        """Rows of a length in a batch that `ways` devices share."""
        return max(1, self.tokens // length) * ways

    def fewest(self, used: int, length: int, ways: int) -> int:
        """The smallest number of rows that a batch with `used` of them may have."""
        full = self.count(length, ways) // ways
        sizes = (ways * -(-full // 2**n) for n in range(self.halvings + 1))
        return min(size for size in sizes if size >= used)


class Rows(NamedTuple):
    """A static-shape batch; every array begins with the rows, so that it shards over them.

    Fields, int32 unless said:
      ids_RL, positions_RL: tokens, and how many of its context precede each.
      until_RL: the place in the row from which a token is no longer seen. None where every row of
        the batch holds one context alone: all that comes after a token sees it.
      source_RM: the places that predict the scored tokens. target_RM: those tokens.
      mask_RM: bool, False on padding. M is L: a row has no more scored tokens than that.
      role_RM: whose each scored token is, where a role's grammar may forbid tokens.
    """

    ids_RL: Tensor
    positions_RL: Tensor
    until_RL: Tensor
    source_RM: Tensor
    target_RM: Tensor
    mask_RM: Tensor
    role_RM: Tensor = None


class Actions(NamedTuple):
    """Whose the scored tokens of a batch are, int32 on the host: action `a` is `node_A[a]`, of role
    `role_A[a]`, and owns `size_A[a]` scored tokens of row `row_A[a]` from `first_A[a]` on.

    `after_A[a]` is the node that it follows in a conversation, or -1."""

    node_A: np.ndarray
    role_A: np.ndarray
    row_A: np.ndarray
    first_A: np.ndarray
    size_A: np.ndarray
    after_A: np.ndarray

    def places(self, width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Index arrays `[A, T]`, row and scored token, and which of them are real; T is `width`."""
        step_1T = np.arange(width)[None]
        mask_AT = step_1T < self.size_A[:, None]
        at_AT = np.where(mask_AT, self.first_A[:, None] + step_1T, 0)
        return np.broadcast_to(self.row_A[:, None], at_AT.shape), at_AT, mask_AT


class Batch(NamedTuple):
    """Rows for a device, and on the host whose they are."""

    rows: Rows
    actions: Actions


def turns_of(forest: Forest, weight_N: np.ndarray, *, forced: bool = True) -> list[Turn]:
    """The turns to train: they wrote tokens, some leaf is reachable from them (`weight_N` is
    positive), and, with `forced` False, they were sampled."""
    turns: dict[int, Turn] = {}
    for node, record in enumerate(forest.records):
        action = record.action
        if action is None or not action.ids or not action.prompt_ids:
            continue
        if weight_N[node] > 0 and (forced or not record.forced):
            turn = Turn(node, record.role, action.prompt_ids, action.ids)
            turns[node] = turn._replace(after=_before(turn, turns, forest.parent_N))
    return list(turns.values())


def _before(turn: Turn, turns: Mapping[int, Turn], parent_N: np.ndarray) -> int:
    """The nearest ancestor whose context the prompt of a turn begins with; -1: none."""
    node = int(parent_N[turn.node])
    while node >= 0:
        if node in turns:
            context = turns[node].context()
            if turn.prompt[: len(context)] == context:
                return node
        node = int(parent_N[node])
    return -1


def grouped(turns: Sequence[Turn], layout: Layout) -> list[Group]:
    """Turns by the prompt that their contexts begin with, each group no larger than a row.

    A group that is larger is cut into several, which repeat what they share. A turn that is alone
    longer than the longest row is left out.
    """
    longest = layout.lengths[-1]
    fitting = [turn for turn in turns if len(turn.prompt) + len(turn.ids) <= longest]
    families: list[list[Turn]] = []
    root: tuple[int, ...] = ()
    for turn in sorted(fitting, key=lambda turn: turn.prompt):
        if not families or turn.prompt[: len(root)] != root:
            root = turn.prompt
            families.append([])
        families[-1].append(turn)
    return [group for family in families for group in _cut(family, longest)]


def _cut(family: list[Turn], longest: int) -> list[Group]:
    """A family in as few groups as following the order of its contexts gives."""
    groups: list[Group] = []
    last: tuple[int, ...] = ()
    for turn in sorted(family, key=Turn.context):
        context = turn.context()
        if groups:
            new = len(context) - shared(last, context)
            grown = Group((*groups[-1].turns, turn), groups[-1].tokens + new)
        if groups and max(grown.tokens, grown.scored()) <= longest:
            groups[-1] = grown
        else:
            groups.append(Group((turn,), len(context)))
        last = context
    return groups


def shared(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """How many ids two contexts begin with alike."""
    most = min(len(a), len(b))
    if a[:most] == b[:most]:
        return most
    return bisect.bisect_left(range(1, most), True, key=lambda n: a[:n] != b[:n])


@dataclasses.dataclass
class _Row:
    length: int
    groups: list[Group] = dataclasses.field(default_factory=list)


class _Room:
    """What rows have left, as arrays: every group asks all rows that are open."""

    def __init__(self, headers: Mapping[str, int]) -> None:
        self._headers, self.rows = headers, list[_Row]()
        self._tokens_R, self._scored_R = np.zeros(0, np.int64), np.zeros(0, np.int64)
        self._saved_R = {role: np.zeros(0, np.int64) for role in headers}

    def open(self, length: int, count: int) -> None:
        """More rows, all empty."""
        self.rows += [_Row(length) for _ in range(count)]
        more_R, none_R = np.full(count, length), np.zeros(count, np.int64)
        self._tokens_R = np.append(self._tokens_R, more_R)
        self._scored_R = np.append(self._scored_R, more_R)
        self._saved_R = {role: np.append(x, none_R) for role, x in self._saved_R.items()}

    def find(self, tokens: int, scored: int, role: str) -> int | None:
        """The first row with room; what its role always begins with is in a row once."""
        free_R = self._tokens_R + self._saved_R[role]
        found = np.flatnonzero((free_R >= tokens) & (self._scored_R >= scored))[:1]
        return int(found[0]) if len(found) else None

    def put(self, group: Group, row: int) -> None:
        """Writes a group into a row that has room for it."""
        self._tokens_R[row] -= group.tokens - self._saved_R[group.role][row]
        self._scored_R[row] -= group.scored()
        self._saved_R[group.role][row] = self._headers[group.role]
        self.rows[row].groups.append(group)


def lay_out(
    groups: Sequence[Group], roles: Sequence[str], layout: Layout, ways: int = 1
) -> list[Batch]:
    """First-fit-decreasing packing of groups into batches of rows of one length each.

    Opening a row opens its whole batch, which is full before another is opened: the last one alone
    may have fewer rows (`Layout.fewest`). The number of rows of a batch is a multiple of `ways`,
    the devices that share it.
    """
    room, starts = _Room(_headers(groups)), list[int]()
    for group in sorted(groups, key=lambda g: max(g.tokens, g.scored()), reverse=True):
        row = room.find(group.tokens, group.scored(), group.role)
        if row is None:
            row, length = len(room.rows), layout.length(max(group.tokens, group.scored()))
            starts.append(row)
            room.open(length, layout.count(length, ways))
        room.put(group, row)
    batches = [room.rows[i:j] for i, j in zip(starts, [*starts[1:], None], strict=False)]
    return [_batch(_used(rows, layout, ways), roles) for rows in batches]


def _used(rows: Sequence[_Row], layout: Layout, ways: int) -> Sequence[_Row]:
    used = sum(bool(row.groups) for row in rows)
    return rows[: layout.fewest(used, rows[0].length, ways)]


def _headers(groups: Sequence[Group]) -> dict[str, int]:
    """By role, how many ids all its groups begin with: its instructions."""
    prompts: dict[str, list[tuple[int, ...]]] = {}
    for group in groups:
        prompts.setdefault(group.role, []).append(group.turns[0].prompt)
    # What the first and the last in order share, all share.
    return {role: shared(min(some), max(some)) for role, some in prompts.items()}


def _batch(rows: Sequence[_Row], roles: Sequence[str]) -> Batch:
    shape = (len(rows), rows[0].length)
    arrays = Rows(*(np.zeros(shape, bool if f == "mask_RM" else np.int32) for f in Rows._fields))
    arrays.until_RL[:] = np.arange(1, shape[1] + 1)
    actions = [action for r, row in enumerate(rows) for action in _write(arrays, r, row.groups)]
    owners = [(turn.node, roles.index(turn.role), *place, turn.after) for turn, *place in actions]
    for _, role, row, first, size, _ in owners:
        arrays.role_RM[row, first : first + size] = role
    if shape[1] >= PLAIN_FROM and _plain(arrays.until_RL):
        arrays = arrays._replace(until_RL=None)
    return Batch(arrays, Actions(*np.array(owners, np.int32).reshape(-1, 6).T))


def _plain(until_RL: np.ndarray) -> bool:
    """Whether every row holds one context, or none, before its padding."""
    after_L = np.arange(1, until_RL.shape[1] + 1)
    return bool((until_RL == np.maximum(after_L, until_RL[:, :1])).all())


def _write(rows: Rows, r: int, groups: Sequence[Group]) -> list[tuple[Turn, int, int, int]]:
    """Writes the prefix tree of some groups into row `r`; each turn's row, first and number."""
    placed = []
    before: tuple[int, ...] = ()
    path: list[int] = []  # the places of the tokens of the last context
    end = scored = 0
    for turn in sorted((turn for g in groups for turn in g.turns), key=Turn.context):
        context, start = turn.context(), end
        kept = shared(before, context)
        end += len(context) - kept
        rows.until_RL[r, path[kept:]] = start
        path[kept:] = range(start, end)
        rows.ids_RL[r, start:end] = context[kept:]
        rows.positions_RL[r, start:end] = np.arange(kept, len(context))
        span = slice(scored, scored + len(turn.ids))
        rows.source_RM[r, span] = path[len(turn.prompt) - 1 : -1]
        rows.target_RM[r, span] = turn.ids
        rows.mask_RM[r, span] = True
        placed.append((turn, r, scored, len(turn.ids)))
        before, scored = context, span.stop
    rows.until_RL[r, path] = end
    return placed


def width_of(batches: Sequence[Batch], multiple: int) -> int:
    """T: the longest action, rounded up so that few shapes are compiled."""
    longest = max((int(b.actions.size_A.max(initial=1)) for b in batches), default=1)
    return -(-longest // multiple) * multiple


def by_action(batches: Sequence[Batch], values: Sequence[np.ndarray], width: int) -> np.ndarray:
    """Numbers of scored tokens, `[R, M]` a batch, as one array `[A, T]`; 0 past an action's end."""
    parts = []
    for batch, x_RM in zip(batches, values, strict=True):
        row_AT, at_AT, mask_AT = batch.actions.places(width)
        parts.append(np.where(mask_AT, x_RM[row_AT, at_AT], 0))
    return np.concatenate(parts)


def by_row(batches: Sequence[Batch], x_AT: np.ndarray) -> list[np.ndarray]:
    """The inverse of `by_action`: one array `[R, M]` a batch, 0 where nothing is scored."""
    bounds = np.cumsum([len(batch.actions.node_A) for batch in batches])[:-1]
    out = []
    for batch, part_AT in zip(batches, np.split(x_AT, bounds), strict=True):
        row_AT, at_AT, mask_AT = batch.actions.places(x_AT.shape[1])
        x_RM = np.zeros(batch.rows.mask_RM.shape, x_AT.dtype)
        x_RM[row_AT[mask_AT], at_AT[mask_AT]] = part_AT[mask_AT]
        out.append(x_RM)
    return out


def joined(batches: Sequence[Batch]) -> Actions:
    """The actions of several batches, in order; rows count within their batch."""
    return Actions(*(np.concatenate(x) for x in zip(*(b.actions for b in batches), strict=True)))


def conversations(actions: Actions) -> list[list[int]]:
    """Actions in the order of their conversations, one list for each last turn.

    A turn with several continuations is in several lists. What follows an action that is not here
    begins a conversation.
    """
    index = {node: a for a, node in enumerate(actions.node_A.tolist())}
    before = [index.get(node, -1) for node in actions.after_A.tolist()]
    paths = []
    for a in sorted(set(range(len(before))) - set(before)):
        path = [a]
        while before[path[-1]] >= 0:
            path.append(before[path[-1]])
        paths.append(path[::-1])
    return paths


def masks(batches: Sequence[Batch], width: int) -> np.ndarray:
    """Which tokens of `by_action` are real: bool `[A, T]`."""
    return np.concatenate([batch.actions.places(width)[2] for batch in batches])
