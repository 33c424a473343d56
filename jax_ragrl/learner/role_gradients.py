"""Gradients by role: how strongly each role moves a policy, and whether roles pull together.

The gradient is the sum of one per role, in which the tokens of other roles have weight 0:

  g = sum_z g_z,   share_z = <g_z, g> / |g|^2,   cosine_yz = <g_y, g_z> / (|g_y| |g_z|)

The shares sum to 1; the share of a role that pulls against the others is negative.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jax_ragrl.learner.packing import Minibatches
from jax_ragrl.learner.passes import accumulate
from jax_ragrl.learner.state import Policy
from jax_ragrl.learner.targets import Targets
from jax_ragrl.runtime.dispatch import in_order
from jax_ragrl.runtime.sharding import to_host


def role_gradient_metrics(
    policy: Policy, data: Minibatches, targets: Sequence[Sequence[Targets]]
) -> dict[str, float]:
    """Returns norm, share and cosines of the gradients of all roles before an update."""
    numbers = np.unique(data.actions.role_A).tolist()
    # All gradients are held at once: each pair of them has a cosine.
    grads = [role_gradient(policy, data, targets, z) for z in numbers]
    return describe([policy.spec.roles[z] for z in numbers], to_host(inner_products(grads)))


def role_gradient(
    policy: Policy, data: Minibatches, targets: Sequence[Sequence[Targets]], role: int
) -> Any:
    """Returns the part of a role in the gradient of the mean loss over all minibatches."""
    own_AT = (data.actions.role_A == role)[:, None] & data.mask()
    scale_by_batch = data.by_row(own_AT.astype(np.float32) / np.float32(len(data.parts)))
    flat = itertools.chain.from_iterable(targets)
    own = [
        t._replace(
            weight=t.weight * scale_RM,
            value_weight=None if t.value_weight is None else t.value_weight * scale_RM,
        )
        for t, scale_RM in zip(flat, scale_by_batch, strict=True)
    ]
    # The program of the update: only the weights differ.
    params = policy.state.policy.params
    return accumulate(policy, policy.spec.policy, params, data.batches, own)[0]


@in_order
@jax.jit
def inner_products(grads: Sequence[Any]) -> Array:
    """Returns the inner products of all pairs of gradients, float32 `[Z, Z]`."""

    def inner(a: Any, b: Any) -> Array:
        # Products and sums, not `vdot`, which a TPU would compute in bfloat16.
        return jax.tree.reduce(jnp.add, jax.tree.map(lambda x, y: jnp.sum(x * y), a, b))

    return jnp.stack([jnp.stack([inner(a, b) for b in grads]) for a in grads])


def describe(roles: Sequence[str], product_ZZ: np.ndarray) -> dict[str, float]:
    """Returns the metrics of gradients from the inner product of each pair of them.

    A share or cosine with a gradient of zero is undefined and left out.
    """
    product_ZZ = np.asarray(product_ZZ, np.float64)
    norm_Z, total = np.sqrt(np.diag(product_ZZ)), product_ZZ.sum()
    metrics = {f"role_gradient/norm/{z}": float(x) for z, x in zip(roles, norm_Z, strict=True)}
    if total > 0:
        share_Z = product_ZZ.sum(axis=1) / total
        metrics |= {
            f"role_gradient/share/{z}": float(x) for z, x in zip(roles, share_Z, strict=True)
        }
    for y, z in itertools.combinations(range(len(roles)), 2):
        if norm := norm_Z[y] * norm_Z[z]:
            name = f"role_gradient/cosine/{roles[y]}/{roles[z]}"
            metrics[name] = float(product_ZZ[y, z] / norm)
    return metrics
