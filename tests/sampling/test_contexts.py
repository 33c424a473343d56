"""Kept contexts share pages, and no page is read before it is computed or after it is given up."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from jax_ragrl.sampling.context_cache import kept_pages
from jax_ragrl.sampling.contexts import PAGE, KeptContexts, Reservation, common_length
from jax_ragrl.sampling.jobs import SamplingJob, Shapes
from jax_ragrl.sampling.row_queue import RowQueue, by_grammar, waiting

ROLE = "instructions of a role: "  # a page and a half


def ids(text: str) -> np.ndarray:
    return np.array([ord(c) for c in text], np.int32)


def reserve(contexts: KeptContexts, text: str | np.ndarray) -> Reservation:
    reservation = contexts.reserve(ids(text) if isinstance(text, str) else text)
    assert reservation is not None
    return reservation


def kept(*texts: str, pages: int = 8) -> KeptContexts:
    contexts = KeptContexts(pages)
    for text in texts:
        contexts.commit([reserve(contexts, text)])
    return contexts


def test_a_prompt_shares_the_context_with_the_most_first_tokens():
    contexts = kept("abc", "abxyz", "q", ROLE + "one")
    assert contexts.known_tokens(ids("abxy")) == 4
    assert contexts.known_tokens(ids("abd")) == 2
    assert contexts.known_tokens(ids(ROLE + "other")) == len(ROLE) + 1
    assert contexts.known_tokens(ids("zzz")) == contexts.known_tokens(ids("")) == 0


def test_a_conversation_is_extended_in_place_and_a_fork_is_copied():
    contexts = kept(ROLE)
    first, second = reserve(contexts, ROLE).pages
    longer = reserve(contexts, ROLE + "two")
    assert (longer.start, longer.pages) == (len(ROLE), (first, second))
    # Another prompt of the same wave may copy the old tokens, not the new ones.
    fork = reserve(contexts, ROLE + "tw")
    assert (fork.start, fork.source, fork.pages[0]) == (len(ROLE), second, first)
    assert fork.pages[1] != second
    assert fork.pages_before(len(ROLE)) == {0: first, 1: second}
    assert fork.pages_before(len(ROLE) + 1) == dict(enumerate(fork.pages))
    assert fork.pages_of(len(ROLE), 99) == {1: fork.pages[1]}
    contexts.commit([longer, fork])
    assert contexts.known_tokens(ids(ROLE + "two")) == len(ROLE) + 3
    shorter = reserve(contexts, ROLE[:20] + "xyz")
    assert (shorter.start, shorter.pages[0]) == (20, first) and shorter.pages[1] != second


def test_equal_instructions_are_held_once():
    contexts = kept(*(2 * ROLE + question for question in "abcdef"), pages=3 + 6)
    assert all(contexts.known_tokens(ids(2 * ROLE + q)) == 2 * len(ROLE) + 1 for q in "abcdef")


def test_the_context_that_was_used_longest_ago_is_given_up():
    contexts = kept("a" * 20, "b" * 20, "c" * 20, pages=6)
    contexts.commit([reserve(contexts, "a" * 20 + "b")])  # uses the first
    contexts.commit([reserve(contexts, "dddd")])
    known = [contexts.known_tokens(ids(20 * letter)) for letter in "abcd"]
    assert known == [20, PAGE, 20, 4]  # the last page of the second


def test_reserved_pages_are_not_given_away():
    contexts = kept("a" * 20, pages=4)
    first, second = reserve(contexts, "a" * 20 + "b"), reserve(contexts, "c" * 20)
    assert not {*first.pages} & {*second.pages}
    assert contexts.reserve(ids("d")) is None
    contexts.commit([first, second])
    assert contexts.reserve(ids("d")) is not None


def test_a_copy_needs_a_page_more_than_the_longest_context():
    fork = ids("a" * 35 + "b" * 13)  # three pages, after a context of three
    assert kept("a" * 40, pages=3).reserve(fork) is None
    assert reserve(kept("a" * 40, pages=4), fork).start == 35
    assert kept_pages(Shapes((40,), max_new_tokens=8, decode_rows=1)) == 4


def test_a_page_that_two_contexts_computed_is_kept_once():
    contexts = KeptContexts(3)
    pair = [reserve(contexts, "equal") for _ in range(2)]
    contexts.commit(pair)
    (page,) = reserve(contexts, "equal").pages
    assert page == pair[0].pages[0]
    assert not {page} & {*reserve(contexts, "x" * 20).pages}, "the other one is free"


class Device:
    """The tokens of pages, in place of their keys and values."""

    def __init__(self, pages: int) -> None:
        self.pages = np.full((pages, PAGE), -1)

    def run(self, reservation: Reservation, at: int, end: int) -> None:
        """Does what `extend_contexts` does with a context."""
        old, new = reservation.pages_before(at), reservation.pages_of(at, end)
        row = np.full((20, PAGE), -2)
        row[[*old]] = self.pages[[*old.values()]]
        row.reshape(-1)[at:end] = reservation.ids[at:end]
        self.pages[[*new.values()]] = row[[*new]]

    def read(self, reservation: Reservation) -> np.ndarray:
        pages = reservation.pages_before(len(reservation.ids))
        return self.pages[[*pages.values()]].reshape(-1)[: len(reservation.ids)]


@pytest.mark.parametrize("seed", range(20))
def test_contexts_have_their_own_tokens(seed: int):
    """Random conversations of few letters, in waves whose chunks take turns."""
    rng, contexts, device = np.random.default_rng(seed), KeptContexts(20), Device(20)
    known = [np.zeros(0, np.int32)]
    for _ in range(60):
        wave: list[Reservation] = []
        for _ in range(rng.integers(1, 4)):
            old = known[rng.integers(len(known))]
            past = old[: rng.integers(len(old) + 1)] if rng.random() < 0.5 else old
            prompt = np.concatenate([past, rng.integers(3, size=rng.integers(1, 40))])[:300]
            reservation = contexts.reserve(prompt.astype(np.int32))
            assert wave or reservation, "19 pages hold the longest one"
            if reservation is not None:
                wave.append(reservation)
                known.append(reservation.ids)
        places = [[*range(r.start, len(r.ids), 24), len(r.ids)] for r in wave]
        chunks = [(i, *pair) for i, at in enumerate(places) for pair in itertools.pairwise(at)]
        # Chunk by chunk, the first ones of all contexts before the second ones.
        for i, at, end in sorted(chunks, key=lambda chunk: chunk[1] - wave[chunk[0]].start):
            device.run(wave[i], at, end)
        contexts.commit(wave)
        for reservation in wave:
            np.testing.assert_array_equal(device.read(reservation), reservation.ids)
        for text in known[-6:]:
            if contexts.known_tokens(text) == len(text):
                np.testing.assert_array_equal(device.read(reserve(contexts, text)), text)
        contexts.commit([])


def test_common_length_counts_first_tokens():
    assert common_length(ids("abcd"), ids("abxd")) == 2
    assert common_length(ids("ab"), ids("abcd")) == 2 and common_length(ids(""), ids("a")) == 0


def job(text: str, seed: int = 0, **fields: object) -> SamplingJob:
    return SamplingJob(tuple(map(ord, text)), seed, 1.0, 1.0, 8)._replace(**fields)


def test_prompts_with_common_instructions_compute_them_once():
    """The second prompt waits for the first one, whose first 20 tokens it shares."""
    role = "i" * 20
    jobs = [job(role + "one?"), job(role + "two?"), job("another")]
    queue = RowQueue(KeptContexts(16))
    queue.waiting, queue.slots = waiting(jobs, [0, 1, 2], 2, Shapes()), [None] * 8
    first = queue.next_wave(64)
    assert [(reservation.start, len(rows)) for reservation, rows in first] == [(0, 2), (0, 2)]
    queue.contexts.commit([reservation for reservation, _ in first])
    second = queue.next_wave(64)
    assert [(reservation.start, len(rows)) for reservation, rows in second] == [(20, 2)]
    assert not queue.waiting


def test_a_prompt_with_more_rows_than_slots_waits_with_the_rest():
    queue = RowQueue(KeptContexts(4))
    queue.waiting, queue.slots = (
        waiting([job("ab"), job("ab", seed=5)], [0, 1], 3, Shapes()),
        [None] * 4,
    )
    ((reservation, rows),) = queue.next_wave(64)
    placed = queue.place([(reservation, row) for row in rows])
    assert [slot for slot, _, _ in placed] == [0, 1, 2, 3] and queue.rows_waiting == 2
    assert [(row.job.seed, row.sibling) for row in rows] == [(0, 0), (0, 1), (0, 2), (5, 0)]
    queue.free(0), queue.free(2)
    assert queue.resize(2) == [1, 3] and queue.live_slots() == [0, 1]
    assert queue.resize(4) == [0, 1] and queue.free_slots() == [2, 3]


def test_jobs_with_different_grammars_do_not_share_a_program():
    jobs = [job("a"), job("b", stop_strings=("x",)), job("c"), job("d", action_regex="[a-z]+")]
    assert sorted(by_grammar(jobs, 8)) == [[0, 2], [1], [3]]


def test_a_prompt_without_room_waits_for_the_next_wave():
    queue = RowQueue(KeptContexts(2))
    queue.waiting, queue.slots = (
        waiting([job("a" * 30), job("b" * 30)], [0, 1], 1, Shapes()),
        [None] * 8,
    )
    for first in "ab":
        ((reservation, _),) = queue.next_wave(64)
        assert reservation.ids[0] == ord(first)
        queue.contexts.commit([reservation])
    assert not queue.waiting


def test_kept_contexts_have_the_room_of_the_slots_unless_the_config_says_otherwise():
    assert Shapes(decode_rows=8).contexts == 8
    assert Shapes(decode_rows=8, kept_contexts=2).contexts == 2
    assert Shapes(decode_rows=8, kept_contexts=20).contexts == 20
    bounded = Shapes((1000,), max_new_tokens=24, decode_rows=8, slot_tokens=4096)
    assert bounded.contexts == 4 and dataclasses.replace(bounded, slot_tokens=9).contexts == 1
