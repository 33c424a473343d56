"""Programs start in one order on all devices, whichever threads start them."""

import importlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import pytest

from jax_ragrl.runtime import dispatch
from jax_ragrl.runtime.dispatch import OrderedProgram, in_order

# The modules whose programs run on a mesh during rollouts and updates.
MODULES = (
    *("sampling.batches", "sampling.decode", "learner.gradients"),
    *("learner.dpo", "learner.targets", "learner.checkpoint", "retrieval.exact"),
    *("models.encoder", "models.cross_encoder"),
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
    assert len(functions) >= 20
    assert [name for name, value in functions.items() if isinstance(value, JITTED)] == []
