"""The index of kept contexts finds the best one to copy, and never one that is not computed yet."""

from __future__ import annotations

import numpy as np

from jax_ragrl.sampling.contexts import KeptContexts, common_length
from jax_ragrl.sampling.jobs import SamplingJob, Shapes
from jax_ragrl.sampling.row_queue import RowQueue, by_grammar, waiting


def ids(text: str) -> np.ndarray:
    return np.array([ord(c) for c in text], np.int32)


def kept(*texts: str, rows: int = 4) -> KeptContexts:
    contexts = KeptContexts(rows, max_tokens=32)
    for text in texts:
        contexts.commit([contexts.reserve(ids(text))])
    return contexts


def test_a_prompt_matches_the_context_with_the_most_first_tokens():
    contexts = kept("abc", "abxyz", "q")
    assert contexts.match(ids("abxy")) == (1, 4)
    assert contexts.match(ids("abd"))[1] == 2
    assert contexts.match(ids("zzz"))[1] == 0
    assert contexts.match(ids(""))[1] == 0


def test_a_conversation_is_extended_in_place_and_a_fork_is_copied():
    contexts = kept("system one")
    longer = contexts.reserve(ids("system one two"))
    assert (longer.source, longer.target, longer.start) == (0, 0, 10)
    # Another prompt of the same wave may copy the old tokens, not the new ones.
    fork = contexts.reserve(ids("system one tw"))
    assert (fork.source, fork.start) == (0, 10) and fork.target != 0
    contexts.commit([longer, fork])
    assert contexts.match(ids("system one two"))[1] == 14
    other = contexts.reserve(ids("system xyz"))
    assert other.start == 7 and other.source != other.target


def test_the_context_that_was_used_longest_ago_is_overwritten():
    contexts = kept("aaaa", "bbbb", "cccc", rows=3)
    contexts.commit([contexts.reserve(ids("aaaab"))])  # uses the first
    assert contexts.reserve(ids("dddd")).target == 1
    assert contexts.match(ids("bbbb"))[1] == 0 and contexts.match(ids("aaaa"))[1] == 4


def test_reserved_room_is_not_given_away():
    contexts = KeptContexts(3, max_tokens=8)
    assert {contexts.reserve(ids(text)).target for text in ("ab", "cd", "ef")} == {0, 1, 2}


def test_common_length_counts_first_tokens():
    assert common_length(ids("abcd"), ids("abxd")) == 2
    assert common_length(ids("ab"), ids("abcd")) == 2 and common_length(ids(""), ids("a")) == 0


def job(text: str, seed: int = 0, **fields: object) -> SamplingJob:
    return SamplingJob(tuple(map(ord, text)), seed, 1.0, 1.0, 8)._replace(**fields)


def test_prompts_with_common_instructions_compute_them_once():
    """The second prompt waits for the first one, whose first 20 tokens it copies."""
    role = "i" * 20
    jobs = [job(role + "one?"), job(role + "two?"), job("another")]
    queue = RowQueue(KeptContexts(8, 32))
    queue.waiting, queue.slots = waiting(jobs, [0, 1, 2], 2), [None] * 8
    first = queue.next_wave()
    assert [(reservation.start, len(rows)) for reservation, rows in first] == [(0, 2), (0, 2)]
    queue.contexts.commit([reservation for reservation, _ in first])
    second = queue.next_wave()
    assert [(reservation.start, len(rows)) for reservation, rows in second] == [(20, 2)]
    assert not queue.waiting


def test_a_prompt_with_more_rows_than_slots_waits_with_the_rest():
    queue = RowQueue(KeptContexts(2, 32))
    queue.waiting, queue.slots = waiting([job("ab"), job("ab", seed=5)], [0, 1], 3), [None] * 4
    ((reservation, rows),) = queue.next_wave()
    placed = queue.place([(reservation.target, row) for row in rows])
    assert [slot for slot, _, _ in placed] == [0, 1, 2, 3] and queue.rows_waiting == 2
    assert [(row.job.seed, row.sibling) for row in rows] == [(0, 0), (0, 1), (0, 2), (5, 0)]
    queue.free(0), queue.free(2)
    assert queue.resize(2) == [1, 3] and queue.live_slots() == [0, 1]
    assert queue.resize(4) == [0, 1] and queue.free_slots() == [2, 3]


def test_jobs_with_different_grammars_do_not_share_a_program():
    jobs = [job("a"), job("b", stop_strings=("x",)), job("c"), job("d", action_regex="[a-z]+")]
    assert sorted(by_grammar(jobs, 8)) == [[0, 2], [1], [3]]


def test_at_least_as_many_contexts_as_slots_are_kept():
    assert Shapes(decode_rows=8, kept_contexts=2).contexts == 8
    assert Shapes(decode_rows=8, kept_contexts=20).contexts == 20
