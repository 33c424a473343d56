"""Measures a training step: gradients of siblings after shared prompts, and one optimizer step.

Scoring by a reference, which objectives with a KL term need, is measured separately
(`reference_s`).

Ids and weights are random, which does not change the cost. Tokens are counted twice: as the rows
hold them, and as rows with one action each would hold them. Utilization is the model's operations
(without recomputation) relative to a matrix product measured on this device. The result is the
fastest of the repeated steps, because other load on the machine can only slow a step down.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_ragrl.learner.gradients import score
from jax_ragrl.learner.objective import KL, Objective
from jax_ragrl.learner.optimizer import Optimizer
from jax_ragrl.learner.packing import Group, Layout, Turn, group_turns, lay_out
from jax_ragrl.learner.state import prepare
from jax_ragrl.learner.targets import Targets
from jax_ragrl.learner.update import optimize
from jax_ragrl.models.config import DecoderConfig, param_count
from jax_ragrl.models.decoder import Decoder
from jax_ragrl.models.published import published_config
from jax_ragrl.plan.operations import head_flops, layers_flops
from jax_ragrl.runtime import memory

# Without a critic and without KL: the step then has one model.
OBJECTIVE = Objective(critic="none", advantage="group_normalised", kl=KL("none"))


@dataclasses.dataclass(frozen=True)
class TrainWork:
    """The measured work, described by the options of `ragrl bench train`; 0 layers: all."""

    shape: str = "qwen2.5-0.5b"
    prompts: int = 32
    siblings: int = 8
    prompt: int = 1024
    new: int = 128
    layers: int = 0
    vocabulary: int = 0
    dtype: str = "bfloat16"
    remat: str = "full"
    attention: str = "auto"
    tokens: int = 65536
    repeats: int = 3

    def config(self) -> DecoderConfig:
        """The architecture of the work."""
        config = published_config(self.shape)
        return dataclasses.replace(
            config,
            num_layers=self.layers or config.num_layers,
            vocab_size=self.vocabulary or config.vocab_size,
            dtype=self.dtype,
            remat=self.remat,
            attention_impl=self.attention,
        )

    def turns(self) -> list[Turn]:
        """Random actions. All prompts and all siblings differ in their first token.

        Packing would share a longer common prefix, so the number of tokens would be random.
        """
        rng, vocab_size = np.random.default_rng(0), self.config().vocab_size
        turns: list[Turn] = []
        for i in range(self.prompts):
            prompt = (i, *rng.integers(0, vocab_size, self.prompt - 1).tolist())
            for k in range(self.siblings):
                ids = (k, *rng.integers(0, vocab_size, self.new - 1).tolist())
                turns.append(Turn(len(turns), "role", prompt, ids))
        return turns


def bench_train(work: TrainWork, *, share_rows: bool = True) -> dict[str, Any]:
    """Measures a step with the actions of a prompt in shared rows, or each in its own.

    Returns:
      Of the layout: the times of `update_times`, tokens of the rows and both counts of tokens per
      second, operations over the ceiling (`utilisation`), six operations per parameter and token of
      the rows, as is often reported (`tflops_6n`, 1e12 per second), and peak memory of the process
      so far. Beside it: the ceiling in 1e12 operations per second.
    """
    ceiling = matrix_product_flops(work.dtype)
    name = "grouped" if share_rows else "ungrouped"
    return {
        "device": jax.devices()[0].device_kind,
        "parameters": param_count(work.config()),
        **dataclasses.asdict(work),
        "ceiling_tflops": round(ceiling / 1e12, 3),
        name: _measure(work, name, ceiling),
    }


def _measure(work: TrainWork, name: str, ceiling: float) -> dict[str, Any]:
    turns = work.turns()
    if name == "grouped":
        layout = _layout(work, work.prompts, work.prompt + work.siblings * work.new)
        groups = group_turns(turns, layout)
    else:
        # One action per row: the row length has no room for a second.
        layout = _layout(work, work.prompts * work.siblings, work.prompt + work.new)
        groups = [group for turn in turns for group in group_turns([turn], layout)]
    batches = lay_out(groups, ("role",), layout)
    decoder = Decoder(work.config(), rngs=nnx.Rngs(0))
    # With learning rate 0 all steps do the same work.
    policy = prepare(
        decoder,
        objective=OBJECTIVE,
        optimizer=Optimizer(0.0),
        layout=layout,
        roles=("role",),
        temperature=1.0,
        updates=1,
    )
    # The policy has its own copy of the weights; the peak must not include both.
    del decoder
    targets = []
    for batch in batches:
        ones_RM = batch.rows.mask_RM.astype(np.float32)
        targets.append(Targets(advantage=ones_RM, weight=ones_RM / len(groups)))
    temperature, rows = jax.device_put(np.float32(1.0)), [jax.device_put(b.rows) for b in batches]
    # Scored before the update, which donates the buffers of these parameters.
    model = policy.spec.policy.with_params(policy.state.policy.params)
    reference = time_step(lambda: [score(model, r, temperature) for r in rows], work.repeats)

    def optimize_once() -> Any:
        nonlocal policy  # the update donates its buffers
        policy, sums, _ = optimize(policy, batches, targets)
        return policy.state.policy.params, sums

    step = time_step(optimize_once, work.repeats)
    return {
        **update_times(reference, step),
        "batches": len(batches),
        "rows": list(batches[0].rows.ids_RL.shape),
        **_throughput(work, groups, step.seconds, ceiling),
        "peak_bytes": peak_bytes(),
    }


def update_times(reference: Timing, step: Timing) -> dict[str, float]:
    """The seconds and CPU seconds of scoring by a reference and of a step."""
    return {
        "step_s": round(step.seconds, 4),
        "first_step_s": round(step.first, 2),
        "reference_s": round(reference.seconds, 4),
        "step_cpu_s": round(step.cpu, 4),
        "reference_cpu_s": round(reference.cpu, 4),
    }


def _throughput(
    work: TrainWork, groups: Sequence[Group], seconds: float, ceiling: float
) -> dict[str, Any]:
    """Tokens of a step and rates; `seconds` per step, `ceiling` in operations per second."""
    tokens = sum(group.tokens for group in groups)
    ungrouped_tokens = work.prompts * work.siblings * (work.prompt + work.new)
    flops = train_flops(work, [group.turns for group in groups])
    return {
        "tokens": tokens,
        "tokens_per_s": round(tokens / seconds, 1),
        "ungrouped_tokens_per_s": round(ungrouped_tokens / seconds, 1),
        "utilisation": round(flops / seconds / ceiling, 4),
        "tflops_6n": round(6 * param_count(work.config()) * tokens / seconds / 1e12, 3),
    }


def _layout(work: TrainWork, rows: int, tokens: int) -> Layout:
    """Rows split into equal batches, so that the last batch has hardly any padding."""
    length = -(-tokens // 64) * 64
    batches = -(-rows // max(1, work.tokens // length))
    return Layout((length,), -(-rows // batches) * length)


class Timing(NamedTuple):
    """Seconds of the fastest of some steps, of the first one, and least CPU seconds of a step.

    CPU seconds add up the threads of this process. They hardly depend on the other load of a
    machine, which makes them the number to compare on a CPU.
    """

    seconds: float
    first: float
    cpu: float


def time_step(step: Callable[[], Any], repeats: int) -> Timing:
    """Measures the time of a first step, which compiles, and of `repeats` more."""
    times = []
    for _ in range(1 + repeats):
        start = time.perf_counter(), time.process_time()
        # Calls return before the devices are done.
        jax.block_until_ready(step())
        times.append((time.perf_counter() - start[0], time.process_time() - start[1]))
    seconds, cpu = zip(*times, strict=True)
    return Timing(min(seconds[1:]), seconds[0], min(cpu[1:]))


def train_flops(work: TrainWork, groups: Sequence[Sequence[Turn]]) -> float:
    """Operations of one forward and backward pass over groups, without recomputation.

    See `plan.operations`; the head is for scored tokens only, and the backward pass costs twice the
    forward pass.
    """
    c, forward = work.config(), 0.0
    per_token = layers_flops(c, 0)
    per_pair = layers_flops(c, 1) - per_token
    for turns in groups:
        sizes = [len(turn.ids) for turn in turns]
        start = len(turns[0].prompt)
        # Causal attention: each action attends to the prompt and to itself, not to its siblings.
        pairs = start * (start + 1) / 2 + sum(n * start + n * (n + 1) / 2 for n in sizes)
        forward += per_token * (start + sum(sizes)) + per_pair * pairs
        forward += head_flops(c) * sum(sizes)
    return 3 * forward


def matrix_product_flops(dtype: str) -> float:
    """Operations per second of a large square matrix product on this device, the best of five."""
    # Large enough to saturate an accelerator; a CPU would take too long.
    size = 8192 if jax.default_backend() != "cpu" else 1024
    # Random numbers: with constant ones a GPU draws less power and clocks higher than in real work.
    x = jax.random.normal(jax.random.key(0), (size, size), jnp.dtype(dtype))
    square = jax.jit(lambda x: x @ x)
    step = time_step(lambda: [square(x) for _ in range(5)], 5)
    return 5 * 2 * size**3 / step.seconds


def peak_bytes() -> int:
    """The peak of allocated memory of the device; of resident memory of the process on a CPU."""
    stats = jax.devices()[0].memory_stats() or {}
    return int(stats.get("peak_bytes_in_use", memory.peak_bytes()))
