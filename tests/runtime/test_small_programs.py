"""Small programs on a CPU are started from several threads, so that they run at the same time."""

import functools
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest

from jax_ragrl.runtime import small_programs
from jax_ragrl.runtime.sharding import make_mesh
from jax_ragrl.runtime.small_programs import ONE_CORE_PARAMETERS, start, uses_one_core


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_programs, "count_cores", lambda: 2)
    monkeypatch.setattr(small_programs, "_thread", threading.local())


def test_programs_are_started_from_the_threads_in_turn():
    threads = [start(threading.get_ident, concurrently=True) for _ in range(4)]
    assert threads[:2] == threads[2:]
    assert len({*threads, threading.get_ident()}) == 3
    assert start(threading.get_ident, concurrently=False) == threading.get_ident()
    program = jax.jit(lambda x: x + 1)
    results = [start(functools.partial(program, np.float32(n)), concurrently=True) for n in (1, 2)]
    assert jax.device_get(results) == [2, 3]


def test_threads_do_not_wait_for_the_programs_of_each_other():
    """A starter of the update is busy while the rollout starts a program."""
    rollout_started = threading.Event()
    busy = functools.partial(start, lambda: rollout_started.wait(20), concurrently=True)
    with ThreadPoolExecutor(3) as pool:
        # As many as a thread has starters, so that a shared one would be busy for certain.
        updates = [pool.submit(lambda: (busy(), busy())) for _ in range(2)]
        pool.submit(lambda: start(rollout_started.set, concurrently=True)).result(10)
        assert all(all(update.result()) for update in updates)


def test_a_start_within_a_start_uses_its_thread_and_errors_reach_the_caller():
    inner = functools.partial(start, threading.get_ident, concurrently=True)
    outer, again = start(lambda: (threading.get_ident(), inner()), concurrently=True)
    assert outer == again
    with pytest.raises(ZeroDivisionError):
        start(lambda: 1 // 0, concurrently=True)


def test_a_small_model_on_one_cpu_device_uses_one_core(monkeypatch: pytest.MonkeyPatch):
    small, large = ({"kernel": np.empty(n, np.int8)} for n in (0, ONE_CORE_PARAMETERS + 1))
    assert uses_one_core(small) and not uses_one_core(large)
    assert not uses_one_core(small, make_mesh((8, 1, 1)))
    monkeypatch.setattr(small_programs, "target_platform", lambda: "gpu")
    assert not uses_one_core(small)
