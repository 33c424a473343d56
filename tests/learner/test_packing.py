"""Packing: the tokens of rows, their visibility, and the actions that own scored tokens."""

import jax
import numpy as np
import pytest

from jax_ragrl.learner import packing
from jax_ragrl.learner.packing import (
    Actions,
    Batch,
    Layout,
    Minibatches,
    Turn,
    carry_credit,
    conversations,
    group_turns,
    lay_out,
    turns_of,
)
from jax_ragrl.models.attention import visible_until_mask
from jax_ragrl.rollout.tree import Action, Record, build_forest
from tests.rollout.tape import ANN

LAYOUT = Layout(row_lengths=(16, 32, 64), tokens_per_device=128)
ROLES = ("planner", "executor")
_mask = jax.jit(visible_until_mask)


def conversation(rng: np.random.Generator, node: int, depth: int) -> list[Turn]:
    """Returns turns of one conversation: each prompt is the previous context and an observation."""
    ids = lambda most: tuple(rng.integers(1, 4, rng.integers(1, most)).tolist())  # noqa: E731
    turns, prompt = [], (7, 7, 7, *ids(6))
    for _ in range(depth):
        turn = Turn(node + len(turns), ROLES[node % 2], prompt, ids(5))
        turns.append(turn)
        prompt = turn.context() + ids(4)
    return turns


def forest_of_turns(seed: int, count: int = 40) -> list[Turn]:
    """Returns conversations, siblings and copies over three ids, so that prefixes collide."""
    rng = np.random.default_rng(seed)
    turns: list[Turn] = []
    while len(turns) < count:
        turns += conversation(rng, len(turns), int(rng.integers(1, 4)))
        first = turns[rng.integers(len(turns))]
        sibling = (*first.ids[:1], int(rng.integers(1, 4)))
        turns.append(first._replace(node=len(turns), ids=sibling))
        turns.append(turns[rng.integers(len(turns))]._replace(node=len(turns)))
    return turns


def all_actions(batches: list[Batch]) -> Actions:
    return Minibatches([batches]).actions


def predictions(batch: Batch) -> dict[int, list[tuple[tuple[int, ...], int]]]:
    """Returns, by node, the visible context of each scored token, and the token."""
    rows, actions, _ = batch
    visible_RLL = jax.device_get(_mask(jax.device_put(rows.until_RL)))
    predicted: dict[int, list[tuple[tuple[int, ...], int]]] = {}
    for node, r, first, size in zip(
        actions.node_A, actions.row_A, actions.first_A, actions.size_A, strict=True
    ):
        for m in range(first, first + size):
            assert rows.mask_RM[r, m]
            source = rows.source_RM[r, m]
            places = np.flatnonzero(visible_RLL[r, source])
            assert rows.positions_RL[r, places].tolist() == list(range(len(places)))
            context = tuple(rows.ids_RL[r, places].tolist())
            predicted.setdefault(int(node), []).append((context, int(rows.target_RM[r, m])))
    return predicted


@pytest.mark.parametrize("seed", range(6))
def test_a_token_is_predicted_from_its_own_context(seed):
    turns = forest_of_turns(seed)
    predicted: dict[int, list[tuple[tuple[int, ...], int]]] = {}
    batches = lay_out(group_turns(turns, LAYOUT), ROLES, LAYOUT)
    for batch in batches:
        predicted |= predictions(batch)
        for node, role in zip(batch.actions.node_A, batch.actions.role_A, strict=True):
            assert turns[node].role == ROLES[role]
    assert sum(int(b.rows.mask_RM.sum()) for b in batches) == sum(len(t.ids) for t in turns)
    for turn in turns:
        context, start = turn.context(), len(turn.prompt)
        expected = [(context[:i], context[i]) for i in range(start, len(context))]
        assert predicted.pop(turn.node) == expected
    assert not predicted


def test_long_rows_with_one_context_need_no_mask(monkeypatch):
    """A conversation is one context; siblings, or two turns packed into a row, are several."""
    monkeypatch.setattr(packing, "PLAIN_FROM", 64)
    layout = Layout(row_lengths=(64,), tokens_per_device=128)
    first = Turn(0, "planner", tuple(range(10, 50)), (1, 2))
    later = Turn(1, "planner", first.context() + (3, 4), (5,), previous=0)
    sibling = Turn(2, "planner", first.prompt, (6,))
    stranger = Turn(3, "planner", (7,) * 30, (8,))
    short = Turn(4, "planner", (9,) * 3, (9,))

    def plain(*turns: Turn) -> bool:
        (batch,) = lay_out(group_turns(turns, layout), ROLES, layout)
        return batch.rows.until_RL is None

    assert plain(first) and plain(first, later) and plain(first, later, stranger)
    assert not plain(first, sibling) and not plain(first, stranger, short)
    monkeypatch.setattr(packing, "PLAIN_FROM", 65)
    assert not plain(first)


def test_a_group_longer_than_a_row_is_cut_and_a_longer_turn_left_out():
    prompt = tuple(range(10))
    turns = [Turn(k, "planner", prompt, (100 + k,) * 8) for k in range(9)]
    groups = group_turns(turns, LAYOUT)
    assert [len(group.turns) for group in groups] == [6, 3]  # 10 + 6 * 8 = 58 of 64
    scored = [turn.node for group in groups for turn in group.turns]
    assert sorted(scored) == list(range(9))
    turns = [Turn(0, "planner", tuple(range(60)), (1,) * 5), Turn(1, "planner", (1,), (2,) * 63)]
    (group,) = group_turns(turns, LAYOUT)
    assert [turn.node for turn in group.turns] == [1] and group.tokens == 64
    # Copies share tokens, but each is scored.
    turns = [Turn(k, "planner", (1, 2), (3, 4, 5, 6)) for k in range(20)]
    groups = group_turns(turns, LAYOUT)
    assert [group.tokens for group in groups] == [6, 6]  # 64 / 4 = 16 copies per row
    assert [group.scored_tokens() for group in groups] == [64, 16]


def test_turns_of_a_role_share_its_instructions_and_fit_in_any_order():
    """Eight prompts of 30 tokens, 24 of them instructions, take two rows of 64, not four."""
    instructions = tuple(range(100, 124))
    turns = [Turn(k, "planner", (*instructions, *(k + 1,) * 6), (50 + k,) * 2) for k in range(8)]
    layout = Layout(row_lengths=(64,), tokens_per_device=64)
    batches = lay_out(group_turns(turns, layout), ROLES, layout)
    assert len(batches) == 2
    used = [int((b.rows.until_RL != np.arange(1, 65)).sum()) for b in batches]
    assert all(n <= 64 for n in used)
    # Minibatches are shuffled: the first and last group may share a prefix that others lack.
    instructions = tuple(range(100, 124))
    turns = [Turn(k, "planner", (*instructions, k), (50 + k,) * 2) for k in range(8)]
    stranger = Turn(8, "planner", tuple(range(25)), (5, 6))
    layout = Layout(row_lengths=(64,), tokens_per_device=64)
    groups = [*group_turns(turns, layout), *group_turns([stranger], layout)]
    batches = lay_out([*groups[:4], groups[-1], *groups[4:-1]], ROLES, layout)
    assert sum(int(b.rows.mask_RM.sum()) for b in batches) == 9 * 2


def test_an_opened_batch_is_filled_first_and_has_at_least_one_row():
    layout = Layout(row_lengths=(16, 64), tokens_per_device=128)
    long = Turn(0, "planner", tuple(range(1, 61)), (5,))
    short = [Turn(k, "executor", (k, k, k), (k + 1,) * 5) for k in range(1, 9)]
    (batch,) = lay_out(group_turns([long, *short], layout), ROLES, layout)
    assert batch.rows.ids_RL.shape == (2, 64)
    layout = Layout(row_lengths=(48, 128), tokens_per_device=100)
    assert [layout.count(n) for n in layout.row_lengths] == [2, 1]
    assert [layout.count(n, 3) for n in layout.row_lengths] == [6, 3]
    assert [layout.length(n) for n in (1, 48, 49, 128)] == [48, 48, 128, 128]


@pytest.mark.parametrize(("devices", "sizes"), [(1, {1, 2, 3, 5, 9}), (4, {4, 8, 12, 20, 36})])
def test_only_the_last_batch_has_fewer_rows(devices, sizes):
    layout = Layout(row_lengths=(8,), tokens_per_device=9 * 8, max_batch_halvings=9)
    for count in range(1, 30):
        turns = [Turn(k, "planner", (k, k, k), (1,) * 5) for k in range(count)]
        rows = [
            len(b.rows.ids_RL) for b in lay_out(group_turns(turns, layout), ROLES, layout, devices)
        ]
        full = layout.count(8, devices)
        last = count - full * (len(rows) - 1)
        assert rows[:-1] == [full] * (len(rows) - 1)
        assert rows[-1] == min(size for size in sizes if size >= last)


def test_conversations_are_paths_of_turns_that_continue_the_whole_context():
    """Turns 2 and 3 continue turn 0 across a turn with another prompt; 4 and 5 are not trained."""
    acts = [(1, 2), (9, 9), (1, 2, 3, 7), (1, 2, 3, 8), (1, 2, 3, 8), (1, 2, 3, 8, 3, 7)]
    parents = [-1, 0, 1, 1, 0, 4]
    records = [
        Record(parent, 0, "planner", 1, (k,), Action(prompt, (3,), "a"))
        for k, (prompt, parent) in enumerate(zip(acts, parents, strict=True))
    ]
    forest = build_forest((ANN,), records)
    turns = turns_of(forest, np.zeros(6, np.float32), np.array([1, 1, 1, 1, 0, 0], np.float32))
    assert [(turn.node, turn.previous) for turn in turns] == [(0, -1), (1, -1), (2, 0), (3, 0)]
    actions = all_actions(lay_out(group_turns(turns, LAYOUT), ROLES, LAYOUT))
    paths = [[int(actions.node_A[a]) for a in path] for path in conversations(actions)]
    assert sorted(paths) == [[0, 2], [0, 3], [1]]
    # The second prompt begins with the first one but lacks its action.
    records = [
        Record(-1, 0, "planner", 1, (0,), Action((1, 2), (3,), "a")),
        Record(0, 0, "planner", 2, (0, 0), Action((1, 2, 9), (3,), "a")),
    ]
    ones = np.ones(2, np.float32)
    turns = turns_of(build_forest((ANN,), records), ones, ones)
    assert [turn.previous for turn in turns] == [-1, -1]


def test_the_reward_of_a_turn_that_is_left_out_goes_to_the_turn_before_it():
    """The last prompt was too long to sample from, the turn before it is longer than a row."""
    long = (1, 2, 3, *range(4, 40))
    acts = [Action((1, 2), (3,), "a"), Action(long, (3,), "a"), Action((), (), "")]
    records = [Record(k - 1, 0, "planner", k, (0,) * (k + 1), act) for k, act in enumerate(acts)]
    forest, ones = build_forest((ANN,), records), np.ones(3, np.float32)
    credit_N = np.array([0.5, 0.25, -2.0], np.float32)
    turns = turns_of(forest, credit_N, ones)
    assert [turn.credit for turn in turns] == [0.5, 0.25]
    assert [turn.credit for turn in carry_credit(turns, forest, credit_N, 100)] == [0.5, -1.75]
    assert carry_credit(turns, forest, credit_N, 20)[0].credit == -1.25


def test_rows_to_actions_and_back_is_the_identity():
    batches = lay_out(group_turns(forest_of_turns(1), LAYOUT), ROLES, LAYOUT)
    rng = np.random.default_rng(0)
    rows = [np.where(b.rows.mask_RM, rng.normal(size=b.rows.mask_RM.shape), 0) for b in batches]
    data = Minibatches([batches], multiple=8)
    x_AT = data.by_action(rows)
    assert x_AT.shape == (len(data.actions.node_A), 8) == data.mask().shape
    assert not x_AT[~data.mask()].any()
    for actual, expected in zip(data.by_row(x_AT), rows, strict=True):
        np.testing.assert_array_equal(actual, expected)
    targets = data.by_action([b.rows.target_RM for b in batches])
    by_node = {turn.node: turn.ids for turn in forest_of_turns(1)}
    for node, target_T, size in zip(data.actions.node_A, targets, data.actions.size_A, strict=True):
        assert tuple(target_T[:size]) == by_node[int(node)]


def test_each_minibatch_has_its_own_actions():
    """Arrays of all actions are split at the minibatches; lists of batches are regrouped."""
    batches = lay_out(group_turns(forest_of_turns(1, 400), LAYOUT), ROLES, LAYOUT)
    assert len(batches) > 2
    data = Minibatches([batches[:2], batches[2:]])
    for part, node_A in zip(data.parts, data.by_part(data.actions.node_A), strict=True):
        np.testing.assert_array_equal(node_A, Minibatches([part]).actions.node_A)
    assert data.regroup(data.batches) == [batches[:2], batches[2:]]


def test_credit_and_behaviour_logps_follow_their_turns():
    """Half of the turns were not written by a sampler: their log-probabilities are NaN."""
    rng, turns = np.random.default_rng(2), []
    for turn in forest_of_turns(1):
        logps = tuple(rng.normal(size=len(turn.ids)).astype(np.float32).tolist())
        credit = float(np.float32(rng.normal()))
        turns.append(turn._replace(credit=credit, behaviour_logps=logps if turn.node % 2 else ()))
    data = Minibatches([lay_out(group_turns(turns, LAYOUT), ROLES, LAYOUT)])
    logp_AT = data.by_action([batch.behaviour_logp_RM for batch in data.batches])
    assert len(turns) == len(logp_AT) and not logp_AT[~data.mask()].any()
    for a, node in enumerate(data.actions.node_A.tolist()):
        assert data.actions.credit_A[a] == turns[node].credit
        size = data.actions.size_A[a]
        expected = turns[node].behaviour_logps or [np.nan] * size
        np.testing.assert_array_equal(logp_AT[a, :size], np.array(expected, np.float32))


def test_only_reachable_written_turns_are_trained():
    action = Action((1, 2), (3,), "a", (-0.5,))
    records = [
        Record(-1, 0, "planner", 1, (0,), action),
        Record(
            0, 0, "planner", 2, (0, 0), action._replace(prompt_ids=(1, 2, 3, 4)), is_forced=True
        ),
        Record(0, 0, "planner", 2, (0, 1), action._replace(ids=())),
        Record(1, 0, "leaf", 3, (0, 0, 0), answer="x"),
    ]
    forest = build_forest((ANN,), records)
    ones, credit_N = np.ones(4, np.float32), np.array([0.1, 0.2, 0.3, 0.4], np.float32)
    turns = turns_of(forest, credit_N, ones)
    assert [turn.node for turn in turns] == [0, 1]
    assert [turn.credit for turn in turns] == credit_N[:2].tolist()
    assert [turn.behaviour_logps for turn in turns] == [(-0.5,)] * 2
    assert [turn.node for turn in turns_of(forest, credit_N, ones, include_forced=False)] == [0]
    # The policy has sampled the forced action, too.
    merged = forest._replace(multiplicity_N=np.array([1, 2, 1, 1], np.int32))
    assert [turn.node for turn in turns_of(merged, credit_N, ones, include_forced=False)] == [0, 1]
    weight_N = np.array([0, 1, 1, 1], np.float32)
    assert [turn.node for turn in turns_of(forest, credit_N, weight_N)] == [1]


def test_rows_that_are_nearly_full_are_tried_again():
    """Two hundred prompts of 3 to 30 tokens fill 85 % of the rows, beside their actions."""
    rng = np.random.default_rng(0)
    sizes = rng.integers(2, 30, 200).tolist()
    prompts = [(1, *rng.integers(2, 10_000, size).tolist()) for size in sizes]
    turns = [Turn(n, "r", prompt, (5, 6)) for n, prompt in enumerate(prompts)]
    layout = Layout(row_lengths=(32, 64), tokens_per_device=128)
    batches = lay_out(group_turns(turns, layout), ["r"], layout)
    rows = [row for batch in batches for row in batch.rows.positions_RL if row.any()]
    assert sum(map(len, prompts)) > 0.85 * sum(map(len, rows))
    assert lay_out([], ["r"], layout) == []
