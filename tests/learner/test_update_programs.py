"""The programs of an update are listed before it: afterwards it compiles none of them."""

from __future__ import annotations

import dataclasses
import random

import jax
import pytest

from jax_ragrl.learner.objective import KL, Objective
from jax_ragrl.learner.optimizer import Optimizer
from jax_ragrl.learner.packing import Layout, Turn, group_turns
from jax_ragrl.learner.update import update
from jax_ragrl.learner.update_programs import update_programs
from jax_ragrl.runtime.compile_ahead import compile_programs
from jax_ragrl.runtime.compile_cache import compiled_programs
from jax_ragrl.runtime.sharding import make_mesh
from tests.learner.bigram import DEEP, GRPO, GRPO_ADAM, PPO, PPO_ADAM, prepared, random_decoder

# Batches of one and of two rows.
LAYOUT = Layout(row_lengths=(24,), tokens_per_device=48, max_batch_halvings=1)
SHARED = Objective(critic="shared", kl=KL("loss", "k3", 0.05))


def by_action(logp, action_gap):
    return logp * action_gap


BY_ACTION = dataclasses.replace(GRPO, kl=KL("none"), loss=f"{__name__}:by_action")
JITTED = ("score", "gradient", "zeros", "apply")


def turns(count: int) -> list[Turn]:
    """One context per row: a row has no room for two."""
    return [
        Turn(k, "planner", (k, *range(11)), tuple(range(9)), credit=k - 1.0) for k in range(count)
    ]


@pytest.mark.parametrize(
    ("objective", "optimizer", "shape"),
    [
        (PPO, PPO_ADAM, ()),
        pytest.param(GRPO, GRPO_ADAM, (), marks=pytest.mark.slow),
        pytest.param(BY_ACTION, GRPO_ADAM, (), marks=pytest.mark.slow),
        pytest.param(SHARED, Optimizer(0.1), (), marks=pytest.mark.slow),
        pytest.param(PPO, PPO_ADAM, (2, 2, 1), marks=pytest.mark.slow),
    ],
)
def test_an_update_compiles_none_of_the_listed_programs(objective, optimizer, shape, caplog):
    mesh = make_mesh(shape, jax.devices()[:4]) if shape else None
    decoder = random_decoder(DEEP, mesh=mesh)
    policy = prepared(objective, optimizer, decoder)
    policy = policy._replace(spec=policy.spec._replace(layout=LAYOUT))
    programs = update_programs(policy, is_measured=True)
    kinds = {program.name.split(" ")[0] for program in programs}
    assert kinds == {"scoring", "update", "optimizer", "gradient"}
    before = compiled_programs()
    compile_programs(programs, threads=2)
    assert compiled_programs() > before, "compiled by an earlier test: this one shows nothing"

    def update_twice() -> None:
        # Three full batches and a half empty one, or a single batch.
        groups = group_turns(turns(7), LAYOUT)
        after, _ = update(policy, groups, random.Random(0), is_measured=True)
        update(after, groups[:1], random.Random(0), is_measured=True)

    with jax.log_compiles():
        caplog.clear()
        update_twice()
    late = [n for n in JITTED if f"Finished XLA compilation of jit({n})" in caplog.text]
    assert not late
