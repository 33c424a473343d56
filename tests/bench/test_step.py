"""The times of the step benchmark; no test asserts a duration."""

from typing import NamedTuple

import pytest

from jax_ragrl.bench.step import TimedCalls, _mean_busy_seconds, union_length
from jax_ragrl.rollout.pipelining import separate


class Event(NamedTuple):
    start_ns: float
    duration_ns: float


class Line(NamedTuple):
    name: str
    events: tuple


class Plane(NamedTuple):
    lines: tuple


def test_overlapping_intervals_count_once():
    assert union_length([(5, 7), (0, 2), (1, 3), (6, 6.5)]) == 5
    assert union_length([]) == 0


def test_busy_seconds_are_averaged_over_devices():
    streams = (Line("Stream #1", (Event(0, 3e9),)), Line("Stream #2", (Event(1e9, 3e9),)))
    steps = Line("Steps", (Event(0, 100e9),))
    tpu = Plane((Line("XLA Ops", (Event(0, 2e9),)), steps))
    assert _mean_busy_seconds([Plane((*streams, steps)), tpu, Plane((steps,))]) == pytest.approx(
        3.0
    )


def test_timed_calls_preserve_results_and_errors():
    seconds: dict[str, float] = {}
    proxy = TimedCalls([3, 1], "list", seconds)
    proxy.sort()
    assert proxy.pop() == 3 and seconds["list"] > 0
    with pytest.raises(IndexError):
        proxy.pop(9)


class Sampler:
    """A sampler that keeps contexts."""

    def separate(self):
        return Sampler()

    def sample(self, requests):
        return list(requests)


def test_the_sampler_of_each_group_is_timed():
    """As in a rollout with `run.pipeline_groups`, whose groups share no contexts."""
    seconds: dict[str, float] = {}
    first = TimedCalls(Sampler(), "sampler", seconds)
    group = separate(first)
    seconds.clear()
    assert group.sample([1]) == [1] and seconds["sampler"] > 0
    assert group._target is not first._target
