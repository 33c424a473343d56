"""Measures a complete training step of a config: a rollout and the updates after it.

Wall time is split into the calls of the sampler, the retriever and the frozen language model during
the rollout (they may overlap, so their sum can exceed it) and the updates. The profiler gives the
share of the time in which an accelerator computes; a CPU has no such share. Compile time, for
shapes that no earlier step had, is reported separately and excluded from the busy share.
"""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
import tempfile
import time
from collections.abc import Iterable, Sequence
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from jax_ragrl.bench.train import peak_bytes
from jax_ragrl.corpus.questions import QuestionStream
from jax_ragrl.errors import UserError
from jax_ragrl.learner.policies import Policies
from jax_ragrl.models.config import DecoderConfig
from jax_ragrl.models.decoder import Decoder, init_sharded
from jax_ragrl.rollout.waiting import WaitingTimes
from jax_ragrl.run.build import build_components
from jax_ragrl.run.config import Job
from jax_ragrl.run.models import load_policies, mesh_for
from jax_ragrl.run.parts import Components
from jax_ragrl.runtime.compile_cache import compile_seconds
from jax_ragrl.text.tokenizer import ChatTokenizer
from jax_ragrl.training.setup import acting_environment, method_of, prepare_policies
from jax_ragrl.training.step import learn, roll_out, turns_to_train, with_scorer
from jax_ragrl.types import Question


def bench_step(
    job: Job, workdir: pathlib.Path, repeats: int, shape: DecoderConfig | None
) -> dict[str, Any]:
    """Measures training steps after a first one, which compiles most programs.

    `workdir` holds an index, or is empty. `shape` is the architecture of policies with random
    weights, whose outputs are noise, which ends unforced rollouts early.

    Returns:
      Per step, the seconds of the rollout, of the calls in it, of the updates and of compilation,
      their shares of the step, the tokens of all training contexts, and the busy share of the
      devices while nothing compiles (None on a CPU). Once, the peak memory in bytes.
    """
    if job.run.staleness:
        raise UserError(
            f"run.staleness is {job.run.staleness}, but in a measured step the update waits for "
            "the rollout: set it to 0, or compare both modes with docs/lab/overlap.py"
        )
    components = build_components(job, workdir)
    policies = initial_policies(job, components, shape)
    # Frees the copies that are not trained.
    components = components._replace(policies={})
    data = QuestionStream(components.questions["train"], job.seed)
    steps = []
    # The first step compiles and is reported separately.
    for step in range(1 + repeats):
        questions = data.draw(job.run.questions_per_step)
        policies, facts = _profile_step(job, components, policies, questions, step)
        steps.append(facts)
    return {
        "device": jax.devices()[0].device_kind,
        "questions": job.run.questions_per_step,
        "first_step_s": steps[0]["step_s"],
        "steps": steps[1:],
        "peak_bytes": peak_bytes(),
    }


def initial_policies(job: Job, components: Components, shape: DecoderConfig | None) -> Policies:
    """Returns the policies before the first step; arguments as in `bench_step`."""
    if shape is None:
        return prepare_policies(job, components.policies, components.tokenizer)
    seeds = itertools.count()

    def random_policy(folder: str, mesh: Mesh | None, dtype: str) -> tuple[Decoder, ChatTokenizer]:
        del folder
        config, rngs = dataclasses.replace(shape, param_dtype=dtype), nnx.Rngs(next(seeds))
        decoder = Decoder(config, rngs=rngs) if mesh is None else init_sharded(config, mesh, rngs)
        return decoder, components.tokenizer

    return prepare_policies(job, *load_policies(job, mesh_for(job), load=random_policy))


def _profile_step(
    job: Job, components: Components, policies: Policies, questions: list[Question], step: int
) -> tuple[Policies, dict[str, Any]]:
    """Measures one step, with the busy share of the devices."""
    # On a CPU the host computes, so there is no device whose idle time could be measured.
    if jax.default_backend() == "cpu":
        policies, facts = _measure_step(job, components, policies, questions, step)
        return policies, facts | {"busy_share": None}
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            policies, facts = _measure_step(job, components, policies, questions, step)
        busy = busy_seconds(pathlib.Path(folder))
    # Compilation runs on the host while the devices wait, and does not recur in long runs.
    share = busy / (facts["step_s"] - facts["compile_s"])
    return policies, facts | {"busy_share": round(share, 4)}


def _measure_step(
    job: Job, components: Components, policies: Policies, questions: list[Question], step: int
) -> tuple[Policies, dict[str, Any]]:
    """Measures one step of `training.step`, without logging, checkpoints and evaluation."""
    # Compilation is not a separate phase: JAX compiles within the first call of each program.
    method, compile_start = method_of(job), compile_seconds()
    start = time.perf_counter()
    environment = acting_environment(job, components, policies)
    waiting = WaitingTimes()
    forest = roll_out(method, environment._replace(times=waiting), questions, step)
    seconds = waiting.seconds()
    turns, _ = turns_to_train(method, with_scorer(forest, method, policies, components.tokenizer))
    rollout_end = time.perf_counter()
    policies, _ = learn(method, policies, forest, turns, step)
    # Updates are dispatched asynchronously: the step ends when the parameters are computed.
    jax.block_until_ready([policy.state.policy.params for policy in policies.values()])
    step_end = time.perf_counter()
    times = {
        "step_s": step_end - start,
        "rollout_s": rollout_end - start,
        **{f"rollout/{name}_s": x for name, x in seconds.items()},
        "update_s": step_end - rollout_end,
        "compile_s": compile_seconds() - compile_start,
    }
    tokens = sum(len(turn.context()) for turn in turns if turn.role in method.roles(step))
    # Calls that overlap may add up to more than 1.
    shares = {name.replace("_s", "_share"): x / times["step_s"] for name, x in times.items()}
    del shares["step_share"]
    facts = {name: round(x, 4) for name, x in (times | shares).items()}
    return policies, facts | {"turns": len(turns), "tokens": tokens}


def busy_seconds(folder: pathlib.Path) -> float:
    """The mean seconds that the devices of this process computed, from a profile.

    The profile has one plane `/device:...` per device. Its kernels are on the lines `Stream ...` of
    a GPU or on the line `XLA Ops` of a TPU. Concurrent kernels count once.
    """
    files = sorted(folder.rglob("*.xplane.pb"))
    planes = [p for f in files for p in jax.profiler.ProfileData.from_file(str(f)).planes]
    return _mean_busy_seconds(plane for plane in planes if plane.name.startswith("/device:"))


def _mean_busy_seconds(planes: Iterable[Any]) -> float:
    seconds = []
    for plane in planes:
        lines = [x for x in plane.lines if x.name.startswith("Stream") or x.name == "XLA Ops"]
        # Kernels of several streams overlap, so that their durations must not be added up.
        spans = [(e.start_ns, e.start_ns + e.duration_ns) for x in lines for e in x.events]
        seconds += [union_length(spans) / 1e9] if lines else []
    return sum(seconds) / len(seconds) if seconds else 0.0


def union_length(spans: Sequence[tuple[float, float]]) -> float:
    """The length of the union of intervals."""
    total, end = 0.0, float("-inf")
    # Sorted by start, an interval adds only its part beyond the latest end so far.
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total
