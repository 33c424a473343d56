"""Programs start in one order on all devices; small ones on a CPU from several threads."""

import functools
import importlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ragrl.runtime import dispatch, small_programs
from jax_ragrl.runtime.dispatch import OrderedProgram, in_order
from jax_ragrl.runtime.sharding import make_mesh
from jax_ragrl.runtime.small_programs import ONE_CORE_PARAMETERS, start, uses_one_core

# The modules whose programs run on a mesh during rollouts and updates.
MODULES = (
    *("sampling.batches", "sampling.decode", "learner.gradients"),
    *("learner.role_gradients", "learner.targets", "learner.checkpoint", "retrieval.exact"),
    "models.text_batches",
)
JITTED = type(jax.jit(lambda: None))


class Inside:
    """Counts the threads that are inside a call."""

    now = most = 0

    def __call__(self) -> None:
        self.now += 1
        self.most = max(self.most, self.now)
        time.sleep(0.002)
        self.now -= 1


@pytest.mark.parametrize(("several", "most"), [(True, 1), (False, 4)])
def test_two_threads_never_start_programs_at_once(monkeypatch, several, most):
    monkeypatch.setattr(dispatch, "_has_several_devices", lambda: several)
    inside, meet = Inside(), threading.Barrier(4)
    programs = [in_order(lambda: inside()) for _ in range(2)]

    def start(number: int) -> None:
        meet.wait(10)
        for _ in range(5):
            programs[number % 2]()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(start, range(4)))
    # A single device runs programs in the order of their start.
    assert inside.most == most if several else inside.most > 1


def test_an_ordered_program_is_the_jitted_function():
    @in_order
    @jax.jit
    def double(x: jax.Array) -> jax.Array:
        """Doubles."""
        return 2 * x

    assert double.__doc__ == "Doubles." and "stablehlo" in double.lower(jnp.ones(2)).as_text()
    nested = in_order(jax.jit(lambda x: double(x) + 1))  # traces one program within another
    assert nested(jax.device_put(jnp.ones(2))).tolist() == [3, 3]


def jitted_functions() -> Iterator[tuple[str, object]]:
    for name in MODULES:
        module = importlib.import_module(f"jax_ragrl.{name}")
        for key, value in vars(module).items():
            if isinstance(value, JITTED | OrderedProgram):
                yield f"{name}.{key}", value


def test_every_program_of_rollouts_and_updates_is_ordered():
    functions = dict(jitted_functions())
    assert len(functions) >= 15
    assert [name for name, value in functions.items() if isinstance(value, JITTED)] == []


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
