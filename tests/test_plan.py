"""What a run needs is what its arrays take and what the compiler says of its programs."""

from __future__ import annotations

import jax
import pytest

from jax_ragrl.batch import Layout
from jax_ragrl.errors import UserError
from jax_ragrl.models.decoder import DecoderConfig, param_count
from jax_ragrl.plan import Plan, describe_devices, plan
from jax_ragrl.sampling.sampler import Shapes
from jax_ragrl.train.objective import KL, Objective
from jax_ragrl.train.optimizer import Optimizer

SMALL = DecoderConfig(64, 16, 32, 1, 2, 2, 8)
RUN = Plan(
    Objective(critic="none", advantage="group_normalised", kl=KL("loss", "k3")),
    Optimizer(1e-3),
    Shapes(lengths=(32,), batches=(16,), steps=8),
    Layout(lengths=(64,), tokens=8 * 64),
    mesh=(1, 8, 1),
)


def test_state_is_weights_moments_and_a_reference_split_over_the_devices():
    """Every matrix of this shape splits evenly; the vectors of norms lie on each device whole."""
    found = plan(RUN, SMALL, jax.devices())
    whole = 3 * 16 + 2 * 8  # norms: a layer's two, the last one, queries' and keys'
    each = 4 * ((param_count(SMALL) - whole) // 8 + whole)
    assert found["state_bytes"] == 4 * each  # weights, two moments, the reference
    assert found["parameters"] == param_count(SMALL) and found["devices"] == 8
    assert found["update"]["rows"] == [8, 64] and found["sampling"]["prompts"] == [16, 32]
    larger = max(found["update"]["bytes"], found["sampling"]["bytes"])
    assert found["peak_bytes"] == found["state_bytes"] + larger
    assert found["update"]["bytes"] == found["update"]["temporary_bytes"] + 2 * each
    acting = found["sampling"]["weights_bytes"]  # each device's own, whole, in bfloat16
    assert acting == 2 * param_count(SMALL)
    assert found["sampling"]["bytes"] == found["sampling"]["temporary_bytes"] + acting
    assert found["update"]["temporary_bytes"] > 0 < found["sampling"]["temporary_bytes"]
    assert found["fits"] is None and found["memory_bytes"] is None


def test_a_topology_that_is_not_known_is_refused():
    with pytest.raises(UserError, match="v5e:4x4"):
        describe_devices("v5e:banana")
