from __future__ import annotations

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_ragrl.corpus.world import generate
from jax_ragrl.learner import packing as batch_module
from jax_ragrl.learner.packing import (
    Batch,
    Layout,
    Turn,
    by_action,
    by_row,
    conversations,
    grouped,
    joined,
    lay_out,
    masks,
    shared,
    turns_of,
    width_of,
)
from jax_ragrl.models.attention import prefix_mask
from jax_ragrl.rollout.tree import Action, Record, plant

LAYOUT = Layout(lengths=(16, 32, 64), tokens=128)
ROLES = ("planner", "executor")
_mask = jax.jit(prefix_mask)


def conversation(rng: np.random.Generator, node: int, depth: int) -> list[Turn]:
    """Turns of one context: each prompt is the turn before it and an observation."""
    few = lambda most: tuple(rng.integers(1, 4, rng.integers(1, most)).tolist())  # noqa: E731
    turns, prompt = [], (7, 7, 7, *few(6))
    for _ in range(depth):
        turn = Turn(node + len(turns), ROLES[node % 2], prompt, few(5))
        turns.append(turn)
        prompt = turn.context() + few(4)
    return turns


def forest_of_turns(seed: int, count: int = 40) -> list[Turn]:
    """Conversations, siblings and copies over an alphabet of three, so that prefixes collide."""
    rng = np.random.default_rng(seed)
    turns: list[Turn] = []
    while len(turns) < count:
        turns += conversation(rng, len(turns), int(rng.integers(1, 4)))
        like = turns[rng.integers(len(turns))]
        turns.append(like._replace(node=len(turns), ids=(*like.ids[:1], int(rng.integers(1, 4)))))
        turns.append(turns[rng.integers(len(turns))]._replace(node=len(turns)))
    return turns


def readings(batch: Batch) -> dict[int, list[tuple[tuple[int, ...], int]]]:
    """By node, what each scored token is predicted from, as the mask and the positions say."""
    rows, actions = batch
    seen_RLL = jax.device_get(_mask(jax.device_put(rows.until_RL)))
    found: dict[int, list[tuple[tuple[int, ...], int]]] = {}
    for node, r, first, size in zip(
        actions.node_A, actions.row_A, actions.first_A, actions.size_A, strict=True
    ):
        for m in range(first, first + size):
            assert rows.mask_RM[r, m]
            source = rows.source_RM[r, m]
            places = np.flatnonzero(seen_RLL[r, source])
            assert rows.positions_RL[r, places].tolist() == list(range(len(places)))
            context = tuple(rows.ids_RL[r, places].tolist())
            found.setdefault(int(node), []).append((context, int(rows.target_RM[r, m])))
    return found


@pytest.mark.parametrize("seed", range(6))
def test_a_scored_token_is_predicted_from_its_context_and_nothing_else(seed):
    turns = forest_of_turns(seed)
    found: dict[int, list[tuple[tuple[int, ...], int]]] = {}
    for batch in lay_out(grouped(turns, LAYOUT), ROLES, LAYOUT):
        found |= readings(batch)
    for turn in turns:
        context, start = turn.context(), len(turn.prompt)
        expected = [(context[:i], context[i]) for i in range(start, len(context))]
        assert found.pop(turn.node) == expected
    assert not found


@pytest.mark.parametrize("seed", range(3))
def test_every_turn_is_scored_once_and_padding_never(seed):
    turns = forest_of_turns(seed)
    batches = lay_out(grouped(turns, LAYOUT), ROLES, LAYOUT)
    actions = joined(batches)
    assert sorted(actions.node_A.tolist()) == [turn.node for turn in turns]
    by_node = {turn.node: turn for turn in turns}
    for node, role, size in zip(actions.node_A, actions.role_A, actions.size_A, strict=True):
        assert ROLES[role] == by_node[int(node)].role and size == len(by_node[int(node)].ids)
    assert sum(int(b.rows.mask_RM.sum()) for b in batches) == sum(len(t.ids) for t in turns)


def test_siblings_hold_their_prompt_once_and_do_not_see_each_other():
    prompt = tuple(range(10, 20))
    turns = [Turn(k, "planner", prompt, (100 + k, 50, 60)) for k in range(3)]
    (group,) = grouped(turns, LAYOUT)
    assert group.tokens == 10 + 3 * 3
    (batch,) = lay_out([group], ROLES, LAYOUT)
    row = 0
    assert batch.rows.positions_RL[row, :19].tolist() == [*range(10), *[10, 11, 12] * 3]
    seen = jax.device_get(_mask(jax.device_put(batch.rows.until_RL)))[row]
    assert np.flatnonzero(seen[15]).tolist() == [*range(10), 13, 14, 15]
    assert np.flatnonzero(seen[20]).tolist() == [20]  # padding


def test_long_rows_that_hold_one_context_each_need_no_mask(monkeypatch):
    """A conversation is one context; siblings and what is packed beside another are several."""
    monkeypatch.setattr(batch_module, "PLAIN_FROM", 64)
    layout = Layout(lengths=(64,), tokens=128)
    first = Turn(0, "planner", tuple(range(10, 50)), (1, 2))
    later = Turn(1, "planner", first.context() + (3, 4), (5,), after=0)
    sibling = Turn(2, "planner", first.prompt, (6,))
    stranger = Turn(3, "planner", (7,) * 30, (8,))
    short = Turn(4, "planner", (9,) * 3, (9,))

    def plain(*turns: Turn) -> bool:
        (batch,) = lay_out(grouped(turns, layout), ROLES, layout)
        return batch.rows.until_RL is None

    assert plain(first) and plain(first, later) and plain(first, later, stranger)
    assert not plain(first, sibling) and not plain(first, stranger, short)
    monkeypatch.setattr(batch_module, "PLAIN_FROM", 65)
    assert not plain(first)


def test_a_conversation_is_in_a_row_once_whatever_was_observed_between_its_turns():
    """Four rollouts of three turns after one prompt: tokens add up to one copy of each."""
    prompt, turns = tuple(range(20)), []
    for k in range(4):
        context = prompt
        for _ in range(3):
            turns.append(Turn(len(turns), "planner", context, (100 + k, 101)))
            context = turns[-1].context() + (200, 201, 202)
    (group,) = grouped(turns, Layout(lengths=(80,), tokens=80))
    assert group.tokens == 20 + 4 * (3 * 2 + 2 * 3)
    assert sum(len(turn.context()) for turn in turns) == 4 * (22 + 27 + 32)


def test_a_group_longer_than_a_row_is_cut_and_scores_each_turn_once():
    prompt = tuple(range(10))
    turns = [Turn(k, "planner", prompt, (100 + k,) * 8) for k in range(9)]
    groups = grouped(turns, LAYOUT)
    assert [len(group.turns) for group in groups] == [6, 3]  # 10 + 6 * 8 = 58 of 64
    scored = [turn.node for group in groups for turn in group.turns]
    assert sorted(scored) == list(range(9))


def test_a_turn_longer_than_the_longest_row_is_left_out():
    turns = [Turn(0, "planner", tuple(range(60)), (1,) * 5), Turn(1, "planner", (1,), (2,) * 63)]
    (group,) = grouped(turns, LAYOUT)
    assert [turn.node for turn in group.turns] == [1] and group.tokens == 64


def test_copies_share_their_tokens_but_a_row_has_room_to_score_each():
    turns = [Turn(k, "planner", (1, 2), (3, 4, 5, 6)) for k in range(20)]
    groups = grouped(turns, LAYOUT)
    assert [group.tokens for group in groups] == [6, 6]  # 64 / 4 = 16 copies a row
    assert [group.scored() for group in groups] == [64, 16]


def test_rows_of_one_role_share_its_instructions():
    """Eight prompts of 30 tokens, 24 of them instructions, take two rows of 64, not four."""
    instructions = tuple(range(100, 124))
    turns = [Turn(k, "planner", (*instructions, *(k + 1,) * 6), (50 + k,) * 2) for k in range(8)]
    layout = Layout(lengths=(64,), tokens=64)
    batches = lay_out(grouped(turns, layout), ROLES, layout)
    assert len(batches) == 2
    used = [int((b.rows.until_RL != np.arange(1, 65)).sum()) for b in batches]
    assert all(n <= 64 for n in used)


def test_groups_in_any_order_fit_the_rows_they_are_put_in():
    """Minibatches are mixed: what the first and the last begin with, one between them may not."""
    instructions = tuple(range(100, 124))
    turns = [Turn(k, "planner", (*instructions, k), (50 + k,) * 2) for k in range(8)]
    stranger = Turn(8, "planner", tuple(range(25)), (5, 6))
    layout = Layout(lengths=(64,), tokens=64)
    groups = [*grouped(turns, layout), *grouped([stranger], layout)]
    batches = lay_out([*groups[:4], groups[-1], *groups[4:-1]], ROLES, layout)
    assert sum(int(b.rows.mask_RM.sum()) for b in batches) == 9 * 2


def test_an_opened_batch_is_filled_before_another_is_opened():
    layout = Layout(lengths=(16, 64), tokens=128)
    long = Turn(0, "planner", tuple(range(1, 61)), (5,))
    short = [Turn(k, "executor", (k, k, k), (k + 1,) * 5) for k in range(1, 9)]
    (batch,) = lay_out(grouped([long, *short], layout), ROLES, layout)
    assert batch.rows.ids_RL.shape == (2, 64)


@pytest.mark.parametrize(("ways", "sizes"), [(1, {1, 2, 3, 5, 9}), (4, {4, 8, 12, 20, 36})])
def test_only_the_last_batch_has_fewer_rows_and_those_of_few_sizes(ways, sizes):
    layout = Layout(lengths=(8,), tokens=9 * 8, halvings=9)
    for count in range(1, 30):
        turns = [Turn(k, "planner", (k, k, k), (1,) * 5) for k in range(count)]
        rows = [len(b.rows.ids_RL) for b in lay_out(grouped(turns, layout), ROLES, layout, ways)]
        full = layout.count(8, ways)
        last = count - full * (len(rows) - 1)
        assert rows[:-1] == [full] * (len(rows) - 1)
        assert rows[-1] == min(size for size in sizes if size >= last)


def test_a_job_that_is_never_halved_has_batches_of_one_size():
    layout = Layout(lengths=(8,), tokens=9 * 8)
    turn = Turn(0, "planner", (1,), (1,))
    assert len(lay_out(grouped([turn], layout), ROLES, layout)[0].rows.ids_RL) == 9


def test_conversations_are_the_paths_of_turns_that_continue_each_other():
    """Turn 1 continues 0 through another role's turn, 2 does too; 4 is not trained, nor is 5."""
    (question,) = generate(0, 40).questions["train"][:1]
    acts = [(1, 2), (9, 9), (1, 2, 3, 7), (1, 2, 3, 8), (1, 2, 3, 8), (1, 2, 3, 8, 3, 7)]
    parents = [-1, 0, 1, 1, 0, 4]
    records = [
        Record(parent, 0, "planner", 1, (k,), Action(prompt, (3,), "a"))
        for k, (prompt, parent) in enumerate(zip(acts, parents, strict=True))
    ]
    forest = plant((question,), records)
    turns = turns_of(forest, np.array([1, 1, 1, 1, 0, 0], np.float32))
    assert [(turn.node, turn.after) for turn in turns] == [(0, -1), (1, -1), (2, 0), (3, 0)]
    actions = joined(lay_out(grouped(turns, LAYOUT), ROLES, LAYOUT))
    paths = [[int(actions.node_A[a]) for a in path] for path in conversations(actions)]
    assert sorted(paths) == [[0, 2], [0, 3], [1]]


def test_a_turn_that_does_not_hold_what_was_written_before_it_continues_nothing():
    """It begins with the same prompt, and goes on otherwise: a context of its own."""
    (question,) = generate(0, 40).questions["train"][:1]
    records = [
        Record(-1, 0, "planner", 1, (0,), Action((1, 2), (3,), "a")),
        Record(0, 0, "planner", 2, (0, 0), Action((1, 2, 9), (3,), "a")),
    ]
    turns = turns_of(plant((question,), records), np.ones(2, np.float32))
    assert [turn.after for turn in turns] == [-1, -1]


def test_a_batch_has_as_many_rows_as_its_tokens_fill_and_one_at_least():
    layout = Layout(lengths=(48, 128), tokens=100)
    assert [layout.count(n) for n in layout.lengths] == [2, 1]
    assert [layout.count(n, 3) for n in layout.lengths] == [6, 3]
    assert [layout.length(n) for n in (1, 48, 49, 128)] == [48, 48, 128, 128]


@pytest.mark.parametrize("ways", [1, 4])
def test_rows_of_a_batch_divide_over_the_devices(ways):
    turns = forest_of_turns(0)
    for batch in lay_out(grouped(turns, LAYOUT), ROLES, LAYOUT, ways):
        assert len(batch.rows.ids_RL) % ways == 0


@settings(max_examples=30)
@given(st.lists(st.integers(1, 3), max_size=9), st.lists(st.integers(1, 3), max_size=9))
def test_shared_counts_the_ids_that_two_contexts_begin_with(a, b):
    expected = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
    found = shared(tuple(a), tuple(b))
    assert found == (min(len(a), len(b)) if expected is None else expected)


def test_numbers_go_from_rows_to_actions_and_back_unchanged():
    batches = lay_out(grouped(forest_of_turns(1), LAYOUT), ROLES, LAYOUT)
    rng = np.random.default_rng(0)
    rows = [np.where(b.rows.mask_RM, rng.normal(size=b.rows.mask_RM.shape), 0) for b in batches]
    width = width_of(batches, 8)
    x_AT = by_action(batches, rows, width)
    assert x_AT.shape == (len(joined(batches).node_A), 8) == masks(batches, width).shape
    assert not x_AT[~masks(batches, width)].any()
    for found, expected in zip(by_row(batches, x_AT), rows, strict=True):
        np.testing.assert_array_equal(found, expected)
    targets = by_action(batches, [b.rows.target_RM for b in batches], width)
    by_node = {turn.node: turn.ids for turn in forest_of_turns(1)}
    for node, target_T, size in zip(
        joined(batches).node_A, targets, joined(batches).size_A, strict=True
    ):
        assert tuple(target_T[:size]) == by_node[int(node)]


def test_only_useful_written_turns_are_trained():
    (question,) = generate(0, 40).questions["train"][:1]
    action = Action((1, 2), (3,), "a")
    records = [
        Record(-1, 0, "planner", 1, (0,), action),
        Record(0, 0, "planner", 2, (0, 0), action._replace(prompt_ids=(1, 2, 3, 4)), forced=True),
        Record(0, 0, "planner", 2, (0, 1), action._replace(ids=())),
        Record(1, 0, "leaf", 3, (0, 0, 0), answer="x"),
    ]
    forest = plant((question,), records)
    ones = np.ones(4, np.float32)
    trained = lambda weight, **options: [  # noqa: E731
        turn.node for turn in turns_of(forest, weight, **options)
    ]
    assert trained(ones) == [0, 1]
    assert trained(ones, forced=False) == [0]
    assert trained(np.array([0, 1, 1, 1], np.float32)) == [1]


def test_a_group_lies_in_the_first_row_with_room_and_no_groups_make_no_batch():
    """Many small groups after a few large ones: rows that are nearly full are asked again."""
    rng = np.random.default_rng(0)
    sizes = rng.integers(2, 30, 200).tolist()
    prompts = [(1, *rng.integers(2, 10_000, size).tolist()) for size in sizes]
    turns = [Turn(n, "r", prompt, (5, 6)) for n, prompt in enumerate(prompts)]
    layout = Layout(lengths=(32, 64), tokens=128)
    batches = lay_out(grouped(turns, layout), ["r"], layout)
    rows: list[list[int]] = []  # length, what is left of it
    for size in sorted((len(prompt) + 2 for prompt in prompts), reverse=True):
        first = next((row for row in rows if row[1] >= size - (row[1] < row[0])), None)
        if first is None:
            length = layout.length(size)
            rows += [[length, length] for _ in range(128 // length)]
            first = rows[-(128 // length)]
        first[1] -= size - (first[1] < first[0])  # the header is there once
    used = [int((b.rows.positions_RL > 0).sum(axis=1).astype(bool).sum()) for b in batches]
    assert sum(used) == sum(left < length for length, left in rows)
    assert lay_out([], ["r"], layout) == []
