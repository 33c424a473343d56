"""Runs are killed and paused at random moments, resumed, and compared with an undisturbed run."""

from __future__ import annotations

import dataclasses
import pathlib
import random
import signal
import time
from collections.abc import Iterator

from tests.chaos.runs import Group, Outcome, Variant, digest, train, train_command

SIGNALS = ("SIGKILL", "SIGKILL", "SIGTERM", "SIGINT", "SIGSTOP")  # SIGKILL twice as often
CODES = {"SIGKILL": (-9,), "SIGTERM": (143, -15), "SIGINT": (130, -2)}
PAUSE = 3.0  # seconds between SIGSTOP and SIGCONT
PER_RUN = 4  # disturbances of one run, which then ends


@dataclasses.dataclass(frozen=True)
class Disturbance:
    """A signal to the processes of a run.

    Fields:
      signal: the name; SIGSTOP is followed by SIGCONT.
      after: seconds after the start of the processes.
      codes: the exit codes.
      fault: the error in this end; empty if a user may see such an end.
    """

    signal: str
    after: float
    codes: tuple[int, ...]
    fault: str = ""


@dataclasses.dataclass(frozen=True)
class Torment:
    """One run that was disturbed and resumed until it ended, and the digests to compare."""

    variant: str
    disturbances: tuple[Disturbance, ...]
    expected: str
    actual: str
    output: str = ""

    @property
    def is_equal(self) -> bool:
        return self.expected == self.actual


def torment(variant: Variant, folder: pathlib.Path, kills: int, seed: int) -> Iterator[Torment]:
    """Disturbs runs of a variant until `kills` signals have met a living run.

    Args:
      variant: the kind of run.
      folder: for the folders of the runs.
      kills: the number of disturbances in all.
      seed: of the moments and the signals.
    """
    start = time.monotonic()
    outcome = train(variant, folder / "undisturbed")
    assert outcome.is_success, outcome.output
    seconds, expected = time.monotonic() - start, digest(folder / "undisturbed")
    rng, number = random.Random(f"{seed} {variant.name}"), 0
    while kills > 0:
        run, number = folder / f"run-{number}", number + 1
        yield (result := _torment_one(variant, run, min(kills, PER_RUN), rng, seconds, expected))
        # A run that always ends before its signal would never count: its time is measured again.
        seconds *= 1.0 if result.disturbances else 0.7
        kills -= len(result.disturbances)


def _torment_one(
    variant: Variant,
    workdir: pathlib.Path,
    kills: int,
    rng: random.Random,
    seconds: float,
    expected: str,
) -> Torment:
    """Disturbs one run at most `kills` times, then lets it end."""
    disturbances: list[Disturbance] = []
    outcome = None
    while len(disturbances) < kills:
        name, after = rng.choice(SIGNALS), rng.uniform(0, seconds)
        group = Group(train_command(variant, workdir), variant.processes)
        has_met, outcome = _disturb(group, name, after)
        if not has_met:
            break
        fault = fault_of(name, outcome)
        disturbances.append(Disturbance(name, round(after, 2), outcome.codes, fault))
        if outcome.is_success:
            break
    else:
        outcome = train(variant, workdir)
    assert outcome is not None
    actual = digest(workdir) if outcome.is_success else f"no end: {outcome.codes}"
    output = "" if actual == expected else outcome.output[-4000:]
    return Torment(variant.name, tuple(disturbances), expected, actual, output)


def _disturb(group: Group, name: str, after: float) -> tuple[bool, Outcome]:
    """Sends a signal after some seconds; returns whether the run still lived, and its end."""
    last = time.monotonic() + after
    while group.lives() and time.monotonic() < last:
        time.sleep(0.02)
    if not (lives := group.lives()):
        return lives, group.end()
    group.send(getattr(signal, name))
    if name == "SIGSTOP":
        time.sleep(PAUSE)
        group.send(signal.SIGCONT)
    return lives, group.end()


def fault_of(name: str, outcome: Outcome) -> str:
    """Returns why the end of a run after a signal is wrong, or an empty text.

    Args:
      name: the signal.
      outcome: the end. A run may succeed if the signal met its last moment.
    """
    wrong = [code for code in outcome.codes if code not in (0, *CODES.get(name, ()))]
    if outcome.is_late:
        return "it did not end"
    if wrong:
        return f"exit code {wrong[0]}: {outcome.output[-2000:]}"
    return f"traceback: {outcome.output[-2000:]}" if outcome.has_traceback else ""
