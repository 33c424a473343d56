"""The smallest trainable policies: logits after a token that depend on that token alone, or on one
layer, and a trainer around them."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
from jax.sharding import Mesh

from jax_ragrl.learner.checkpoint import by_path
from jax_ragrl.learner.objective import KL, Objective
from jax_ragrl.learner.optimizer import Optimizer
from jax_ragrl.learner.packing import Layout
from jax_ragrl.learner.state import Models, Trainer, prepare
from jax_ragrl.models.config import DecoderConfig, Weight, logical_axes, weights
from jax_ragrl.models.decoder import Decoder
from jax_ragrl.runtime.sharding import tree_shardings

ROLES = ("planner", "executor")
LAYOUT = Layout(lengths=(16,), tokens=64)
HEAT = 0.8
CONFIG = DecoderConfig(
    vocab_size=12,
    hidden_size=4,
    intermediate_size=4,
    num_layers=0,
    num_heads=1,
    num_kv_heads=1,
    head_dim=4,
    tie_embeddings=False,
)
PPO = Objective(kl=KL(coefficient=0.1), aggregation="role_sum", role_weights=(("planner", 2.0),))
PPO_ADAM = Optimizer(0.05, 0.1, epochs=2, max_grad_norm=0.5)
GRPO = Objective(
    ratio="dual_clip",
    eps_high=0.28,
    dual=1.5,
    critic="none",
    advantage="group_normalised",
    kl=KL("loss", "k3", 0.05),
    entropy=0.02,
    aggregation="sequence_mean",
)
STEERED = dataclasses.replace(GRPO, kl=KL("loss", "k3", 0.1, target=3.0, horizon=60.0, floor=0.05))
GRPO_ADAM = Optimizer(0.1, schedule="constant", epochs=3)


DEEP = dataclasses.replace(CONFIG, num_layers=1)


def drawn(config: DecoderConfig, seed: int = 0, mesh: Mesh | None = None) -> Decoder:
    """Random weights from NumPy: compiling the initialisation would take longer than a test."""
    rng = np.random.default_rng(seed)

    def draw(w: Weight) -> np.ndarray:
        return np.asarray(w.fill + w.std * rng.normal(size=w.shape), np.float32)

    arrays = jax.tree.map(draw, weights(config), is_leaf=lambda x: isinstance(x, Weight))
    layout = None
    if mesh is not None:
        layout = tree_shardings(logical_axes(config), arrays, mesh)
    return Decoder.from_params(config, jax.device_put(arrays, layout))


@functools.cache
def bigram(seed: int = 0) -> Decoder:
    return drawn(CONFIG, seed)


@functools.cache
def deep() -> Decoder:
    return drawn(DEEP)


def prepared(
    objective: Objective, optimizer: Optimizer, decoder: Decoder | None = None, **kw
) -> tuple[Trainer, Models]:
    """A trainer of `bigram`, or of another policy, in one layout."""
    return prepare(decoder or bigram(), objective, optimizer, LAYOUT, ROLES, HEAT, 1, **kw)


def named(params, *path: str) -> dict[str, np.ndarray]:
    """Parameters by the reference's names, in float64; those of layers are empty."""
    flat = {name.split("/")[-2]: x for name, x in by_path(jax.device_get(params)).items()}
    return {name: x.astype(np.float64) for name, x in flat.items() if x.size}
