"""What a train step costs: gradients of siblings after shared prompts, and one optimizer step.

Scoring by a reference, which objectives with a KL need, is measured beside it (`reference_s`).

Ids and weights are random, which changes no cost. Tokens are counted twice: those that the rows
hold, and those that rows of one action each would have held. Utilisation is the model's own
operations (nothing that is computed again counts) over a matrix product measured on this device.
Of repeated steps the fastest counts: whatever else the machine does can only make one slower.
"""

from __future__ import annotations

import dataclasses
import gc
import resource
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_ragrl.learner.gradients import score
from jax_ragrl.learner.objective import KL, Objective
from jax_ragrl.learner.optimizer import Optimizer
from jax_ragrl.learner.packing import Batch, Group, Layout, Turn, grouped, lay_out
from jax_ragrl.learner.state import Models, Trainer, prepare
from jax_ragrl.learner.targets import Targets
from jax_ragrl.learner.update import optimize
from jax_ragrl.models.config import DecoderConfig, param_count
from jax_ragrl.models.decoder import Decoder
from jax_ragrl.models.published import shape as shape_of

OBJECTIVE = Objective(critic="none", advantage="group_normalised", kl=KL("none"))


@dataclasses.dataclass(frozen=True)
class Work:
    """What is measured: `siblings` actions of `new` tokens after each of `prompts` prompts of
    `prompt` tokens. `tokens` are those of a batch of rows; more batches are accumulated."""

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
        """A published shape or `tiny`, with another depth or vocabulary where they are not 0."""
        config = shape_of(self.shape)
        return dataclasses.replace(
            config,
            num_layers=self.layers or config.num_layers,
            vocab_size=self.vocabulary or config.vocab_size,
            dtype=self.dtype,
            remat=self.remat,
            attention_impl=self.attention,
        )

    def turns(self) -> list[Turn]:
        """Random actions; no two prompts and no two actions begin alike."""
        draw, most = np.random.default_rng(0), self.config().vocab_size
        turns: list[Turn] = []
        for i in range(self.prompts):
            prompt = (i, *draw.integers(0, most, self.prompt - 1).tolist())
            for k in range(self.siblings):
                ids = (k, *draw.integers(0, most, self.new - 1).tolist())
                turns.append(Turn(len(turns), "role", prompt, ids))
        return turns


def bench_train(work: Work, *, together: bool = True, compare: bool = False) -> dict[str, Any]:
    """The cost of a step with siblings in shared rows (`together`) or in rows of their own.

    Of each way: seconds of a step (`step_s`), of the first one and of scoring by a reference;
    tokens that the rows hold (`tokens`) and both counts of them a second; operations over the
    ceiling (`utilisation`); what others report, six operations a parameter and token of the rows
    (`tflops_6n`, 1e12 a second); peak memory. Of the device: the ceiling, in 1e12 a second.
    `compare` measures the other way too: `ratio` is how many times faster shared rows are. Peak
    memory is that of the process so far, so it is of the first way measured.
    """
    ceiling = matrix_product_flops(work.dtype)
    names = ("grouped", "ungrouped") if together else ("ungrouped", "grouped")
    results = {name: _measure(work, name, ceiling) for name in names[: 1 + compare]}
    facts = {
        "device": jax.devices()[0].device_kind,
        "parameters": param_count(work.config()),
        **dataclasses.asdict(work),
        "ceiling_tflops": round(ceiling / 1e12, 3),
        **results,
    }
    if compare:
        seconds = {name: result["step_s"] for name, result in results.items()}
        facts["ratio"] = round(seconds["ungrouped"] / seconds["grouped"], 3)
    return facts


def _measure(work: Work, name: str, ceiling: float) -> dict[str, Any]:
    groups, layout = _grouped(work) if name == "grouped" else _ungrouped(work)
    batches = lay_out(groups, ("role",), layout)
    decoder = Decoder(work.config(), rngs=nnx.Rngs(0))
    # At rate 0 every step does the same work.
    trainer, models = prepare(decoder, OBJECTIVE, Optimizer(0.0), layout, ("role",), 1.0, 1)
    del decoder
    targets = [_targets(batch, len(groups)) for batch in batches]
    temperature, rows = jax.device_put(np.float32(1.0)), [jax.device_put(b.rows) for b in batches]
    net = (trainer.policy.graph, models.policy.params, trainer.policy.frozen)
    reference, _ = timed(lambda: [score(*net, r, temperature) for r in rows], work.repeats)
    seconds, first = timed(_stepper(trainer, models, batches, targets), work.repeats)
    processed = sum(group.tokens for group in groups)
    plain = work.prompts * work.siblings * (work.prompt + work.new)
    used = train_flops(work, [group.turns for group in groups])
    gc.collect()
    return {
        "step_s": round(seconds, 4),
        "first_step_s": round(first, 2),
        "reference_s": round(reference, 4),
        "batches": len(batches),
        "rows": list(batches[0].rows.ids_RL.shape),
        "tokens": processed,
        "tokens_per_s": round(processed / seconds, 1),
        "ungrouped_tokens_per_s": round(plain / seconds, 1),
        "utilisation": round(used / seconds / ceiling, 4),
        "tflops_6n": round(6 * param_count(work.config()) * processed / seconds / 1e12, 3),
        "peak_bytes": peak_bytes(),
    }


def _grouped(work: Work) -> tuple[list[Group], Layout]:
    layout = _layout(work, work.prompts, _up(work.prompt + work.siblings * work.new))
    return grouped(work.turns(), layout), layout


def _ungrouped(work: Work) -> tuple[list[Group], Layout]:
    """A row holds one action, for a second would not fit."""
    layout = _layout(work, work.prompts * work.siblings, _up(work.prompt + work.new))
    return [group for turn in work.turns() for group in grouped([turn], layout)], layout


def _layout(work: Work, rows: int, length: int) -> Layout:
    """Batches of equal numbers of rows, as many as needed: no row of padding beyond the last."""
    batches = -(-rows // max(1, work.tokens // length))
    return Layout((length,), -(-rows // batches) * length)


def _up(size: int, multiple: int = 64) -> int:
    return -(-size // multiple) * multiple


def _targets(batch: Batch, groups: int) -> Targets:
    ones_RM = batch.rows.mask_RM.astype(np.float32)
    return Targets(advantage=ones_RM, weight=ones_RM / groups)


def _stepper(
    trainer: Trainer, models: Models, batches: Sequence[Batch], targets: Sequence[Targets]
) -> Callable[[], Any]:
    state = [models]

    def step() -> Any:
        state[0], sums, _ = optimize(trainer, state[0], batches, targets)
        return state[0].policy.params, sums

    return step


def timed(step: Callable[[], Any], repeats: int) -> tuple[float, float]:
    """The seconds of the fastest of some steps, and of the first, which compiles."""
    laps = []
    for _ in range(1 + repeats):
        begun = time.perf_counter()
        jax.block_until_ready(step())
        laps.append(time.perf_counter() - begun)
    return min(laps[1:]), laps[0]


def train_flops(work: Work, groups: Sequence[Sequence[Turn]]) -> float:
    """Operations of one forward and backward pass over groups, without what is computed again.

    Two a weight and token; two products a pair of tokens that see each other; the head for scored
    tokens alone. The backward pass takes twice the forward's.
    """
    c = work.config()
    heads = c.vocab_size * c.hidden_size
    body = param_count(c) - heads * (1 if c.tie_embeddings else 2)
    forward = 0.0
    for turns in groups:
        sizes = [len(turn.ids) for turn in turns]
        start = len(turns[0].prompt)
        seen = start * (start + 1) / 2 + sum(n * start + n * (n + 1) / 2 for n in sizes)
        forward += 2 * body * (start + sum(sizes)) + 2 * heads * sum(sizes)
        forward += 4 * c.num_layers * c.num_heads * c.head_dim * seen
    return 3 * forward


def matrix_product_flops(dtype: str) -> float:
    """Operations a second of a large square matrix product on this device, the best of five.

    Of random numbers: with others a GPU takes less power, and so runs faster than at any work.
    """
    size = 8192 if jax.default_backend() != "cpu" else 1024
    x = jax.random.normal(jax.random.key(0), (size, size), jnp.dtype(dtype))
    square = jax.jit(lambda x: x @ x)
    seconds, _ = timed(lambda: [square(x) for _ in range(5)], 5)
    return 5 * 2 * size**3 / seconds


def peak_bytes() -> int:
    """The device's peak of allocated memory; the process's of resident memory on a CPU."""
    stats = jax.devices()[0].memory_stats() or {}
    unit = 1 if sys.platform == "darwin" else 1024
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return int(stats.get("peak_bytes_in_use", resident))
