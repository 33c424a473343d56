"""The smallest trainable policies, without layers (a bigram model) or with a single layer."""

import dataclasses
import functools

import jax
import numpy as np
from jax.sharding import Mesh

from jax_ragrl.learner.checkpoint import by_path
from jax_ragrl.learner.objective import KL, Objective
from jax_ragrl.learner.optimizer import Optimizer
from jax_ragrl.learner.packing import Layout
from jax_ragrl.learner.state import Policy, prepare
from jax_ragrl.models.config import DecoderConfig, Weight, logical_axes, weights
from jax_ragrl.models.decoder import Decoder
from jax_ragrl.runtime.sharding import tree_shardings

ROLES = ("planner", "executor")
LAYOUT = Layout(row_lengths=(16,), tokens_per_device=64)
HEAT = 0.8
CONFIG = DecoderConfig(12, 4, 4, 0, 1, 1, 4, tie_embeddings=False)
PPO = Objective(kl=KL(coefficient=0.1), aggregation="role_sum")
PPO_ADAM = Optimizer(0.05, 0.1, epochs=2, max_grad_norm=0.5)
GRPO = Objective(
    loss="dual_clipped_policy_loss",
    eps_high=0.28,
    dual_clip=1.5,
    critic="none",
    advantage="group_normalised",
    kl=KL("loss", "k3", 0.05),
    entropy_coefficient=0.02,
    aggregation="sequence_mean",
)
STEERED = dataclasses.replace(
    GRPO,
    kl=KL("loss", "k3", 0.1, target=3.0, horizon=60.0, min_coefficient=0.05, max_coefficient=0.25),
)
GRPO_ADAM = Optimizer(0.1, schedule="constant", epochs=3)


DEEP = dataclasses.replace(CONFIG, num_layers=1)


def random_decoder(config: DecoderConfig, seed: int = 0, mesh: Mesh | None = None) -> Decoder:
    """Draws weights with NumPy: compiling the initialization would take longer than a test."""
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
    return random_decoder(CONFIG, seed)


@functools.cache
def deep() -> Decoder:
    return random_decoder(DEEP)


def prepared(objective, optimizer, decoder=None, **kw) -> Policy:
    """Prepares `bigram`, or another decoder, for one update."""
    return prepare(
        decoder or bigram(),
        objective=objective,
        optimizer=optimizer,
        layout=LAYOUT,
        roles=ROLES,
        temperature=HEAT,
        updates=1,
        **kw,
    )


def named(params) -> dict[str, np.ndarray]:
    """Returns parameters by the names of `reference`, in float64, without empty arrays."""
    flat = {name.split("/")[-2]: x for name, x in by_path(jax.device_get(params)).items()}
    return {name: x.astype(np.float64) for name, x in flat.items() if x.size}
