"""`python -m tests.chaos.shifted_clock COMMAND` runs `ragrl COMMAND` while the wall clock jumps.

Each 50th reading of the clock moves it by up to a day, in either direction; the monotonic clocks
run on, as when a time server sets the clock of a machine.
"""

from __future__ import annotations

import itertools
import random
import sys
import time
from collections.abc import Callable

DAY = 86_400.0


def jumping(clock: Callable[[], float]) -> Callable[[], float]:
    """Returns a clock that jumps."""
    readings, rng, shift = itertools.count(), random.Random(0), [0.0]

    def read() -> float:
        if next(readings) % 50 == 0:
            shift[0] = rng.uniform(-DAY, DAY)
        return clock() + shift[0]

    return read


if __name__ == "__main__":
    from jax_ragrl.cli.main import main

    time.time = jumping(time.time)
    sys.exit(main(sys.argv[1:]))
