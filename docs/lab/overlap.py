"""Measures how far stale and early rollouts hide the language model: seconds of a step.

    python docs/lab/overlap.py --config=configs/tiny/c3po.py --latency 1 --steps 6

The same config trains with fresh rollouts (`run.staleness` 0), with stale ones (1), with early
ones, which have no lockstep (`rollout.collect`), and with both. Its language model sleeps per
request. The seconds of the fresh steps give the critical path in lockstep, the least time of a step
on one set of devices, which serve one program after another:

    fresh    device + llm + retriever + host + update
    stale    max(device + llm + retriever + host, device + update)

The first four are the rollout by the cause of waiting, see `rollout.waiting`. The update has the
credit. Without lockstep there is no such formula: how the latencies differ decides.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import pathlib
import random
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jax_ragrl.errors import EffectError, UserError
from jax_ragrl.learner.policies import Policies
from jax_ragrl.llm.base import FrozenLLM
from jax_ragrl.rollout.waiting import DEVICE
from jax_ragrl.run.build import build_components
from jax_ragrl.run.config import Job
from jax_ragrl.run.load import load_job
from jax_ragrl.run.overrides import load_config
from jax_ragrl.run.parts import Components
from jax_ragrl.runtime.compile_cache import compile_seconds
from jax_ragrl.runtime.dispatch import is_on_device
from jax_ragrl.training.loop import make_rollouts
from jax_ragrl.training.rollouts import Rollouts
from jax_ragrl.training.setup import prepare_policies
from jax_ragrl.training.step import learn, turns_to_train
from jax_ragrl.types import LLMRequest

FIRST_STEPS = 2  # first steps: they compile, and the first rollouts of a run are never stale
IMPORTANCE_WEIGHT_CAP = 2.0  # of configs without one; both runs have it, and so the same work
# The keys of the section `run` that each kind of rollouts has.
MODES: dict[str, dict[str, Any]] = {
    "fresh": {},
    "stale": {"staleness": 1},
    "early": {"lockstep": False},
    "stale_and_early": {"staleness": 1, "lockstep": False},
}
Facts = dict[str, float]


def bench_overlap(
    values: Mapping[str, Any], latency: float, steps: int, *, is_exponential: bool = False
) -> dict[str, Any]:
    """Trains a config with fresh, stale and early rollouts.

    Args:
      values: the values of the config.
      latency: seconds that the language model sleeps per request; concurrent requests sleep
        together.
      steps: steps per run; the first two are not counted.
      is_exponential: whether the seconds are distributed exponentially, with `latency` as mean.

    Returns:
      For `fresh`, `stale`, `early` and `stale_and_early` rollouts the medians over steps of the
      seconds of a step and its parts, and the `speedup` over fresh ones; for the first two the
      critical path too, and `step_s` over it (`ratio`).

    Raises:
      UserError: no step would be counted.
    """
    if steps <= FIRST_STEPS:
        raise UserError(f"--steps is {steps}: use more than {FIRST_STEPS}, which are not counted")
    job = _with_cap(load_job(values))
    with tempfile.TemporaryDirectory() as folder:
        parts = build_components(job, pathlib.Path(folder))
        parts = parts._replace(llm=SleepingLLM(parts.llm, latency, is_exponential))
        runs = {
            name: medians(measure_run(_with(job, steps, mode), parts))
            for name, mode in MODES.items()
        }
    for run in runs.values():
        run |= {"speedup": round(runs["fresh"]["step_s"] / run["step_s"], 3)}
    for name in ("fresh", "stale"):
        runs[name] |= _compare(runs[name], runs["fresh"], MODES[name].get("staleness", 0))
    return {
        "device": jax.devices()[0].device_kind,
        "latency_s": latency,
        "exponential": is_exponential,
        "counted_steps": steps - FIRST_STEPS,
        **runs,
    }


def _with_cap(job: Job) -> Job:
    cap = job.objective.importance_weight_cap or IMPORTANCE_WEIGHT_CAP
    objective = dataclasses.replace(job.objective, importance_weight_cap=cap)
    return dataclasses.replace(job, objective=objective)


def _with(job: Job, steps: int, mode: Mapping[str, Any]) -> Job:
    run = {"staleness": 0, "lockstep": True, "steps": steps, **mode}
    return dataclasses.replace(job, run=dataclasses.replace(job.run, **run))


class SleepingLLM:
    """A language model that sleeps as long as the slowest request of a call, and then answers."""

    def __init__(self, llm: FrozenLLM, latency: float, is_exponential: bool) -> None:
        self._llm, self._latency, self._is_exponential = llm, latency, is_exponential
        self.name, self.on_device = llm.name, is_on_device(llm)

    def complete(self, requests: Sequence[LLMRequest]) -> Sequence[str | EffectError]:
        """Returns the replies of the language model."""
        time.sleep(max(map(self.seconds, requests)))
        return self._llm.complete(requests)

    def seconds(self, request: LLMRequest) -> float:
        """Returns the seconds of a request, which are a function of its seed."""
        if not self._is_exponential:
            return self._latency
        return self._latency * random.Random(request.seed).expovariate(1.0)


def measure_run(job: Job, parts: Components) -> list[Facts]:
    """Measures the counted steps of a run, without logging, checkpoints and evaluation.

    Args:
      job: the job, with its staleness.
      parts: the components with the initial policies.
    """
    policies = prepare_policies(job, parts.policies, parts.tokenizer)
    steps = []
    with contextlib.closing(make_rollouts(job, parts)) as rollouts:
        for step in range(job.run.steps):
            policies, facts = _measure_step(rollouts, policies, step)
            steps.append(facts)
    return steps[FIRST_STEPS:]


def _measure_step(rollouts: Rollouts, policies: Policies, step: int) -> tuple[Policies, Facts]:
    """Takes one step as `training.loop` does."""
    compile_start, start = compile_seconds(), time.perf_counter()
    rollout = rollouts.take(policies, step)
    rollout_end = time.perf_counter()
    rollouts.begin(policies, step + 1)
    turns, _ = turns_to_train(rollouts.method, rollout.forest)
    policies, _ = learn(rollouts.method, policies, rollout.forest, turns, step)
    # Updates are dispatched asynchronously: the step ends when the parameters are computed.
    jax.block_until_ready([policy.state.policy.params for policy in policies.values()])
    end = time.perf_counter()
    facts = {
        "step_s": end - start,
        "wait_rollout_s": rollout_end - start,
        "update_s": end - rollout_end,
        "rollout_s": sum(rollout.seconds.values()),
        **{f"rollout/{cause}_s": seconds for cause, seconds in rollout.seconds.items()},
        "compile_s": compile_seconds() - compile_start,
        "staleness": float(rollout.staleness),
    }
    return policies, facts


def medians(steps: Sequence[Facts]) -> Facts:
    """Returns the median over steps of each number."""
    return {name: round(statistics.median(x[name] for x in steps), 4) for name in steps[0]}


def critical_path(fresh: Facts, staleness: int) -> float:
    """Returns the least seconds of a step, see the module.

    Args:
      fresh: the seconds of steps with fresh rollouts.
      staleness: 0 or 1.
    """
    if not staleness:
        return fresh["rollout_s"] + fresh["update_s"]
    return max(fresh["rollout_s"], fresh[f"rollout/{DEVICE}_s"] + fresh["update_s"])


def _compare(run: Facts, fresh: Facts, staleness: int) -> Facts:
    path = critical_path(fresh, staleness)
    return {"critical_path_s": round(path, 4), "ratio": round(run["step_s"] / path, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--latency", type=float, default=1.0)
    parser.add_argument("--exponential", action="store_true")
    parser.add_argument("--steps", type=int, default=6)
    options, config = parser.parse_known_args()
    values = load_config(None, config)
    exponential = options.exponential
    print(
        json.dumps(
            bench_overlap(values, options.latency, options.steps, is_exponential=exponential)
        )
    )


if __name__ == "__main__":
    main()
