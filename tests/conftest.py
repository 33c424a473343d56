"""The rules of all tests: eight virtual CPU devices, strict promotion, no silent transfers.

They are stricter than those of a run, so that a mistake fails here and not on a pod:

* Dtypes never promote silently (`jax_numpy_dtype_promotion = strict`) and ranks never broadcast
  silently (`jax_numpy_rank_promotion = raise`).
* An array never moves silently between devices, nor from a device to the host. Use
  `jax.device_put` and `jax.device_get`. (On the CPU the host shares the device's memory, so that
  `np.asarray(x)` and `float(x)` copy nothing and pass.)
* Copies from the host are forbidden only inside `with no_transfers():`. That guard
  counts every constant, on the CPU too: `jnp.ones(3)`, `x + 1` and `jax.random.key(0)` outside
  `jit` are copies. Make the inputs of a test first, then guard the step.
"""

import functools
import os
import pathlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

from tests.flags import flags

# Read by JAX and by transformers at import, so set before anything imports them.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags(8)}".strip()
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", "")  # not that of the user
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ["OPENAI_API_KEY"] = os.environ["SERPER_API_KEY"] = "none"  # not those of the user

import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402

from jax_ragrl.runtime.mappings import MAPPINGS  # noqa: E402

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
# For the entire process: `with jax.transfer_guard(...)` holds in one thread only, and a rollout
# overlaps its effects in others.
jax.config.update("jax_transfer_guard_device_to_device", "disallow")
jax.config.update("jax_transfer_guard_device_to_host", "disallow")

# The first example of a property compiles, which no deadline allows for.
hypothesis.settings.register_profile("ci", deadline=None)
hypothesis.settings.load_profile("ci")

REPO = pathlib.Path(__file__).resolve().parent.parent

# Linux allows 65,530 memory mappings per process by default, and XLA maps each kernel on its own.
MAX_MAPPINGS = 30_000


@pytest.fixture(autouse=True, scope="module")
def programs_of_one_file() -> Iterator[None]:
    """Drops the compiled programs after a file if they hold many mappings, and much memory."""
    yield
    if MAPPINGS.exists() and MAPPINGS.read_bytes().count(b"\n") > MAX_MAPPINGS:
        jax.clear_caches()


# Whether programs are compiled without optimizations now.
IS_PLAIN = pytest.StashKey[bool]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Starts with the files that have slow tests: a process that took one last would end alone."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Optimizes the programs of tests that are marked `optimized`, and of their fixtures.

    The other tests compile longer than they compute. Processes that tests start are whole runs,
    which compute longer, and do not read this setting.
    """
    is_plain = item.get_closest_marker("optimized") is None
    if item.config.stash.get(IS_PLAIN, None) != is_plain:
        # A program of the other kind rounds otherwise, and JAX would use it again.
        jax.clear_caches()
        jax.config.update("jax_disable_most_optimizations", is_plain)
        item.config.stash[IS_PLAIN] = is_plain


@pytest.fixture
def no_transfers() -> Callable[[], AbstractContextManager]:
    """`with no_transfers(): step(state, batch)` fails if the step copies anything implicitly."""
    return functools.partial(jax.transfer_guard, "disallow")


@pytest.fixture(scope="session")
def shared_data() -> pathlib.Path:
    """The folder of data set samples next to the checkout; without it, its tests are skipped."""
    folder = REPO.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("no data set samples: there is no folder ../shared/data next to this checkout")
    return folder
