"""What the training loop keeps while it runs."""

from __future__ import annotations

import gc
import pathlib
import weakref

import jax
import pytest
from flax import nnx

from jax_ragrl.cli import CONFIGS, load_config
from jax_ragrl.models.hf import save_decoder
from jax_ragrl.train import loop
from jax_ragrl.train.assemble import assemble, load_job
from tests.tiny import policy, tokenizer


class FirstRolloutError(Exception):
    """Raised by the first rollout of a run."""


@pytest.mark.parametrize(("where", "kept"), [("none", False), ("reward", True)])
def test_a_run_keeps_the_policies_it_was_given_only_as_references(
    where: str, kept: bool, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    tokenizer().save(tmp_path / "tokenizer")
    folder = save_decoder(nnx.merge(*policy()), tmp_path / "policy", tmp_path / "tokenizer")
    given = {"policy": folder, "data.world.size": 40, "objective.kl.where": where}
    values = load_config(
        CONFIGS / "tiny" / "c3po.py", [f"--config.{key}={value}" for key, value in given.items()]
    )
    job, alive = load_job(values), []

    def begin(job, decoders, tokenizer):
        alive.extend(weakref.ref(x) for x in jax.tree.leaves(decoders["policy"].params()))
        return begun(job, decoders, tokenizer)

    def roll_out(*args):
        gc.collect()
        assert {ref() is not None for ref in alive} == {kept}
        raise FirstRolloutError

    begun = loop.begin
    monkeypatch.setattr(loop, "begin", begin)
    monkeypatch.setattr(loop, "roll_out", roll_out)
    with pytest.raises(FirstRolloutError):
        loop.train(job, assemble(job, tmp_path), tmp_path)
