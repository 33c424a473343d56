"""Several hosts: processes that were started alike join, and tell each other what they made.

Every process runs the whole program. Where each has a part of its own to do (its questions of a
batch), `gathered` gives all of them what each made; what is done once for all, `by_first` does. On
one process both are a plain call.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pathlib
import pickle
import secrets
import sys
import threading
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from jax_ragrl.errors import UserError

T = TypeVar("T")

NAMES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
# JAX ends all processes when one of them is dead for 100 s. This bounds one that lives and hangs,
# and is longer than any work that the others wait for.
PATIENCE = 12 * 3600
SIGHT = 60  # seconds after which a network file system shows a new file
LEAVING = 60  # seconds for which a process that ends, or has failed, waits for the others
WORD = 600  # seconds after which a process that waits says so, again and again
LATE = 75  # the exit code where not all came (EX_TEMPFAIL): the same command may do later


# --- Joining --------------------------------------------------------------------------------------


def join(patience: int = 300) -> None:
    """Joins the other processes of a run, where there are any; before the first use of a device.

    Explicit variables (`NAMES`) come first; else JAX finds the others of a TPU pod, Slurm or Open
    MPI. Raises `UserError` for variables that cannot be used. Where not all processes come within
    `patience` seconds, this one says so and ends with exit code `LATE`.
    """
    if jax.distributed.is_initialized():
        return
    known = named(os.environ)
    count = known["num_processes"] if known else launched(os.environ)
    if count < 2:
        return
    where = f" at {known['coordinator_address']}" if known else ""
    _say(f"waiting for {count} processes to join{where}")
    late = f"not all of {count} processes joined{where} within {patience} s: {ADVICE}"
    # JAX would abort with a stack trace, which nothing can catch.
    alarm = threading.Timer(patience, _give_up, [late])
    alarm.daemon = True
    alarm.start()
    try:
        jax.distributed.initialize(
            **known,
            initialization_timeout=patience + 60,
            shutdown_timeout_seconds=LEAVING,
        )
    except (RuntimeError, ValueError, OSError) as error:
        raise UserError(f"{count} processes could not join{where}: {error}") from error
    finally:
        alarm.cancel()
    me, here, every = jax.process_index(), jax.local_device_count(), jax.device_count()
    _say(f"process {me} of {jax.process_count()}, {here} devices here, {every} in all")


ADVICE = (
    "see that every host runs the same command, that each has a number of its own, and that all of "
    "them reach the first one (its name, an open port, no proxy between)"
)


def _say(text: str) -> None:
    print(f"ragrl: {text}", file=sys.stderr, flush=True)


def _give_up(text: str) -> None:
    _say(text)
    os._exit(LATE)


def named(environ: Mapping[str, str]) -> dict[str, Any]:
    """What explicit variables tell `jax.distributed.initialize`; empty where there are none.

    An address alone is left to JAX where a launcher says the rest. Raises `UserError` where some
    are missing or none of them can be meant.
    """
    given = {name: environ[name] for name in NAMES if environ.get(name)}
    if not given or (set(given) == {NAMES[0]} and launched(environ) > 1):
        return {}
    if missing := [name for name in NAMES if name not in given]:
        raise UserError(
            f"{', '.join(given)} without {', '.join(missing)}: set all three on every host, or none"
        )
    address, count, number = given.values()
    if not (count.isdecimal() and number.isdecimal() and int(number) < int(count)):
        raise UserError(
            f"{NAMES[2]} is {number!r} and {NAMES[1]} {count!r}: of 4 processes they are 0 to 3"
        )
    if not address.rpartition(":")[0] or not address.rpartition(":")[2].isdecimal():
        raise UserError(f"{NAMES[0]} is {address!r}: give the host of process 0 and a port, HOST:N")
    # Explicit is explicit: a launcher beside it says nothing about the devices either.
    return {
        "coordinator_address": address,
        "num_processes": int(count),
        "process_id": int(number),
        "cluster_detection_method": "deactivate",
    }


SLURM = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")


def launched(environ: Mapping[str, str]) -> int:
    """How many processes the launcher of this one started; 1 where nothing tells of others.

    JAX finds their numbers and addresses itself, but waits for others where there are none.
    """
    if all(name in environ for name in SLURM):
        return int(environ["SLURM_NTASKS"])
    if "OMPI_MCA_orte_hnp_uri" in environ:
        return int(environ.get("OMPI_COMM_WORLD_SIZE", 1))
    # JAX sets this where it sees no TPU.
    if "TPU_SKIP_MDS_QUERY" in environ:
        return 1
    workers = environ.get("TPU_PROCESS_ADDRESSES") or environ.get("TPU_WORKER_HOSTNAMES")
    slices = int(environ.get("MEGASCALE_NUM_SLICES") or 1)
    return slices * len((workers or _tpu_workers(environ)).split(","))


def _tpu_workers(environ: Mapping[str, str]) -> str:
    """The workers of this Cloud TPU, with commas, as its metadata server lists them."""
    host = environ.get("GCE_METADATA_IP", "metadata.google.internal")
    url = f"http://{host}/computeMetadata/v1/instance/attributes/worker-network-endpoints"
    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
    try:
        with urllib.request.urlopen(request, timeout=5) as reply:
            return str(reply.read().decode())
    except (OSError, urllib.error.URLError):
        return ""  # a TPU elsewhere, or a single host


# --- Telling each other ---------------------------------------------------------------------------


def first() -> bool:
    """Whether this process is the one that writes files."""
    return jax.process_index() == 0


def gathered(work: Callable[[], T]) -> list[T]:
    """What `work()` gave at each process, in their order, at all of them; they call it together.

    What it gives must pickle. Where it raises, so do all, and none is left waiting: `UserError` at
    the others.
    """
    if jax.process_count() == 1:
        return [work()]
    raised: Exception | None = None
    try:
        told = pickle.dumps(("", work()))
    except Exception as error:
        kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        raised, told = error, pickle.dumps((f"{kind}{error}", None))
    outcomes = [pickle.loads(zlib.decompress(x)) for x in _exchanged(zlib.compress(told, 1))]
    if raised is not None:
        raise raised
    for number, (why, _) in enumerate(outcomes):
        if why:
            raise UserError(f"process {number} of {len(outcomes)} stopped: {why}")
    return [value for _, value in outcomes]


def by_first(work: Callable[[], T]) -> T:
    """What `work()` gave at process 0, which alone does it; the others wait. As `gathered`."""
    made: Any = gathered(lambda: work() if first() else None)[0]
    return made


def in_turn(work: Callable[[], T]) -> T:
    """`work()` of process 0, and then of the others: they find what it made. Each has its own."""
    if jax.process_count() == 1:
        return work()
    done: list[T] = []

    def act() -> None:
        done.append(work())

    def rest() -> None:
        pass

    gathered(act if first() else rest)
    gathered(rest if first() else act)
    return done[0]


_barriers = itertools.count()


@contextlib.contextmanager
def _waiting() -> Iterator[None]:
    """Says every `WORD` seconds that this process waits for others, and what to do."""
    over, begun = threading.Event(), time.monotonic()

    def speak() -> None:
        while not over.wait(WORD):
            _say(
                f"process {jax.process_index()} has waited for others for "
                f"{time.monotonic() - begun:.0f} s: 'kill -USR1' on a process of a host that says "
                "nothing prints where it stands"
            )

    threading.Thread(target=speak, daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _exchanged(data: bytes) -> list[bytes]:
    """The bytes of every process."""
    from orbax.checkpoint import multihost

    if not jax.distributed.is_initialized():  # a TPU knows its other hosts by itself
        raise UserError(
            f"{jax.process_count()} processes share these devices but have not joined: set "
            f"{', '.join(NAMES)} on every host"
        )
    # Not on the devices, where those that wait would time out, and nobody would say for whom.
    wait = multihost.get_barrier_sync_fn()
    with _waiting():
        wait(key=f"ragrl-{next(_barriers)}", timeout_ms=1000 * PATIENCE)
    size_H = multihost_utils.process_allgather(np.int32(len(data)))
    # Sizes are powers of two, so that few programs are compiled.
    padded = np.zeros(1 << (int(size_H.max()) - 1).bit_length(), np.uint8)
    padded[: len(data)] = np.frombuffer(data, np.uint8)
    rows = multihost_utils.process_allgather(padded)
    return [row[:size].tobytes() for row, size in zip(rows, size_H.tolist(), strict=True)]


def check_shared(folder: pathlib.Path) -> None:
    """Raises `UserError` unless every process sees what process 0 writes into a folder."""
    if jax.process_count() == 1:
        return
    file = folder / by_first(lambda: _mark(folder))
    try:
        gathered(lambda: _see(file))
    finally:
        if first():
            file.unlink()


def _mark(folder: pathlib.Path) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    name = f".seen-{secrets.token_hex(8)}"
    (folder / name).touch()
    return name


def _see(file: pathlib.Path) -> None:
    until = time.monotonic() + SIGHT
    while not file.exists():
        if time.monotonic() > until:
            raise UserError(
                f"--workdir={file.parent} is another folder on process {jax.process_index()} than "
                "on process 0: give one that all hosts share (a mounted bucket, NFS)"
            )
        time.sleep(0.5)
