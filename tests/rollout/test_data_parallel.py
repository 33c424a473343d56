"""The parts of a batch, rolled out apart and put together, are the forest of the whole batch."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from jax_ragrl.errors import EffectError
from jax_ragrl.rollout import data_parallel as shares
from jax_ragrl.rollout.collect import collect
from jax_ragrl.rollout.data_parallel import in_shares, merge, split
from jax_ragrl.rollout.expand import Tree
from jax_ragrl.rollout.tree import Forest
from jax_ragrl.types import LLMRequest, Question
from tests.rollout.tape import ANN, BOB, PAPER, Tape, improvise, system

CY, DEE, EVE = (Question(f"q-{n}", f"Where was {n} born?", ("Ulm",)) for n in ("Cy", "Dee", "Eve"))
# A batch across two epochs: some questions are there again.
BATCH = (ANN, BOB, CY, ANN, BOB, DEE, EVE, ANN)


def reply(request: LLMRequest) -> str | EffectError:
    """Bob is never answered, Dee only where her question is answered from documents."""
    asked = request.messages[-1].content
    if "Bob" in asked or ("Dee" in asked and request.purpose != "answer"):
        return EffectError(f"no answer to {request.purpose} of seed {request.seed}")
    return f"answer {request.seed}"


def rolled(questions: tuple[Question, ...], rollouts: int) -> Forest:
    tape = Tape(improvise, told=dict.fromkeys(("answer_direct", "answer", "roadmap"), reply))
    tree = dataclasses.replace(PAPER, free=1) if rollouts == 1 else Tree(width=2, until=2)
    return collect(system(), tree, questions, tape.environment(), seed=7, rollouts=rollouts)


def assert_equal(one: Forest, other: Forest) -> None:
    for name, a, b in zip(Forest._fields, one, other, strict=True):
        if isinstance(a, np.ndarray):
            np.testing.assert_array_equal(a, b, err_msg=name, strict=True)
        else:
            assert a == b, name


@pytest.mark.parametrize("rollouts", [1, 3])
@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_merged_shares_are_the_forest_of_the_whole_batch_node_for_node(count: int, rollouts: int):
    """Copies of a question have keys of their own, failures are kept, some hosts have nothing."""
    whole = rolled(BATCH, rollouts)
    assert len(whole.records) > 60 and set(whole.failed) >= {1, 4, 5}
    shares = split(BATCH, count)
    parts = [rolled(tuple(BATCH[i] for i in share), rollouts) for share in shares]
    parts = pickle.loads(pickle.dumps(parts))
    assert (min(len(part.questions) for part in parts) == 0) == (count == 7)
    assert_equal(merge(BATCH, shares, parts), whole)


def test_copies_of_a_question_are_rolled_out_differently_and_by_one_host():
    whole = rolled(BATCH, 1)
    texts = [[whole.records[n].action for n in whole.nodes_of(i)] for i in (0, 3, 7)]
    assert texts[0] != texts[1] != texts[2] != texts[0]
    for share in split(BATCH, 3):
        assert len({0, 3, 7} & set(share)) in (0, 3) and share == sorted(share)


def test_every_question_is_in_one_share_and_shares_differ_by_one_where_ids_do():
    batch = [Question(f"q{i}", "", ()) for i in range(10)]
    shares = split(batch, 4)
    assert sorted(i for share in shares for i in share) == list(range(10))
    assert sorted(map(len, shares)) == [2, 2, 3, 3]


def test_copies_of_a_question_leave_the_others_evenly_dealt():
    assert split((ANN, BOB, BOB), 2) == [[0], [1, 2]]


@pytest.mark.parametrize("host", [0, 1, 2])
def test_each_process_rolls_out_its_own_share_and_gets_the_forest_of_all(monkeypatch, host: int):
    """The other processes' parts come from them: here, from the same roll-out of their shares."""
    asked, hosts = [[BATCH[i] for i in share] for share in split(BATCH, 3)], range(3)

    def told(own: Callable[[], Forest]) -> list[Forest]:
        return [own() if h == host else rolled(tuple(asked[h]), 1) for h in hosts]

    def roll_out(questions: Sequence[Question]) -> Forest:
        assert questions == asked[host]
        return rolled(tuple(questions), 1)

    monkeypatch.setattr(shares.jax, "process_count", lambda: 3)
    monkeypatch.setattr(shares.jax, "process_index", lambda: host)
    monkeypatch.setattr(shares, "gathered", told)
    found = in_shares(BATCH, roll_out)
    monkeypatch.undo()
    assert_equal(found, rolled(BATCH, 1))


def test_a_batch_without_questions_has_an_empty_forest():
    empty = rolled((), 1)
    assert_equal(merge((), split((), 2), [empty, empty]), empty)
    assert empty.parent_N.dtype == np.int32 and empty.leaf_N.dtype == bool
