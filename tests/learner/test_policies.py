"""Schedules, rates and optimizer steps, and several policies, each updated on its own turns."""

import dataclasses
import random
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from flax import nnx

from jax_ragrl.config.schema import build
from jax_ragrl.errors import UserError
from jax_ragrl.learner.objective import KL
from jax_ragrl.learner.optimizer import Optimizer
from jax_ragrl.learner.packing import Turn
from jax_ragrl.learner.policies import (
    Phase,
    Schedule,
    score_texts,
    update_all,
    with_kl,
    with_new_references,
)
from jax_ragrl.rollout.tree import Text
from jax_ragrl.training.setup import enter_phase
from tests.learner.bigram import (
    GRPO,
    GRPO_ADAM,
    HEAT,
    ROLES,
    STEERED,
    bigram,
    deep,
    named,
    prepared,
)

TRIO = ("plan", "analysis", "rewrite")
STAGED = Schedule(phases=(Phase(3, ("plan",)), Phase(2, ("analysis", "rewrite"))))


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (Schedule(), ["par"] * 8),
        (STAGED, ["p", "p", "p", "ar", "ar", "ar", "ar", "ar"]),
    ],
)
def test_a_schedule_selects_the_roles_of_a_step(schedule, expected):
    actual = ["".join(r[0] for r in schedule.roles(step, TRIO)) for step in range(8)]
    assert actual == expected
    assert schedule.updates(8, TRIO, ("plan",)) == sum("p" in step for step in expected)


def test_references_are_refreshed_only_at_a_new_phase():
    assert [step for step in range(8) if STAGED.begins_phase(step)] == [3]
    assert not any(Schedule().begins_phase(step) for step in range(8))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: build(Schedule, {"phases": [{"steps": 0, "roles": ["plan"]}]}), "at least 1"),
        (lambda: STAGED.roles(0, ("plan", "judge")), "names role 'analysis', .* use some of plan"),
    ],
)
def test_an_impossible_schedule_is_refused(make, message):
    with pytest.raises(UserError, match=message):
        make()


def two_policies():
    adam = Optimizer(0.1)
    return {"a": prepared(STEERED, adam), "b": prepared(STEERED, adam, deep())}


def turns() -> list[Turn]:
    credit = (1.0, 1.0, -1.0, -1.0)
    return [Turn(i, ROLES[i % 2], (1, 2, 3), (4 + i, 5), credit=credit[i]) for i in range(4)]


def test_each_policy_is_updated_on_the_turns_of_its_trained_roles_that_fit_a_row():
    policy_of = dict(zip(ROLES, "ab", strict=True))

    def after(roles):
        return update_all(two_policies(), policy_of, roles, turns(), random.Random(0))

    before = {k: named(p.state.policy.params) for k, p in two_policies().items()}

    def moved(policies) -> set[str]:
        now = {k: named(p.state.policy.params)["embed"] for k, p in policies.items()}
        return {k for k in now if np.abs(now[k] - before[k]["embed"]).max() > 0}

    both, metrics = after(ROLES)
    assert moved(both) == {"a", "b"}
    assert {name.split("/")[0] for name in metrics} == {"a", "b"}
    first, metrics = after(ROLES[:1])
    assert moved(first) == {"a"}
    assert {name for name in metrics if name.startswith("b")} == {"b/dropped_too_long"}
    alone = named(first["a"].state.policy.params)
    for name, x in named(both["a"].state.policy.params).items():
        np.testing.assert_array_equal(x, alone[name])
    long = [Turn(i, ROLES[0], tuple(range(12)), (i,) * (3 + 2 * i), credit=1.0) for i in range(3)]
    policies = {"a": prepared(STEERED, Optimizer(0.1))}
    _, metrics = update_all(policies, {ROLES[0]: "a"}, ROLES, long, random.Random(0))
    assert metrics["dropped_too_long"] == 2  # 17 and 19 tokens in rows of 16


def test_a_refreshed_reference_is_a_copy_of_the_policy_in_its_own_dtypes():
    """Without a reference none is added."""
    policy = prepared(STEERED, Optimizer(0.1), deep(), compute="bfloat16")
    before = jax.tree.map(lambda x: x.dtype, policy.state.reference)
    policies, _ = update_all({"a": policy}, {ROLES[0]: "a"}, ROLES, turns(), random.Random(0))
    state = with_new_references(policies)["a"].state
    leaves = map(jax.tree.leaves, (before, state.reference, state.policy.params))
    for dtype, new, own in zip(*leaves, strict=True):
        assert new.dtype == dtype and new is not own
        np.testing.assert_array_equal(*jax.device_get((new, own.astype(dtype))))
    free = prepared(dataclasses.replace(STEERED, kl=KL("none")), Optimizer(0.1))
    assert with_new_references({"a": free})["a"].state.reference is None


def test_a_phase_without_a_rate_uses_the_rate_of_the_run():
    """The rate decays over all updates of the run, whatever the phase."""
    phases = (Phase(1, ROLES[:1], policy_lr=0.02), Phase(2, ROLES))
    job = SimpleNamespace(
        schedule=Schedule(phases),
        optimizer=Optimizer(0.1),
        run=SimpleNamespace(steps=4),
        policy_of=dict(zip(ROLES, "ab", strict=True)),
    )
    for step, rate in ((0, 0.02), (1, 0.1)):
        policies = enter_phase(job, two_policies(), step, first=True)
        for name, updates in (("a", 4), ("b", 3)):
            transform = policies[name].spec.policy.optimizer
            assert transform is job.optimizer.transform(rate, updates)


def test_the_kl_coefficient_of_all_policies_is_set():
    policies = with_kl(two_policies(), 0.04)
    actual = [jax.device_get(policy.state.kl_coefficient) for policy in policies.values()]
    np.testing.assert_allclose(actual, 0.04, rtol=1e-6)


def rates(at: list[int], **choices) -> list[float]:
    """Returns rates in a run of 5 rollouts with two epochs of two minibatches: 20 steps."""
    rate = Optimizer(9.0, epochs=2, minibatches=2, **choices).rate(0.2, 5)
    return [float(rate(step)) for step in at]


@pytest.mark.parametrize(
    ("schedule", "middle", "end"),
    [("constant", 0.2, 0.2), ("linear", 0.15, 0.1), ("cosine", 0.15, 0.1)],
)
def test_the_rate_may_warm_up_and_decays_to_its_final_fraction(schedule, middle, end):
    actual = rates([0, 10, 20], schedule=schedule, final_lr_fraction=0.5)
    np.testing.assert_allclose(actual, [0.2, middle, end], rtol=1e-5)
    actual = rates([0, 1, 4, 20], schedule=schedule, warmup_fraction=0.2, final_lr_fraction=0.5)
    np.testing.assert_allclose(actual, [0.0, 0.05, 0.2, end], rtol=1e-5)


def test_only_a_constant_rate_without_warmup_is_steady():
    assert Optimizer(0.1, schedule="constant").steady
    assert not Optimizer(0.1, schedule="constant", warmup_fraction=0.1).steady
    assert not Optimizer(0.1, schedule="linear").steady


def test_two_steps_equal_adamw_in_float64():
    """Loshchilov and Hutter 2019: the decay is a fraction of the weight, times the rate."""
    settings = Optimizer(
        0.1, schedule="constant", b1=0.5, b2=0.7, weight_decay=0.3, max_grad_norm=10.0
    )
    transform = settings.transform(0.1, 1)
    weight, gradients = np.array([2.0, -1.0]), (np.array([1.0, -2.0]), np.array([0.5, 3.0]))
    expected, m, v = weight, 0.0, 0.0
    params = jax.device_put(weight.astype(np.float32))
    state = transform.init(params)
    for t, g in enumerate(gradients, start=1):
        m, v = 0.5 * m + 0.5 * g, 0.7 * v + 0.3 * g**2
        adam = (m / (1 - 0.5**t)) / (np.sqrt(v / (1 - 0.7**t)) + 1e-8)
        expected = expected - 0.1 * (adam + 0.3 * expected)
        with jax.numpy_dtype_promotion("standard"):  # optax mixes integers and floats
            change, state = transform.update(jax.device_put(g.astype(np.float32)), state, params)
        params = params + change
    np.testing.assert_allclose(params, expected, rtol=1e-5)


def test_only_the_first_moment_has_the_selected_dtype():
    state = (
        Optimizer(0.1, moment_dtype="bfloat16")
        .transform(0.1, 1)
        .init(jax.device_put(np.ones(2, np.float32)))
    )
    dtypes = [str(x.dtype) for x in jax.tree.leaves(state) if x.shape]
    assert dtypes == ["bfloat16", "float32"]


@pytest.mark.parametrize("rate", [float("inf"), float("nan"), 1e39, -1.0])
def test_a_negative_or_non_finite_rate_is_refused(rate: float):
    with pytest.raises(UserError, match="optimizer.policy_lr is .*a finite number, 0 or more"):
        Optimizer(rate)
    with pytest.raises(UserError, match="optimizer.value_lr is"):
        Optimizer(0.1, rate)
    with pytest.raises(UserError, match="phases policy_lr is"):
        Phase(1, ("plan",), policy_lr=rate)
    Optimizer(0.0, 0.0)


def logits(decoder, ids) -> np.ndarray:
    """Returns the logits of one sequence in a forward of its own, float64 `[L, V]`."""
    graph, state = nnx.split(decoder)

    def forward(state, ids_1L, positions_1L):
        decoder = nnx.merge(graph, state)
        return decoder.logits(decoder(ids_1L, positions_1L, None)[0])

    inputs = jax.device_put((np.array([ids], np.int32), np.arange(len(ids), dtype=np.int32)[None]))
    return jax.device_get(jax.jit(forward)(state, *inputs))[0].astype(np.float64)


def test_texts_have_the_log_probabilities_of_a_forward_of_each_context_alone():
    # A mask, as of a strict grammar, which other texts are not subject to.
    allowed = np.zeros((2, 12), bool)
    policies = {"a": prepared(GRPO, GRPO_ADAM, deep(), allowed_ZV=allowed)}
    policies["b"] = prepared(GRPO, GRPO_ADAM)
    encode = lambda text, **_: [int(word) for word in text.split()]  # noqa: E731
    tokenizer = SimpleNamespace(encode=encode, encode_action=encode)
    # The turns of a conversation, whose prompts continue each other, in any order.
    texts = [
        Text("planner", (1, 2, 3, 4, 5, 6), "7 8", "9"),
        Text("planner", (1, 2, 3), "7 8", "9"),
        Text("executor", (1, 2, 3), "7 8"),
        Text("planner", (1, 2, 3), "4"),
        Text("planner", (1, 2, 3), ""),
        Text("planner", (1,) * 16, "7 8"),  # longer than a row
    ]
    policy_of = dict(zip(ROLES, "ab", strict=True))
    scores = score_texts(policies, policy_of, tokenizer, texts)
    decoders = {"planner": deep(), "executor": bigram()}
    for text, actual in zip(texts[:4], scores, strict=False):
        ids = [*text.prompt, *encode(text.opening), *encode(text.text)]
        logp_LV = logits(decoders[text.role], ids) / HEAT
        logp_LV -= np.log(np.exp(logp_LV).sum(axis=1, keepdims=True))
        count = len(encode(text.text))
        expected = [logp_LV[i - 1, ids[i]] for i in range(len(ids) - count, len(ids))]
        np.testing.assert_allclose(actual, expected, atol=1e-5)
    assert len(scores[4]) == 0 and np.isnan(scores[5]).all() and len(scores[5]) == 2
    with pytest.raises(UserError, match="names role 'judge': use some of planner, executor"):
        score_texts(policies, policy_of, tokenizer, [Text("judge", (1,), "7")])
