"""Multi-host utilities: initialize `jax.distributed` and exchange Python objects.

Every process runs the whole program. `all_gather_object` runs the part of each process (such as its
questions of a batch) and gives all results to all of them; `on_process_zero` runs work once for
all. Both are plain calls on a single process.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pathlib
import secrets
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from jax_ragrl.errors import UserError
from jax_ragrl.runtime import records
from jax_ragrl.runtime.dispatch import in_order

T = TypeVar("T")

NAMES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
# JAX ends all processes when one of them has been dead for 100 s. This limit, in seconds, catches a
# process that is alive but hangs; it exceeds any work that other processes wait for.
BARRIER_TIMEOUT = 12 * 3600
FILE_TIMEOUT = 60  # seconds after which a network file system shows a new file
SHUTDOWN_TIMEOUT = 60  # seconds for which a process that ends, or has failed, waits for the others
WAIT_MESSAGE_EVERY = 600  # seconds between messages of a waiting process
# The exit code if not all processes joined (EX_TEMPFAIL): the same command may succeed later.
EXIT_TIMEOUT = 75


# --- Joining --------------------------------------------------------------------------------------


def join(patience: int = 300) -> None:
    """Joins the other processes of a run, if there are any; call it before using a device.

    Explicit variables (`NAMES`) take precedence. Otherwise JAX finds the other processes of a TPU
    pod, of Slurm or of Open MPI. If they have not joined after `patience` seconds, the process
    prints a message and ends with the exit code `EXIT_TIMEOUT`; other failures are a `UserError`.
    """
    if jax.distributed.is_initialized():
        return
    settings = explicit_settings(os.environ)
    count = settings["num_processes"] if settings else launched_processes(os.environ)
    if count < 2:
        return
    where = f" at {settings['coordinator_address']}" if settings else ""
    if settings and settings["process_id"] == 0:
        _check_port(settings["coordinator_address"], os.environ)
    _say(f"waiting for {count} processes to join{where}")
    late = f"not all of {count} processes joined{where} within {patience} s: {ADVICE}"
    # After its own timeout JAX would abort with a stack trace, and no handler can catch that.
    alarm = threading.Timer(patience, _give_up, [late])
    alarm.daemon = True
    alarm.start()
    try:
        jax.distributed.initialize(
            **settings,
            initialization_timeout=patience + 60,
            shutdown_timeout_seconds=SHUTDOWN_TIMEOUT,
        )
    except (RuntimeError, ValueError, OSError) as error:
        raise UserError(f"{count} processes could not join{where}: {error}") from error
    finally:
        alarm.cancel()
    me, here, every = jax.process_index(), jax.local_device_count(), jax.device_count()
    _say(f"process {me} of {jax.process_count()}, {here} devices here, {every} in all")


def _check_port(address: str, environ: Mapping[str, str]) -> None:
    """Raises `UserError` if this host cannot listen at a coordinator's port: JAX would crash."""
    host, _, port = environ.get("JAX_COORDINATOR_BIND_ADDRESS", address).rpartition(":")
    host = host.strip("[]") if "JAX_COORDINATOR_BIND_ADDRESS" in environ else ""
    is_dual = not host and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if is_dual or ":" in host else socket.AF_INET
    try:
        socket.create_server((host, int(port)), family=family, dualstack_ipv6=is_dual).close()
    except OSError as error:
        raise UserError(
            f"{NAMES[0]} is {address!r}, but this host cannot listen at port {port} "
            f"({os.strerror(error.errno or 0)}): set a free port on every host"
        ) from error


ADVICE = (
    "check that every host runs the same command, that each has a different process number, and "
    "that all can connect to the first one (its host name, an open port, no proxy in between)"
)


def _say(text: str) -> None:
    print(f"ragrl: {text}", file=sys.stderr, flush=True)


def _give_up(text: str) -> None:
    _say(text)
    os._exit(EXIT_TIMEOUT)


def explicit_settings(environ: Mapping[str, str]) -> dict[str, Any]:
    """Returns arguments of `jax.distributed.initialize` from explicit variables; empty without any.

    `UserError` if some of the variables are missing, or their values are impossible.
    """
    variables = {name: environ[name] for name in NAMES if environ.get(name)}
    # An address alone is left to JAX if a launcher provides the rest.
    if not variables or (set(variables) == {NAMES[0]} and launched_processes(environ) > 1):
        return {}
    if missing := [name for name in NAMES if name not in variables]:
        raise UserError(
            f"{', '.join(variables)} without {', '.join(missing)}: set all three on every host, or "
            "none"
        )
    address, count, number = variables.values()
    if not (count.isdecimal() and number.isdecimal() and int(number) < int(count)):
        raise UserError(
            f"{NAMES[2]} is {number!r} and {NAMES[1]} {count!r}: of 4 processes they are 0 to 3"
        )
    host, _, port = address.rpartition(":")
    if not (host and port.isdecimal() and 0 < int(port) < 1 << 16):
        raise UserError(f"{NAMES[0]} is {address!r}: give the host of process 0 and a port, HOST:N")
    # Explicit variables override a launcher entirely, its assignment of devices included.
    return {
        "coordinator_address": address,
        "num_processes": int(count),
        "process_id": int(number),
        "cluster_detection_method": "deactivate",
    }


SLURM = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")


def launched_processes(environ: Mapping[str, str]) -> int:
    """Returns how many processes the launcher started; 1 if no launcher is recognized."""
    # JAX finds their numbers and addresses itself, but would wait for others if there are none.
    if all(name in environ for name in SLURM):
        return int(environ["SLURM_NTASKS"])
    if "OMPI_MCA_orte_hnp_uri" in environ:
        return int(environ.get("OMPI_COMM_WORLD_SIZE", 1))
    workers = environ.get("TPU_PROCESS_ADDRESSES") or environ.get("TPU_WORKER_HOSTNAMES")
    # JAX sets this variable on a machine without a TPU. GKE sets it in every TPU container, and
    # names the workers there, because its containers cannot ask the metadata server.
    if not workers and "TPU_SKIP_MDS_QUERY" in environ:
        return 1
    slices = int(environ.get("MEGASCALE_NUM_SLICES") or 1)
    return slices * len((workers or _tpu_workers(environ)).split(","))


def _tpu_workers(environ: Mapping[str, str]) -> str:
    """The workers of this Cloud TPU, separated by commas, from its metadata server."""
    host = environ.get("GCE_METADATA_IP", "metadata.google.internal")
    url = f"http://{host}/computeMetadata/v1/instance/attributes/worker-network-endpoints"
    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
    try:
        with urllib.request.urlopen(request, timeout=5) as reply:
            return str(reply.read().decode())
    except (OSError, urllib.error.URLError):
        return ""  # not a Cloud TPU, or a single host


# --- Exchanging objects ---------------------------------------------------------------------------


def is_process_zero() -> bool:
    """Returns whether this process is number 0, the one that writes files."""
    return jax.process_index() == 0


def all_gather_object(work: Callable[[], T]) -> list[T]:
    """Runs `work` on every process and gathers the results on all of them, in process order.

    A collective: all processes have to call it. The result has plain or declared types, see
    `runtime.records`. If `work` raises on any process, all of them raise, so that none waits
    forever: the process itself its own error, the others a `UserError` with its message.
    """
    if jax.process_count() == 1:
        return [work()]
    raised: Exception | None = None
    try:
        message = records.dumps(("", work()))
    except Exception as error:  # any error must reach the other processes
        kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        raised, message = error, records.dumps((f"{kind}{error}", None))
    outcomes = [records.loads(x) for x in _exchange(message)]
    if raised is not None:
        raise raised
    for number, (failure, _) in enumerate(outcomes):
        if failure:
            raise UserError(f"process {number} of {len(outcomes)} stopped: {failure}")
    return [value for _, value in outcomes]


def on_process_zero(work: Callable[[], T]) -> T:
    """Runs `work` on process 0 only, and returns its result on all processes; a collective."""
    result: Any = all_gather_object(lambda: work() if is_process_zero() else None)[0]
    return result


def process_zero_first(work: Callable[[], T]) -> T:
    """Runs `work` on process 0, then on the others, which can use its files; a collective."""
    if jax.process_count() == 1:
        return work()
    results: list[T] = []

    def act(is_turn: bool) -> None:
        if is_turn:
            results.append(work())

    all_gather_object(lambda: act(is_process_zero()))
    all_gather_object(lambda: act(not is_process_zero()))
    return results[0]


_barriers = itertools.count()


@contextlib.contextmanager
def _waiting() -> Iterator[None]:
    over, start = threading.Event(), time.monotonic()

    def speak() -> None:
        while not over.wait(WAIT_MESSAGE_EVERY):
            _say(
                f"process {jax.process_index()} has waited for others for "
                f"{time.monotonic() - start:.0f} s: on a host that prints no such message, "
                "'kill -USR1' on its process prints its stack"
            )

    threading.Thread(target=speak, daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _exchange(data: bytes) -> list[bytes]:
    from orbax.checkpoint import multihost

    if not jax.distributed.is_initialized():  # a TPU finds its other hosts without it
        raise UserError(
            f"{jax.process_count()} processes share these devices but have not joined: set "
            f"{', '.join(NAMES)} on every host"
        )
    # Wait on the host: a collective on the devices would time out without naming the late process.
    wait = multihost.get_barrier_sync_fn()
    with _waiting():
        wait(key=f"ragrl-{next(_barriers)}", timeout_ms=1000 * BARRIER_TIMEOUT)
    # Another thread may start programs on these devices (`run.staleness`).
    gather = in_order(multihost_utils.process_allgather)
    size_H = gather(np.int32(len(data)))
    padded = np.zeros(1 << (int(size_H.max()) - 1).bit_length(), np.uint8)
    padded[: len(data)] = np.frombuffer(data, np.uint8)
    rows = gather(padded)
    return [row[:size].tobytes() for row, size in zip(rows, size_H.tolist(), strict=True)]


def check_shared_folder(folder: pathlib.Path) -> None:
    """Raises `UserError` unless every process sees the files that process 0 writes to a folder."""
    if jax.process_count() == 1:
        return

    def write_mark() -> str:
        folder.mkdir(parents=True, exist_ok=True)
        name = f".shared-{secrets.token_hex(8)}"
        (folder / name).touch()
        return name

    file = folder / on_process_zero(write_mark)

    def wait() -> None:
        deadline = time.monotonic() + FILE_TIMEOUT
        while not file.exists():
            if time.monotonic() > deadline:
                raise UserError(
                    f"--workdir={folder} is a different folder on process {jax.process_index()} "
                    "than on process 0: give one that all hosts share (a mounted bucket, NFS)"
                )
            time.sleep(0.5)

    try:
        all_gather_object(wait)
    finally:
        if is_process_zero():
            file.unlink()
