"""The scorer finds what the sampler says it wrote: after an observation, and where a row ended."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jax_ragrl.learner.gradients import score
from jax_ragrl.learner.packing import (
    Batch,
    Layout,
    by_action,
    by_row,
    grouped,
    joined,
    lay_out,
    turns_of,
)
from jax_ragrl.learner.update import token_weights
from jax_ragrl.rollout.collect import ActionRequest, Environment, collect
from jax_ragrl.rollout.expand import Branching
from jax_ragrl.rollout.policy import PolicySampler
from jax_ragrl.rollout.roles import Parsed, Role
from jax_ragrl.rollout.tree import Forest, Record, plant
from jax_ragrl.sampling.sampler import Shapes
from jax_ragrl.systems.coda import CoDA
from jax_ragrl.types import Message, Sampling
from tests.learner.bigram import GRPO, GRPO_ADAM, prepared
from tests.learner.turns import NOTHING
from tests.rollout.tape import ANN, BOB, Tape
from tests.tiny import policy, tokenizer

WIDTH = 8  # tokens of an action at most
LAYOUT = Layout(lengths=(64, 256), tokens=512)


def sampler() -> PolicySampler:
    shapes = Shapes(lengths=(32, 128, 256), batches=(4,), steps=WIDTH)
    return PolicySampler({"policy": policy()}, tokenizer(), shapes)


def laid_out(forest: Forest, roles: list[str]) -> list[Batch]:
    turns = turns_of(forest, np.ones(len(forest.records), np.float32))
    return lay_out(grouped(turns, LAYOUT), roles, LAYOUT)


def scores(batches: list[Batch], heat: float, allowed_ZV: np.ndarray | None = None) -> np.ndarray:
    """The log-probabilities of actions, float32 `[A, T]`."""
    given = jax.device_put((np.float32(heat), allowed_ZV))
    readings = [score(*policy(), NOTHING, jax.device_put(b.rows), *given) for b in batches]
    return by_action(batches, [jax.device_get(r.logp_RM) for r in readings], WIDTH)


def assert_agree(forest: Forest, batches: list[Batch], logp_AT: np.ndarray) -> None:
    for node, logp_T in zip(joined(batches).node_A.tolist(), logp_AT, strict=True):
        logps = forest.records[node].action.logps
        np.testing.assert_allclose(logp_T[: len(logps)], logps, atol=1e-4)


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("heat", [1.0, 0.7])
def test_scorer_and_sampler_agree_on_a_second_turn_after_an_observation(heat, chat):
    """Two planners of CoDA, each asked once more for what their siblings wrote, which is garbage:
    a fork, what was told, and another fork."""
    system = CoDA("coda_tiny", max_turns=2, sampling=Sampling(heat, 1.0, WIDTH), chat=chat)
    tape, two = Tape({}), lambda effect, question: Branching(2)
    forest = collect(system, two, [ANN, BOB], Environment(sampler(), tape, tape))
    batches = laid_out(forest, list(system.roles))
    after_A = joined(batches).after_A
    assert (after_A >= 0).sum() == 8 and (after_A < 0).sum() == 4
    for node, before in zip(joined(batches).node_A.tolist(), after_A.tolist(), strict=True):
        if before >= 0:
            first, second = (forest.records[n].action for n in (before, node))
            told = second.prompt_ids[len(first.prompt_ids + first.ids) :]
            assert "again" in tokenizer().decode(told)
    assert_agree(forest, batches, scores(batches, heat))


def test_a_stop_id_that_is_the_pad_id_ends_a_row_and_is_trained():
    """Of digits 7 and the two stop ids, one of which fills what is padded: it is drawn too."""
    pad, heat = tokenizer().pad_id, 0.7
    assert pad == 0 and pad in tokenizer().stop_ids
    role = Role("planner", Parsed, Sampling(heat, 1.0, WIDTH), tokens="7")
    asked = [(Message("user", word),) for word in ("go", "who")]
    requests = [ActionRequest(role, m, Branching(12), seed) for m in asked for seed in range(8)]
    actions = [action for written in sampler().sample(requests) for action in written]
    ended = [action for action in actions if action.ids[-1] == pad]
    alone = [action for action in ended if action.ids == (pad,)]
    assert alone and len(ended) > len(alone)  # some with digits before it
    for action in ended:
        assert len(action.ids) == len(action.logps) <= WIDTH and pad not in action.ids[:-1]
        assert action.text == "7" * (len(action.ids) - 1) and action.logps[-1] < -0.1
    records = [Record(-1, 0, "planner", 1, (k,), action) for k, action in enumerate(actions)]
    forest = plant((ANN,), records)
    batches = laid_out(forest, ["planner"])
    allowed_ZV = tokenizer().allowed("7")[None]
    assert_agree(forest, batches, scores(batches, heat, allowed_ZV))
    trainer, _ = prepared(GRPO, GRPO_ADAM)
    weight_AT, _ = token_weights(trainer, batches, WIDTH)
    weights = by_row(batches, weight_AT)
    trained = [(x > 0) & (b.rows.target_RM == pad) for x, b in zip(weights, batches, strict=True)]
    assert sum(int(x.sum()) for x in trained) == len(ended)
    assert sum(int((x > 0).sum()) for x in weights) == sum(len(a.ids) for a in actions)
