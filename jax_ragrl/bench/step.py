"""What a whole training step costs: a rollout and the updates after it, of a config.

Wall time is split by who works: the sampler, the retriever and the frozen language model while a
rollout calls them (side by side, so their seconds may add up to more), and the updates. How much of
it an accelerator computes is read from the profiler; a CPU is its own host and has no such share.
What is compiled in a step, for shapes that no step before it had, is counted and left out of it.
"""

from __future__ import annotations

import contextlib
import pathlib
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
from flax import nnx

from jax_ragrl.bench.train import peak_bytes
from jax_ragrl.corpus.questions import question_batches
from jax_ragrl.learner.packing import turns_of
from jax_ragrl.learner.policies import Policies
from jax_ragrl.models.config import DecoderConfig
from jax_ragrl.models.decoder import Decoder, init_sharded
from jax_ragrl.rollout.collect import Environment
from jax_ragrl.rollout.pipelining import Around
from jax_ragrl.run.components import Parts, assemble, mesh_for
from jax_ragrl.run.config import Job
from jax_ragrl.train.loop import acting_environment, learn, prepare_policies, roll_out
from jax_ragrl.types import Question

Interval = tuple[float, float]


class Timed(Around):
    """Another object, the seconds of whose calls are added up in `seconds[name]`."""

    def __init__(self, wrapped: Any, name: str, seconds: dict[str, float]):
        super().__init__(wrapped, lambda: _timing(name, seconds))


@contextlib.contextmanager
def _timing(name: str, seconds: dict[str, float]) -> Iterator[None]:
    begun = time.perf_counter()
    try:
        yield
    finally:
        seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - begun


COMPILED = "/jax/core/compile/backend_compile_duration"  # an event of JAX, its duration in seconds


def bench_step(
    job: Job, workdir: pathlib.Path, repeats: int, shape: DecoderConfig | None
) -> dict[str, Any]:
    """The cost of training steps after a first one, which compiles most of what there is.

    With a `shape` every policy has random weights of that shape: what it writes is noise, which
    ends rollouts early, unless they are forced.

    Returns of each step the seconds of the rollout, of the calls in it, of the updates and of
    compiling, their shares of the step, the tokens of all trained contexts, and the busy share of
    the devices in the time that nothing was compiled (None on a CPU); and peak memory.
    """
    parts = assemble(job, workdir)
    if shape is not None:
        names = sorted(parts.policies)
        parts = parts._replace(policies=_random(job, shape, names))
    policies = prepare_policies(job, parts.policies, parts.tokenizer)
    parts = parts._replace(policies={})
    data = question_batches(parts.questions["train"], job.run.questions, job.seed)
    laps = []
    for step in range(1 + repeats):
        policies, lap = _profiled(job, parts, policies, next(data), step)
        laps.append(lap)
    return {
        "device": jax.devices()[0].device_kind,
        "questions": job.run.questions,
        "first_step_s": laps[0]["step_s"],
        "steps": laps[1:],
        "peak_bytes": peak_bytes(),
    }


def _random(job: Job, shape: DecoderConfig, names: Sequence[str]) -> dict[str, Decoder]:
    mesh = mesh_for(job)
    draws = [nnx.Rngs(i) for i in range(len(names))]
    made = (Decoder(shape, rngs=r) if mesh is None else init_sharded(shape, mesh, r) for r in draws)
    return dict(zip(names, made, strict=True))


def _profiled(
    job: Job, parts: Parts, policies: Policies, questions: list[Question], step: int
) -> tuple[Policies, dict[str, Any]]:
    if jax.default_backend() == "cpu":
        policies, lap = _lap(job, parts, policies, questions, step)
        return policies, lap | {"busy_share": None}
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            policies, lap = _lap(job, parts, policies, questions, step)
        busy = busy_seconds(pathlib.Path(folder))
    return policies, lap | {"busy_share": round(busy / (lap["step_s"] - lap["compile_s"]), 4)}


def _lap(
    job: Job, parts: Parts, policies: Policies, questions: list[Question], step: int
) -> tuple[Policies, dict[str, Any]]:
    """One step as `train.loop` takes it, without what it logs, saves and evaluates."""
    seconds: dict[str, float] = {"sampler": 0.0, "retriever": 0.0, "llm": 0.0}
    compiling = _Compiling()
    roles = job.schedule.roles(step, tuple(job.policy_of))
    begun = time.perf_counter()
    environment = _timed(acting_environment(job, parts, policies), seconds)
    forest = roll_out(job, environment, questions, roles, step)
    credit_N, weight_N = job.credit(forest, forest.reward_N)
    turns = turns_of(forest, weight_N, forced=job.train_forced)
    rolled = time.perf_counter()
    updated, _ = learn(job, policies, forest, credit_N, turns, roles, step)
    jax.block_until_ready([models.policy.params for _, models in updated.values()])
    ended = time.perf_counter()
    lap = {
        "step_s": ended - begun,
        "rollout_s": rolled - begun,
        **{f"rollout/{name}_s": x for name, x in seconds.items()},
        "update_s": ended - rolled,
        "compile_s": compiling.stop(),
    }
    shares = {k.replace("_s", "_share"): x / lap["step_s"] for k, x in lap.items() if k != "step_s"}
    tokens = sum(len(turn.context()) for turn in turns if turn.role in roles)
    rounded = {name: round(x, 4) for name, x in (lap | shares).items()}
    return updated, rounded | {"turns": len(turns), "tokens": tokens}


class _Compiling:
    """The seconds that JAX compiles for until `stop`."""

    def __init__(self) -> None:
        self._seconds = 0.0
        jax.monitoring.register_event_duration_secs_listener(self._hear)

    def _hear(self, event: str, duration_secs: float, **_: str | int) -> None:
        self._seconds += duration_secs if event == COMPILED else 0.0

    def stop(self) -> float:
        jax.monitoring.unregister_event_duration_listener(self._hear)
        return self._seconds


def _timed(environment: Environment, seconds: dict[str, float]) -> Environment:
    judge = environment.judge
    return Environment(
        Timed(environment.sampler, "sampler", seconds),
        Timed(environment.retriever, "retriever", seconds),
        Timed(environment.llm, "llm", seconds),
        environment.count,
        judge and Timed(judge, "llm", seconds),
    )


def busy_seconds(folder: pathlib.Path) -> float:
    """For how long the devices of this process computed, on average, from a profile.

    Kernels are on a plane `/device:...` a device: on lines `Stream ...` of a GPU, on the line
    `XLA Ops` of a TPU. What runs side by side counts once.
    """
    files = sorted(folder.rglob("*.xplane.pb"))
    planes = [p for f in files for p in jax.profiler.ProfileData.from_file(str(f)).planes]
    return _busy(plane for plane in planes if plane.name.startswith("/device:"))


def _busy(planes: Iterable[Any]) -> float:
    each = []
    for plane in planes:
        lines = [x for x in plane.lines if x.name.startswith("Stream") or x.name == "XLA Ops"]
        spans = [(e.start_ns, e.start_ns + e.duration_ns) for x in lines for e in x.events]
        each += [covered(spans) / 1e9] if lines else []
    return sum(each) / len(each) if each else 0.0


def covered(spans: Sequence[Interval]) -> float:
    """The length of the union of intervals."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total
