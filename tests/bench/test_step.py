"""What the bench of a whole step counts; how long it takes is nobody's test."""

from typing import NamedTuple

import pytest

from jax_ragrl.bench.step import Timed, _busy, covered


class Event(NamedTuple):
    start_ns: float
    duration_ns: float


class Line(NamedTuple):
    name: str
    events: tuple


class Plane(NamedTuple):
    lines: tuple


def test_what_runs_side_by_side_is_busy_once():
    assert covered([(5, 7), (0, 2), (1, 3), (6, 6.5)]) == 5
    assert covered([]) == 0


def test_a_device_is_busy_while_its_kernels_run_and_devices_are_averaged():
    streams = (Line("Stream #1", (Event(0, 3e9),)), Line("Stream #2", (Event(1e9, 3e9),)))
    steps = Line("Steps", (Event(0, 100e9),))
    tpu = Plane((Line("XLA Ops", (Event(0, 2e9),)), steps))
    assert _busy([Plane((*streams, steps)), tpu, Plane((steps,))]) == pytest.approx(3.0)


def test_the_seconds_of_calls_are_added_up_and_what_they_return_or_raise_is_kept():
    seconds: dict[str, float] = {}
    timed = Timed([3, 1], "list", seconds)
    timed.sort()
    assert timed.pop() == 3 and seconds["list"] > 0
    with pytest.raises(IndexError):
        timed.pop(9)
