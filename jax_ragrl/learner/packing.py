"""Packs the turns of a forest into rows of prefix trees, each shared prefix stored once per row.

A *context* is the full token sequence of a turn: its prompt, then the tokens it wrote. The contexts
of a row are sorted, so each one follows the context it has most in common with, and only the
remainder is written. A token is visible from its own place up to the place where its last
descendant ends (`until_RL`), and its position is its depth in the tree.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from jax_ragrl.config.ranges import Count, Lengths, Natural
from jax_ragrl.errors import UserError
from jax_ragrl.learner.grammars import RoleGrammars
from jax_ragrl.rollout.tree import Forest
from jax_ragrl.types import Tensor

# From this row length on, a batch in which every row holds a single context is compiled without a
# mask. Shorter rows gain too little to be worth a second program.
PLAIN_FROM = 1024

Item = TypeVar("Item")


class Turn(NamedTuple):
    """One training sample: the tokens `ids` that a role wrote after `prompt`, which is not empty.

    `node` is its number in the forest. `previous` is the node of the earlier turn of the
    conversation whose context the prompt begins with, or -1. `credit` is its return or advantage,
    see `Objective.advantage`. `behaviour_logps` are the sampler's log-probabilities in nats; empty
    if no sampler wrote the tokens (forced actions, demonstrations).
    """

    node: int
    role: str
    prompt: tuple[int, ...]
    ids: tuple[int, ...]
    previous: int = -1
    credit: float = 0.0
    behaviour_logps: tuple[float, ...] = ()

    def context(self) -> tuple[int, ...]:
        return self.prompt + self.ids


class Group(NamedTuple):
    """Turns whose contexts begin with one prompt, sorted by context.

    `tokens` is the number of distinct tokens: a common prefix counts once.
    """

    turns: tuple[Turn, ...]
    tokens: int

    @property
    def role(self) -> str:
        return self.turns[0].role

    def scored_tokens(self) -> int:
        """Number of scored tokens: equal turns share their tokens, but each is scored."""
        return sum(len(turn.ids) for turn in self.turns)


@dataclasses.dataclass(frozen=True)
class Layout:
    """Static shapes of packed batches.

    Fields:
      row_lengths: allowed row lengths in tokens, ascending.
      tokens_per_device: tokens per batch and device; a batch has `tokens_per_device // length` rows
        per device.
      max_batch_halvings: the last batch of an update may be partly empty; its number of rows is
        then halved up to this many times. Each length is compiled once, and once more per halving;
        twice as often from length `PLAIN_FROM` on.
    """

    row_lengths: Lengths = (128, 256, 512, 1024, 2048, 4096)
    tokens_per_device: Count = 8192
    max_batch_halvings: Natural = 0

    def __post_init__(self) -> None:
        ascending = self.row_lengths and list(self.row_lengths) == sorted({*self.row_lengths})
        if not ascending or self.row_lengths[0] < 1 or self.max_batch_halvings < 0:
            raise UserError(
                f"packing.row_lengths is {self.row_lengths} and packing.max_batch_halvings is "
                f"{self.max_batch_halvings}: lengths must ascend from 1 or more, and halvings must "
                "be 0 or more"
            )

    def coarse(self, free: int) -> Layout:
        """Returns one shape if a batch takes negligible time: `free` tokens per device."""
        longest = self.row_lengths[-1]
        if max(longest, self.tokens_per_device) > free:
            return self
        return dataclasses.replace(self, row_lengths=(longest,), max_batch_halvings=0)

    def length(self, size: int) -> int:
        return next(n for n in self.row_lengths if size <= n)

    def count(self, length: int, devices: int = 1) -> int:
        """Returns the rows of a full batch of a row length, over all `devices` that share it."""
        return max(1, self.tokens_per_device // length) * devices

    def counts(self, length: int, devices: int = 1) -> list[int]:
        """Returns the numbers of rows that a batch of a row length may have, descending."""
        full = self.count(length, devices) // devices
        sizes = (devices * -(-full // 2**n) for n in range(self.max_batch_halvings + 1))
        return sorted({*sizes}, reverse=True)

    def fewest(self, rows_in_use: int, length: int, devices: int) -> int:
        return min(n for n in self.counts(length, devices) if n >= rows_in_use)


class Rows(NamedTuple):
    """A static-shape batch; the first axis of every array is the rows, which devices share.

    Fields, int32 unless a dtype is given:
      ids_RL: tokens.
      positions_RL: number of tokens before each token in its context.
      until_RL: first place in the row from which a token is no longer visible. None if every row
        of the batch holds a single context: then each token is visible to all later ones.
      source_RM: the places whose hidden states predict the scored tokens.
      target_RM, mask_RM: the scored tokens, and bool, False on padding. M equals L.
      state_RM: the state of the grammar before each scored token, used if there is one: its role
        number, or a state of the automaton of strict grammars.
      budget_RM: the tokens that the action could still have before each scored token, this one
        included; None without strict grammars.
    """

    ids_RL: Tensor
    positions_RL: Tensor
    until_RL: Tensor
    source_RM: Tensor
    target_RM: Tensor
    mask_RM: Tensor
    state_RM: Tensor = None
    budget_RM: Tensor = None


def shape_of(rows: Rows) -> str:
    return " x ".join(map(str, rows.ids_RL.shape))


class Actions(NamedTuple):
    """The owners of the scored tokens of a batch, on the host; int32 except `credit_A`, float32.

    Action `a` is node `node_A[a]` of role number `role_A[a]`. It owns `size_A[a]` scored tokens of
    row `row_A[a]`, starting at `first_A[a]`. `previous_A[a]` is the node that it continues in a
    conversation, or -1. `credit_A[a]` is the credit of its turn.
    """

    node_A: np.ndarray
    role_A: np.ndarray
    row_A: np.ndarray
    first_A: np.ndarray
    size_A: np.ndarray
    previous_A: np.ndarray
    credit_A: np.ndarray

    def places(self, width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns row numbers, scored-token numbers and a mask of real tokens, all `[A, width]`."""
        step_1T = np.arange(width)[None]
        mask_AT = step_1T < self.size_A[:, None]
        at_AT = np.where(mask_AT, self.first_A[:, None] + step_1T, 0)
        return np.broadcast_to(self.row_A[:, None], at_AT.shape), at_AT, mask_AT


class Batch(NamedTuple):
    """Rows for the devices; on the host, the actions that own their scored tokens.

    `behaviour_logp_RM` float32: the sampler's log-probabilities, NaN if no sampler wrote the token.
    """

    rows: Rows
    actions: Actions
    behaviour_logp_RM: np.ndarray


def turns_of(
    forest: Forest, credit_N: np.ndarray, weight_N: np.ndarray, *, include_forced: bool = True
) -> list[Turn]:
    """Returns the turns of a forest to train, each with its credit.

    Args:
      credit_N: float32, one number per node.
      weight_N: float32, positive if some leaf is reachable from the node; others are left out.
      include_forced: whether actions that the policy has not sampled are trained too.

    Raises:
      UserError: the credit of a node with a positive weight is no finite number.
    """
    turns: dict[int, Turn] = {}
    is_trained_N = (forest.multiplicity_N > forest.forced_N) | include_forced
    for node, record in enumerate(forest.records):
        action = record.action
        if action is None or not action.ids or not action.prompt_ids:
            continue
        if weight_N[node] > 0 and is_trained_N[node]:
            if not np.isfinite(credit_N[node]):
                question = forest.questions[record.question]
                raise UserError(
                    f"the credit of role {record.role!r} for question {question.id!r} is "
                    f"{credit_N[node]}: it would make the advantages of the whole batch undefined. "
                    "Let the credit rule return a finite number, or the weight 0 for the node"
                )
            turn = Turn(
                node,
                record.role,
                action.prompt_ids,
                action.ids,
                credit=float(credit_N[node]),
                behaviour_logps=action.logps or (),
            )
            # Nodes are in topological order, so all ancestors are in `turns` already.
            turns[node] = turn._replace(previous=_previous(turn, turns, forest.parent_N))
    return list(turns.values())


def carry_credit(
    turns: Sequence[Turn], forest: Forest, credit_N: np.ndarray, longest: int
) -> list[Turn]:
    """Returns the turns of `turns_of` with the immediate rewards of turns that are not trained.

    The reward of a turn that is left out, such as one whose context exceeds a row of `longest`
    tokens, goes to the nearest ancestor that is trained.
    """
    nodes = {t.node for t in turns if len(t.prompt) + len(t.ids) <= longest}
    more: dict[int, float] = collections.defaultdict(float)
    for node in np.flatnonzero(credit_N).tolist():
        ancestor = node
        while ancestor >= 0 and ancestor not in nodes:
            ancestor = int(forest.parent_N[ancestor])
        if ancestor != node:
            more[ancestor] += float(credit_N[node])
    return [turn._replace(credit=turn.credit + more[turn.node]) for turn in turns]


def _previous(turn: Turn, turns: Mapping[int, Turn], parent_N: np.ndarray) -> int:
    """Returns the nearest ancestor whose context the prompt begins with; -1 if there is none."""
    node = int(parent_N[turn.node])
    while node >= 0:
        context = turns[node].context() if node in turns else None
        if context is not None and turn.prompt[: len(context)] == context:
            break
        node = int(parent_N[node])
    return node


def group_turns(turns: Sequence[Turn], layout: Layout) -> list[Group]:
    """Groups turns by the prompt that their contexts begin with; no group exceeds a row.

    A larger group is cut into several, each of which repeats the common prefix. A turn that alone
    exceeds the longest row is left out.
    """
    longest = layout.row_lengths[-1]
    fitting = [turn for turn in turns if len(turn.prompt) + len(turn.ids) <= longest]
    families: list[list[Turn]] = []
    root: tuple[int, ...] = ()
    # A prompt sorts directly before all prompts that begin with it, so one pass finds each family.
    for turn in sorted(fitting, key=lambda turn: turn.prompt):
        if not families or turn.prompt[: len(root)] != root:
            root = turn.prompt
            families.append([])
        families[-1].append(turn)
    return [group for family in families for group in _cut_family(family, longest)]


def _cut_family(family: list[Turn], longest: int) -> list[Group]:
    """Cuts a family greedily, in the order of its contexts, into groups that fit a row."""
    groups: list[Group] = []
    last: tuple[int, ...] = ()
    for turn in sorted(family, key=Turn.context):
        context = turn.context()
        if groups:
            new = len(context) - common_prefix(last, context)
            larger = Group((*groups[-1].turns, turn), groups[-1].tokens + new)
        if groups and max(larger.tokens, larger.scored_tokens()) <= longest:
            groups[-1] = larger
        else:
            groups.append(Group((turn,), len(context)))
        last = context
    return groups


def common_prefix(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    most = min(len(a), len(b))
    if a[:most] == b[:most]:
        return most
    # Equality of prefixes is monotonic in their length: compare slices, log(n) times.
    return bisect.bisect_left(range(1, most), True, key=lambda n: a[:n] != b[:n])


@dataclasses.dataclass
class _Row:
    length: int
    groups: list[Group] = dataclasses.field(default_factory=list)


class _OpenRows:
    # Free space per row is in arrays: every group is compared with all open rows at once.
    def __init__(self, headers: Mapping[str, int]) -> None:
        self._headers, self.rows = headers, list[_Row]()
        self._tokens_R, self._scored_R = np.zeros(0, np.int64), np.zeros(0, np.int64)
        self._saved_R = {role: np.zeros(0, np.int64) for role in headers}

    def open(self, length: int, count: int) -> None:
        self.rows += [_Row(length) for _ in range(count)]
        more_R, none_R = np.full(count, length), np.zeros(count, np.int64)
        self._tokens_R = np.append(self._tokens_R, more_R)
        self._scored_R = np.append(self._scored_R, more_R)
        self._saved_R = {role: np.append(x, none_R) for role, x in self._saved_R.items()}

    def find(self, tokens: int, scored_tokens: int, role: str) -> int | None:
        # The header of a role (see `_headers`) occupies a row once, however many groups share it.
        free_R = self._tokens_R + self._saved_R[role]
        fits_R = np.flatnonzero((free_R >= tokens) & (self._scored_R >= scored_tokens))[:1]
        return int(fits_R[0]) if len(fits_R) else None

    def put(self, group: Group, row: int) -> None:
        self._tokens_R[row] -= group.tokens - self._saved_R[group.role][row]
        # The number of scored tokens is limited too: M equals L.
        self._scored_R[row] -= group.scored_tokens()
        self._saved_R[group.role][row] = self._headers[group.role]
        self.rows[row].groups.append(group)


def lay_out(
    groups: Sequence[Group],
    roles: Sequence[str],
    layout: Layout,
    devices: int = 1,
    grammars: RoleGrammars | None = None,
) -> list[Batch]:
    """Packs groups of `group_turns` into batches of rows of one length (first-fit decreasing).

    The first group that fits nowhere opens a whole batch of rows, and no other batch is opened
    before that one is full. Only the last batch may have fewer rows (`Layout.fewest`).

    Args:
      roles: names of all roles; `Actions.role_A` holds indices into them.
      devices: data-parallel devices; the number of rows of each batch is a multiple of it.
    """
    open_rows, starts = _OpenRows(_headers(groups)), list[int]()
    # Large groups first: small ones then fill the gaps.
    for group in sorted(groups, key=lambda g: max(g.tokens, g.scored_tokens()), reverse=True):
        row = open_rows.find(group.tokens, group.scored_tokens(), group.role)
        if row is None:
            row = len(open_rows.rows)
            length = layout.length(max(group.tokens, group.scored_tokens()))
            starts.append(row)
            open_rows.open(length, layout.count(length, devices))
        open_rows.put(group, row)
    batches = [open_rows.rows[i:j] for i, j in zip(starts, [*starts[1:], None], strict=False)]
    for i, rows in enumerate(batches):
        rows_in_use = sum(bool(row.groups) for row in rows)
        batches[i] = rows[: layout.fewest(rows_in_use, rows[0].length, devices)]
    return [_batch(rows, roles, grammars) for rows in batches]


def _headers(groups: Sequence[Group]) -> dict[str, int]:
    """Returns, by role, the length of the prefix that all its groups share: its instructions."""
    prompts: dict[str, list[tuple[int, ...]]] = {}
    for group in groups:
        prompts.setdefault(group.role, []).append(group.turns[0].prompt)
    # In sorted order, the prefix that the first and the last prompt share is in all of them.
    return {role: common_prefix(min(some), max(some)) for role, some in prompts.items()}


def _batch(
    rows: Sequence[_Row], roles: Sequence[str], grammars: RoleGrammars | None = None
) -> Batch:
    shape = (len(rows), rows[0].length)
    arrays = Rows(*(np.zeros(shape, bool if f == "mask_RM" else np.int32) for f in Rows._fields))
    arrays.until_RL[:] = np.arange(1, shape[1] + 1)  # padding is visible to itself only
    behaviour_logp_RM = np.full(shape, np.nan, np.float32)
    entries = [item for r, row in enumerate(rows) for item in _write(arrays, r, row.groups)]
    owners = [(t.node, roles.index(t.role), *place, t.previous) for t, *place in entries]
    for (_, role, row, first, size, _), (turn, *_) in zip(owners, entries, strict=True):
        arrays.state_RM[row, first : first + size] = role
        if grammars is not None:
            places = grammars.places(role, turn.ids, was_sampled=bool(turn.behaviour_logps))
            arrays.state_RM[row, first : first + size] = places[0]
            arrays.budget_RM[row, first : first + size] = places[1]
        if turn.behaviour_logps:
            behaviour_logp_RM[row, first : first + size] = turn.behaviour_logps
    if grammars is None:
        arrays = arrays._replace(budget_RM=None)
    # Whether every row holds at most one context before its padding.
    after_L = np.arange(1, shape[1] + 1)
    is_plain = (arrays.until_RL == np.maximum(after_L, arrays.until_RL[:, :1])).all()
    if shape[1] >= PLAIN_FROM and is_plain:
        arrays = arrays._replace(until_RL=None)
    credit_A = np.array([turn.credit for turn, *_ in entries], np.float32)
    columns = np.array(owners, np.int32).reshape(-1, 6).T
    return Batch(arrays, Actions(*[*columns, credit_A]), behaviour_logp_RM)


def _write(rows: Rows, r: int, groups: Sequence[Group]) -> list[tuple[Turn, int, int, int]]:
    entries = []  # per turn: the turn, its row, its first scored token and their number
    before: tuple[int, ...] = ()
    path: list[int] = []  # places of the tokens of the previous context
    end = count = 0
    for turn in sorted((turn for g in groups for turn in g.turns), key=Turn.context):
        context, start = turn.context(), end
        prefix = common_prefix(before, context)
        # 1. The tokens of the previous context beyond the common prefix have no further descendant.
        rows.until_RL[r, path[prefix:]] = start
        # 2. The remainder of this context follows.
        end += len(context) - prefix
        path[prefix:] = range(start, end)
        rows.ids_RL[r, start:end] = context[prefix:]
        rows.positions_RL[r, start:end] = np.arange(prefix, len(context))
        # 3. Each scored token is predicted from the place before it, which may be shared.
        span = slice(count, count + len(turn.ids))
        rows.source_RM[r, span] = path[len(turn.prompt) - 1 : -1]
        rows.target_RM[r, span] = turn.ids
        rows.mask_RM[r, span] = True
        entries.append((turn, r, count, len(turn.ids)))
        before, count = context, span.stop
    rows.until_RL[r, path] = end
    return entries


@dataclasses.dataclass(frozen=True)
class Minibatches:
    """The minibatches of an update, and the layout of their actions as arrays `[A, T]`.

    Credit, advantages and weights are per action (`[A, T]`, the actions of all minibatches in
    order), models and losses are per row (`[R, M]` per batch): this class converts between both. T
    is rounded up to a `multiple`, so that few shapes are compiled.

    Fields:
      parts: the batches of each minibatch.
      share_PZ: float32, by minibatch and role: the factor of the loss weights, below 1 if groups
        without a gradient were left out; None: 1.
      skipped_tokens: distinct tokens of the groups that were left out.
    """

    parts: Sequence[Sequence[Batch]]
    multiple: int = 32
    share_PZ: np.ndarray | None = None
    skipped_tokens: int = 0

    @functools.cached_property
    def batches(self) -> list[Batch]:
        return [batch for part in self.parts for batch in part]

    @functools.cached_property
    def actions(self) -> Actions:
        """The actions of all batches, in order; `row_A` counts within each batch."""
        fields = zip(*(batch.actions for batch in self.batches), strict=True)
        return Actions(*(np.concatenate(x) for x in fields))

    @functools.cached_property
    def width(self) -> int:
        """T: the length of the longest action, rounded up."""
        return -(-int(self.actions.size_A.max(initial=1)) // self.multiple) * self.multiple

    def mask(self) -> np.ndarray:
        """Whether a token is part of an action, bool `[A, T]`."""
        return self.actions.places(self.width)[2]

    def shares(self) -> np.ndarray:
        """Returns the factor of the loss weights of each action, float32 `[A]`."""
        if self.share_PZ is None:
            return np.ones(len(self.actions.role_A), np.float32)
        role_by_part = self.by_part(self.actions.role_A)
        pairs = zip(self.share_PZ, role_by_part, strict=True)
        return np.concatenate([share_Z[role_A] for share_Z, role_A in pairs])

    def by_action(self, values: Sequence[np.ndarray]) -> np.ndarray:
        """Gathers numbers per scored token, `[R, M]` per batch, into one `[A, T]`; padding is 0."""
        parts = []
        for batch, x_RM in zip(self.batches, values, strict=True):
            row_AT, at_AT, mask_AT = batch.actions.places(self.width)
            parts.append(np.where(mask_AT, x_RM[row_AT, at_AT], 0))
        return np.concatenate(parts)

    def by_row(self, x_AT: np.ndarray) -> list[np.ndarray]:
        """Inverts `by_action`: one array `[R, M]` per batch, 0 on padding."""
        out = []
        for batch, part_AT in zip(self.batches, self._by_batch(x_AT), strict=True):
            row_AT, at_AT, mask_AT = batch.actions.places(self.width)
            x_RM = np.zeros(batch.rows.mask_RM.shape, x_AT.dtype)
            x_RM[row_AT[mask_AT], at_AT[mask_AT]] = part_AT[mask_AT]
            out.append(x_RM)
        return out

    def by_part(self, x_A: np.ndarray) -> list[np.ndarray]:
        """Splits an array `[A, ...]` into the actions of each minibatch."""
        return [np.concatenate(pieces) for pieces in self.regroup(self._by_batch(x_A))]

    def regroup(self, items: Sequence[Item]) -> list[list[Item]]:
        """Splits a list with one item per batch into the batches of each minibatch."""
        rest = iter(items)
        return [[next(rest) for _ in part] for part in self.parts]

    def _by_batch(self, x_A: np.ndarray) -> list[np.ndarray]:
        bounds = np.cumsum([len(batch.actions.node_A) for batch in self.batches])[:-1]
        return np.split(x_A, bounds)


def conversations(actions: Actions) -> list[list[int]]:
    """Returns the actions of each conversation in order, one list per last turn.

    A turn with several continuations is in several lists.
    """
    index = {node: a for a, node in enumerate(actions.node_A.tolist())}
    previous = [index.get(node, -1) for node in actions.previous_A.tolist()]
    paths = []
    # Actions that no other action continues end a conversation.
    for a in sorted(set(range(len(previous))) - set(previous)):
        path = [a]
        while previous[path[-1]] >= 0:
            path.append(previous[path[-1]])
        paths.append(path[::-1])
    return paths
