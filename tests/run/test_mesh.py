"""The mesh of a run."""

from __future__ import annotations

import jax_ragrl.run.models as models
from jax_ragrl.run.models import mesh_of_shape


def test_the_narrowest_policy_limits_fsdp(monkeypatch):
    """The tiny policy has 128 columns, all of which stay on one device."""
    assert mesh_of_shape((-1, -1, 1), ["tiny", ""]).devices.shape == (8, 1, 1)
    widths = {"wide": 1024, "narrow": 512}
    monkeypatch.setattr(models, "policy_folder", lambda name, weights: name)
    monkeypatch.setattr(models, "model_config", lambda name: name)
    monkeypatch.setattr(
        models, "from_hf", lambda name: type("C", (), {"hidden_size": widths[name]})
    )
    assert mesh_of_shape((-1, -1, 1), ["wide"]).devices.shape == (1, 8, 1)
    assert mesh_of_shape((-1, -1, 1), ["wide", "narrow"]).devices.shape == (2, 4, 1)


def test_a_run_without_a_mesh_has_none():
    assert mesh_of_shape((), ["tiny"]) is None
