"""Every instant of a rollout has one cause, and the causes add up to its duration."""

import pytest

from jax_ragrl.rollout import waiting as module
from jax_ragrl.rollout.collect import collect
from jax_ragrl.rollout.expand import single_chain
from jax_ragrl.rollout.waiting import DEVICE, LLM, RETRIEVER, RolloutStoppedError, WaitingTimes
from tests.rollout.tape import ANN, BOB, Tape, system


class Clock:
    now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def test_overlapping_calls_count_once_by_the_first_cause(clock: Clock):
    waiting = WaitingTimes()
    clock.now = 1  # no call: host
    with waiting.call(LLM):
        clock.now = 3  # the language model alone
        with waiting.call(RETRIEVER):
            clock.now = 6  # both: the language model
            with waiting.call(DEVICE):
                clock.now = 10  # all three: the devices
            with waiting.call(LLM):
                clock.now = 15  # twice the same
    with waiting.call(RETRIEVER):
        clock.now = 21
    clock.now = 22
    assert waiting.seconds() == {"device": 4, "llm": 10, "retriever": 6, "host": 2}


class TimedTape(Tape):
    clock: Clock

    def sample(self, requests):
        self.clock.now += 1
        return super().sample(requests)

    def complete(self, requests):
        self.clock.now += 10
        return super().complete(requests)


def test_a_rollout_is_measured(clock: Clock):
    tape = TimedTape(lambda role, *_: "[No Retrieval]")
    tape.clock = clock
    waiting = WaitingTimes()
    collect(system(), single_chain, [ANN, BOB], tape.environment()._replace(times=waiting))
    seconds = waiting.seconds()
    # A call per round: the route, the answer, the end; the model answers once.
    assert seconds["llm"] + seconds["device"] > 0 and seconds["host"] == 0
    assert sum(seconds.values()) == clock.now
    # Models on the devices are waits for the devices.
    tape = Tape(lambda *_: "[No Retrieval]")
    tape.on_device = True
    waiting = WaitingTimes()
    environment = tape.environment()._replace(times=waiting)
    with environment.call(environment.llm, LLM):
        clock.now += 1
    assert waiting.seconds() == {"device": 1, "llm": 0, "retriever": 0, "host": 0}


def test_a_stopped_rollout_ends_at_its_next_call():
    waiting = WaitingTimes()
    tape = Tape(lambda *_: waiting.stop() or "[No Retrieval]")
    with pytest.raises(RolloutStoppedError):
        collect(system(), single_chain, [ANN], tape.environment()._replace(times=waiting))
    assert tape.log == [("router",)]
