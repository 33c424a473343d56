"""The merged forests of shards equal the forest of the expected batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from jax_ragrl.errors import EffectError
from jax_ragrl.rollout import data_parallel
from jax_ragrl.rollout.collect import collect
from jax_ragrl.rollout.data_parallel import merge_shards, own_shard, shard_questions
from jax_ragrl.rollout.expand import Tree
from jax_ragrl.rollout.tree import Forest
from jax_ragrl.runtime import records
from jax_ragrl.types import LLMRequest, Question
from tests.rollout.tape import ANN, BOB, PAPER, Tape, improvise, system

CY, DEE, EVE = (Question(f"q-{n}", f"Where was {n} born?", ("Ulm",)) for n in ("Cy", "Dee", "Eve"))
# A batch that spans two epochs, so that some questions occur again.
BATCH = (ANN, BOB, CY, ANN, BOB, DEE, EVE, ANN)


def reply(request: LLMRequest) -> str | EffectError:
    """Requests about Bob fail, and those about Dee unless they answer from documents."""
    prompt = request.messages[-1].content
    if "Bob" in prompt or ("Dee" in prompt and request.purpose != "answer"):
        return EffectError(f"no answer to {request.purpose} of seed {request.seed}")
    return f"answer {request.seed}"


def rollout(
    questions: Sequence[Question], rollouts: int, copies: Sequence[Sequence[int]] | None = None
) -> Forest:
    tape = Tape(improvise, replies=dict.fromkeys(("answer_direct", "answer", "roadmap"), reply))
    tree = (
        dataclasses.replace(PAPER, free_samples=1)
        if rollouts == 1
        else Tree(width=2, branching_depth=2)
    )
    environment = tape.environment()
    return collect(system(), tree, questions, environment, seed=7, rollouts=rollouts, copies=copies)


def roll_out_shard(shard: Mapping[int, Sequence[int]], rollouts: int) -> Forest:
    return rollout([BATCH[i] for i in shard], rollouts, [*shard.values()])


def assert_equal(one: Forest, other: Forest) -> None:
    for name, a, b in zip(Forest._fields, one, other, strict=True):
        if isinstance(a, np.ndarray):
            np.testing.assert_array_equal(a, b, err_msg=name, strict=True)
        else:
            assert a == b, name


@pytest.mark.parametrize("rollouts", [1, 3])
@pytest.mark.parametrize("count", [1, 2, 3, 7, 16, 25, 40])
def test_merged_shards_equal_the_forest_of_the_whole_batch(count: int, rollouts: int):
    """Copies of a question have their own seeds, failures are merged, some shards are empty."""
    expected = rollout(BATCH, rollouts)
    assert len(expected.records) > 60 and set(expected.failed_questions) >= {1, 4, 5}
    shards = shard_questions(BATCH, count, rollouts)
    parts = [roll_out_shard(shard, rollouts) for shard in shards]
    parts = records.loads(records.dumps(parts))
    forest = merge_shards(BATCH, parts, rollouts)
    # Of several errors of a question, on several shards, one is kept.
    assert all(message.startswith("no answer to") for message in forest.failures)
    assert count > 5 or forest.failures == expected.failures
    assert_equal(forest._replace(failures=expected.failures), expected)


def test_copies_of_a_question_differ_and_share_a_shard():
    expected = rollout(BATCH, 1)
    texts = [[expected.records[n].action for n in expected.nodes_of(i)] for i in (0, 3, 7)]
    assert texts[0] != texts[1] != texts[2] != texts[0]
    for shard in shard_questions(BATCH, 3):
        assert len({0, 3, 7} & set(shard)) in (0, 3) and [*shard] == sorted(shard)


@pytest.mark.parametrize(
    ("batch", "count", "rollouts", "shards"),
    [
        # Balanced, and copies of a question stay together, for they share its prompt.
        ((ANN, BOB, CY, DEE, EVE), 2, 1, [{0: [0], 2: [0], 4: [0]}, {1: [0], 3: [0]}]),
        ((ANN, BOB, BOB), 2, 1, [{0: [0]}, {1: [0], 2: [0]}]),
        ((ANN, BOB), 1, 2, [{0: [0, 1], 1: [0, 1]}]),
        # Processes that outnumber the questions share their rollouts; the rest roll out nothing.
        ((ANN, BOB), 3, 4, [{0: [0, 2]}, {1: [0, 1, 2, 3]}, {0: [1, 3]}]),
        ((ANN, BOB), 5, 1, [{0: [0]}, {1: [0]}, {}, {}, {}]),
    ],
)
def test_shards_are_disjoint_and_balanced(batch, count, rollouts, shards):
    assert shard_questions(batch, count, rollouts) == shards


@pytest.mark.parametrize("host", [0, 1, 2])
def test_each_process_has_its_shard(monkeypatch, host: int):
    shard = shard_questions(BATCH, 3, rollouts=2)[host]
    monkeypatch.setattr(data_parallel.jax, "process_count", lambda: 3)
    monkeypatch.setattr(data_parallel.jax, "process_index", lambda: host)
    own, copies = own_shard(BATCH, rollouts=2)
    assert own == [BATCH[i] for i in shard] and copies == [*shard.values()]


def test_a_batch_without_questions_has_an_empty_forest():
    empty = rollout((), 1)
    assert_equal(merge_shards((), [empty, empty]), empty)
    assert empty.parent_N.dtype == np.int32 and empty.leaf_N.dtype == bool
