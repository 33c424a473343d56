"""A forest becomes prefix-grouped rows: a prompt once, then the actions written after it.

Each action sees the prompt and itself, never its siblings, and its positions continue the prompt's.
A row with one action is the ordinary case. What pads is a segment of its own and weighs nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from jax_ragrl.rollout.tree import Forest, Record
from jax_ragrl.types import Tensor


class Group(NamedTuple):
    """Sibling actions: one prompt, the node numbers and the ids of the actions after it."""

    prompt: tuple[int, ...]
    nodes: tuple[int, ...]
    actions: tuple[tuple[int, ...], ...]
    role: str

    def size(self) -> int:
        """Tokens of the group in a row."""
        return len(self.prompt) + sum(map(len, self.actions))


class Rows(NamedTuple):
    """A static-shape batch of grouped rows. Actions are numbered over the whole batch.

    Fields:
      ids_RL, positions_RL: int32. segments_RL: int32, 0 padding, 1 prompt, 2 and up the actions.
      row_A: int32, the row of each action. source_AT: int32, the place in the row that predicts
      each token. target_AT: int32 the token. mask_AT: bool, True on tokens of real actions.
      node_A: int32 node number, -1 for padding actions. role_A: int32.
    """

    ids_RL: Tensor
    positions_RL: Tensor
    segments_RL: Tensor
    row_A: Tensor
    source_AT: Tensor
    target_AT: Tensor
    mask_AT: Tensor
    node_A: Tensor
    role_A: Tensor


@dataclasses.dataclass(frozen=True)
class Layout:
    """Static shapes: row lengths, tokens a batch of rows, actions a row, tokens an action."""

    lengths: tuple[int, ...] = (96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
    tokens: int = 8192
    siblings: int = 2
    action: int = 64

    def length(self, group: Group) -> int | None:
        """The smallest row length that holds a group; None where none does."""
        return next((n for n in self.lengths if group.size() <= n), None)


def groups_of(
    forest: Forest, weight_N: np.ndarray, layout: Layout, *, forced: bool = True
) -> list[Group]:
    """The trainable siblings of a forest, at most `layout.siblings` to a group.

    A node is trained if it wrote tokens, some leaf is reachable from it (`weight_N` positive), it
    is not longer than a row, and, with `forced` False, it was sampled.
    """
    siblings: dict[tuple[int, int, tuple[int, ...]], list[int]] = {}
    for node, record in enumerate(forest.records):
        if _trains(record, layout) and weight_N[node] > 0 and (forced or not record.forced):
            assert record.action is not None
            key = (record.question, record.parent, record.action.prompt_ids)
            siblings.setdefault(key, []).append(node)
    groups = [
        _group(forest, nodes[i : i + layout.siblings])
        for nodes in siblings.values()
        for i in range(0, len(nodes), layout.siblings)
    ]
    return [group for group in groups if layout.length(group) is not None]


def _trains(record: Record, layout: Layout) -> bool:
    return record.action is not None and 0 < len(record.action.ids) <= layout.action


def _group(forest: Forest, nodes: Sequence[int]) -> Group:
    records = [forest.records[n] for n in nodes]
    actions = [r.action for r in records if r.action is not None]
    return Group(
        actions[0].prompt_ids, tuple(nodes), tuple(a.ids for a in actions), records[0].role
    )


def lay_out(groups: Sequence[Group], roles: Sequence[str], layout: Layout) -> list[Rows]:
    """Groups as batches of rows, one group a row; a batch holds rows of one length."""
    by_length: dict[int, list[Group]] = {}
    for group in groups:
        length = layout.length(group)
        assert length is not None, "groups_of leaves out what does not fit"
        by_length.setdefault(length, []).append(group)
    batches = []
    for length, fitting in sorted(by_length.items()):
        count = max(1, layout.tokens // length)
        for i in range(0, len(fitting), count):
            batches.append(_rows(fitting[i : i + count], roles, length, count, layout))
    return batches


def _rows(
    groups: Sequence[Group], roles: Sequence[str], length: int, count: int, layout: Layout
) -> Rows:
    actions = count * layout.siblings
    rows = Rows(
        ids_RL=np.zeros((count, length), np.int32),
        positions_RL=np.zeros((count, length), np.int32),
        segments_RL=np.zeros((count, length), np.int32),
        row_A=np.zeros(actions, np.int32),
        source_AT=np.zeros((actions, layout.action), np.int32),
        target_AT=np.zeros((actions, layout.action), np.int32),
        mask_AT=np.zeros((actions, layout.action), bool),
        node_A=np.full(actions, -1, np.int32),
        role_A=np.zeros(actions, np.int32),
    )
    number = 0
    for r, group in enumerate(groups):
        _write(rows, r, 0, group.prompt, 0, 1)
        at = len(group.prompt)
        for k, (node, ids) in enumerate(zip(group.nodes, group.actions, strict=True)):
            _write(rows, r, at, ids, len(group.prompt), 2 + k)
            rows.row_A[number], rows.node_A[number] = r, node
            rows.role_A[number] = roles.index(group.role)
            size = len(ids)
            # The last token of the prompt predicts the first of every action.
            rows.source_AT[number, :size] = [len(group.prompt) - 1, *range(at, at + size - 1)]
            rows.target_AT[number, :size] = ids
            rows.mask_AT[number, :size] = True
            at, number = at + size, number + 1
    return rows


def _write(rows: Rows, r: int, at: int, ids: Sequence[int], position: int, segment: int) -> None:
    span = slice(at, at + len(ids))
    rows.ids_RL[r, span] = ids
    rows.positions_RL[r, span] = np.arange(position, position + len(ids))
    rows.segments_RL[r, span] = segment


def grouped_mask(segments_RL: Array) -> Array:
    """Who sees whom in grouped rows: bool `[R, L, L]`.

    Causal; every token sees the prompt (segment 1) and its own segment. Padding sees itself alone,
    so that its softmax stays finite.
    """
    length = segments_RL.shape[1]
    query_RL1, key_R1L = segments_RL[:, :, None], segments_RL[:, None, :]
    earlier_1LL = jnp.tril(jnp.ones((length, length), bool))[None]
    seen_RLL = ((key_R1L == 1) & (query_RL1 > 0)) | (key_R1L == query_RL1)
    itself_1LL = jnp.eye(length, dtype=bool)[None]
    return (earlier_1LL & seen_RLL & (key_R1L > 0)) | itself_1LL
