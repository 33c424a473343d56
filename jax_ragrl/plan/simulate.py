"""A model of the seconds of a training step on a number of devices, from the costs of a plan.

G = D / tensor groups of devices share Q questions with A actions each, in R rounds:

  r = A Q / (R G)                                 rows of a group and round
  t(r) = t_w + (t_p - t_w) r / r_p                a decode step: weights, then a share per row
  rollout = R (P r c + ceil(r / r_p) N t(min(r, r_p)) + L)
  update = ceil(A Q U / (G B)) g                  B tokens per batch and group
  sync = weight bytes / link
  host = A Q h
  step = rollout + update + sync + host
  step = max(rollout, rollout - R L + update) + sync + host       with stale rollouts

P and N are the prompt and new tokens of an action, U its distinct tokens in the update, L the
seconds that a round waits for the frozen language model, h the seconds of the host per action. The
plan gives t_p (r_p rows), t_w (weights alone), c (prefill of a token), and g (all passes over a
batch), at the speeds of the data sheet times an `efficiency`. Assumptions: all actions have N
tokens, rounds have equal sizes, and the traffic of a batch does not depend on D. Nothing overlaps;
with stale rollouts (`run.staleness` 1) the devices update while a round waits.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from jax_ragrl.errors import UserError


@dataclasses.dataclass(frozen=True)
class Workload:
    """The work of one step; a run's metrics have its numbers.

    Fields:
      questions: questions per step, Q.
      actions: actions per question, A.
      rounds: rounds of sampling, R.
      prompt: prompt tokens per action, P.
      tokens: new tokens per action, N.
      distinct: tokens per action in the update, U; 0 stands for `prompt + tokens`.
      llm: seconds per round of waiting for the frozen language model, L.
      host: seconds of the host per action, h.
      efficiency: share of the data-sheet speeds, above 0 and up to 1.
      staleness: 1 if the rollouts of a step are made during the update of the step before.
    """

    questions: float = 64
    actions: float = 8
    rounds: float = 4
    prompt: float = 1024
    tokens: float = 128
    distinct: float = 0
    llm: float = 0
    host: float = 0
    efficiency: float = 1
    staleness: float = 0

    def __post_init__(self) -> None:
        positive = ("questions", "actions", "rounds", "prompt", "tokens", "efficiency")
        for name, value in dataclasses.asdict(self).items():
            if not math.isfinite(value) or value < 0 or (name in positive and value == 0):
                raise UserError(
                    f"workload {name}={value} is out of range: give a finite number "
                    f"{'above' if name in positive else 'from'} 0"
                )
        if self.efficiency > 1:
            raise UserError(
                f"workload efficiency={self.efficiency} exceeds the data sheet: give at most 1"
            )
        if self.staleness not in (0, 1):
            raise UserError(f"workload staleness={self.staleness} is neither 0 nor 1")


def parse_workload(text: str, **given: float) -> Workload:
    """Parses a workload such as `questions=48,tokens=110`; `UserError` if it is not valid.

    Numbers that a config has are `given`, in place of their defaults.
    """
    names = [field.name for field in dataclasses.fields(Workload)]
    values = dict[str, float]()
    for part in filter(None, text.split(",")):
        name, _, number = part.partition("=")
        if name in values:
            raise UserError(f"workload {name} has two values: give one of them")
        try:
            values[name] = float(number)
        except ValueError:
            raise UserError(f"workload {part!r} has no number: write NAME=NUMBER") from None
        if name not in names:
            raise UserError(f"no workload number {name!r}: use {', '.join(names)}")
    return Workload(**{**given, **values})


def simulate(plan: Mapping[str, Any], work: Workload, devices: int) -> dict[str, Any]:
    """Returns the seconds of a step on a number of devices, from a plan with `speed`.

    Returns:
      `devices`, `rollout_s`, `update_s`, `sync_s`, `host_s`, `step_s`, `waiting`, the share of a
      step that the devices wait for language model and host, and `tokens_per_s` new tokens.

    Raises:
      UserError: the devices have no data sheet, or the tensor axis does not divide their number.
    """
    if plan["speed"] is None:
        raise UserError(
            f"no data sheet for {plan['device']!r}, so a step has no estimate: "
            "name a TPU or GPU with --topology"
        )
    tensor = plan["mesh"]["tensor"]
    if devices < 1 or devices % tensor:
        raise UserError(
            f"{devices} devices cannot hold whole groups of {tensor} on the tensor axis: "
            f"give a multiple of {tensor}"
        )
    groups, link = devices // tensor, plan["speed"]["ceilings"]["link"] * work.efficiency
    actions = work.questions * work.actions
    parts = {
        "rollout_s": _rollout(plan, work, actions / groups),
        "update_s": _update(plan, work, actions / groups),
        "sync_s": plan["sampling"]["weight_bytes"] / link,
        "host_s": actions * work.host,
    }
    waits = work.rounds * work.llm
    busy = parts["rollout_s"] - waits + parts["update_s"]
    both = max(parts["rollout_s"], busy) if work.staleness else waits + busy
    step = both + parts["sync_s"] + parts["host_s"]
    return {
        "devices": devices,
        **parts,
        "step_s": step,
        "waiting": (both - busy + parts["host_s"]) / step,
        "tokens_per_s": actions * work.tokens / step,
    }


def _rollout(plan: Mapping[str, Any], work: Workload, actions: float) -> float:
    """Seconds of all rounds, given the actions of a group."""
    speed, sampling = plan["speed"], plan["sampling"]
    groups = sampling["devices"] / plan["mesh"]["tensor"]  # of a host
    prompts_per_group = sampling["prompts"][0] / groups
    prefill_tokens = sampling["prefill_tokens"] / groups
    prefill = speed["prefill"]["seconds_at_least"] / prefill_tokens
    largest = prompts_per_group * sampling["width"]
    rows = actions / work.rounds
    # More rows than the plan has memory for take turns.
    batches = math.ceil(rows / largest)
    full = speed["decode_step"]["seconds_at_least"]
    weights = min(full, sampling["weight_bytes"] / speed["ceilings"]["bandwidth"])
    step = weights + (full - weights) * min(rows, largest) / largest
    device = work.prompt * rows * prefill + batches * work.tokens * step
    # Waiting does not depend on the devices, so efficiency does not scale it.
    return work.rounds * (device / work.efficiency + work.llm)


def _update(plan: Mapping[str, Any], work: Workload, actions: float) -> float:
    """Seconds of all passes over the batches of a group."""
    speed, (rows, length) = plan["speed"], plan["update"]["rows"]
    groups = plan["devices"] / plan["mesh"]["tensor"]
    tokens = actions * (work.distinct or work.prompt + work.tokens)
    batches = math.ceil(tokens / (rows * length / groups))
    # A score has no program in the plan: it takes its share of the operations of a gradient.
    passes = plan["passes"]
    equivalent = passes["flops_per_token"] / passes["gradient_flops_per_token"]
    seconds = speed["gradient"]["seconds_at_least"] * equivalent
    return float(batches * seconds / work.efficiency)
