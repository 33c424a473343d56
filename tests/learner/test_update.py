"""An update as a whole: against float64, across devices, with adapters, saved and restored."""

from __future__ import annotations

import dataclasses
import random

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from jax_ragrl.errors import UserError
from jax_ragrl.learner import update as module
from jax_ragrl.learner.checkpoint import Checkpoints, by_path
from jax_ragrl.learner.gradients import score
from jax_ragrl.learner.objective import KL, Objective
from jax_ragrl.learner.optimizer import Optimizer
from jax_ragrl.learner.packing import Actions, Layout, Turn, grouped, lay_out
from jax_ragrl.learner.state import Models, Trainer, acting, prepare, refresh, trained
from jax_ragrl.learner.targets import Scored, credited
from jax_ragrl.learner.update import update
from jax_ragrl.models.decoder import Decoder
from jax_ragrl.models.lora import LoRAConfig, add_lora
from jax_ragrl.runtime.sharding import make_mesh
from tests.compiled import compilations
from tests.learner import reference
from tests.learner.bigram import (
    CONFIG,
    DEEP,
    GRPO,
    GRPO_ADAM,
    HEAT,
    LAYOUT,
    PPO,
    PPO_ADAM,
    ROLES,
    STEERED,
    bigram,
    deep,
    drawn,
    named,
    prepared,
)
from tests.tiny import policy


def turns() -> list[Turn]:
    """Two groups of siblings and a second turn after an observation."""
    draw = np.random.default_rng(3)

    def some(n: int) -> tuple[int, ...]:
        return tuple(draw.integers(0, 12, n).tolist())

    first, second = some(4), some(3)
    made = [Turn(k, "planner", first, some(3 + k)) for k in range(3)]
    made += [Turn(3 + k, "executor", second, some(4)) for k in range(2)]
    return [*made, Turn(5, "planner", made[0].context() + some(3), some(2))]


def number_of(nodes: int = 6) -> np.ndarray:
    return np.random.default_rng(4).normal(size=nodes).astype(np.float32)


def run(trainer: Trainer, models: Models, made: list[Turn] | None = None, sampled=None):
    groups = grouped(made or turns(), LAYOUT)
    return update(trainer, models, groups, number_of(), sampled or {}, random.Random(0))


def written() -> dict[str, np.ndarray]:
    """A grammar that lets each role write what it writes in `turns`, bool `[V]`."""
    made = {z: [t for turn in turns() if turn.role == z for t in turn.ids] for z in ROLES}
    return {z: np.isin(np.arange(CONFIG.vocab_size), ids) for z, ids in made.items()}


@pytest.mark.parametrize("kind", ["PPO", "GRPO", "GRPO under a grammar", "policy gradient"])
def test_an_update_equals_its_equations_in_float64(kind):
    objective, optimizer = {
        "PPO": (PPO, PPO_ADAM),
        "GRPO": (GRPO, GRPO_ADAM),
        "GRPO under a grammar": (GRPO, GRPO_ADAM),
        "policy gradient": (
            Objective("none", critic="none", advantage="group_centred", kl=KL("loss", "k3", 0.5)),
            Optimizer(0.1),
        ),
    }[kind]
    allowed = written() if "grammar" in kind else None
    allowed_ZV = None if allowed is None else np.stack([allowed[z] for z in ROLES])
    trainer, models = prepared(objective, optimizer, allowed_ZV=allowed_ZV)
    other = jax.jit(lambda tree: jax.tree.map(lambda x: 0.9 * x + 0.05, tree))(models.reference)
    models = models._replace(reference=other)  # a KL that is not zero
    before, critic = named(models.policy.params), None
    if models.critic is not None:
        head = models.critic.params["head"]["kernel"]
        head.set_value(jax.device_put(np.linspace(-1, 1, 4, dtype=np.float32)))
        critic = named(models.critic.params)
    expected, expected_critic = reference.update(
        *(objective, optimizer, before, critic, named(other)), turns(), number_of(), HEAT, allowed
    )
    models, _ = run(trainer, models)
    found = named(models.policy.params)
    for name, x in expected.items():
        assert np.abs(x - before[name]).max() > optimizer.policy_lr / 2  # it went somewhere
        np.testing.assert_allclose(found[name], x, atol=1e-3 * optimizer.policy_lr, err_msg=name)
    if critic is not None:
        found = named(models.critic.params)
        for name, x in expected_critic.items():
            np.testing.assert_allclose(found[name], x, atol=1e-3 * optimizer.value_lr, err_msg=name)


def test_rows_of_any_layout_give_one_update():
    """Four short rows, or several batches of a longer one: the same sums, the same step."""
    found = []
    for layout in (LAYOUT, Layout((32,), 32)):
        trainer, models = prepared(GRPO, GRPO_ADAM)
        models, metrics = run(trainer._replace(layout=layout), models)
        found.append((named(models.policy.params), metrics["entropy"], metrics["loss/policy"]))
    for params, *numbers in found[1:]:
        np.testing.assert_allclose(numbers, found[0][1:], rtol=1e-5)
        for name, x in params.items():
            np.testing.assert_allclose(x, found[0][0][name], atol=1e-5)


def test_an_observation_changes_no_loss():
    """Another observation of any length between two turns, its last token kept, is not scored."""
    trainer, models = prepared(GRPO, GRPO_ADAM)
    results = []
    for observed in ((5,), (1, 2, 3, 5), (9,) * 5 + (5,)):
        first = Turn(0, "planner", (1, 2), (3, 4))
        second = Turn(1, "planner", first.context() + observed, (6, 7))
        fresh = prepared(GRPO, GRPO_ADAM)[1]
        results.append(run(trainer, fresh, [first, second])[1])
    for metrics in results[1:]:
        for name in ("loss/policy", "entropy", "kl/loss", "grad_norm", "response_length/mean"):
            np.testing.assert_allclose(metrics[name], results[0][name], rtol=1e-6)


@pytest.mark.parametrize("ratio", ["none", "dual_clip"])
def test_scoring_first_changes_nothing_where_there_is_one_step(ratio, monkeypatch):
    """Neither the step nor what is told of it: the step says itself what the scores would say."""
    layout, sampled = Layout((32,), 32), {0: [-1.0] * 3, 4: [-2.0] * 4}  # several batches
    found = []
    for scored in (False, True):
        trainer, models = prepared(dataclasses.replace(GRPO, ratio=ratio), Optimizer(0.1))
        models = models._replace(reference=jax.tree.map(lambda x: 0.9 * x, models.reference))
        assert not module.needs_old(trainer)
        with monkeypatch.context() as patch:
            patch.setattr(module, "needs_old", lambda trainer, scored=scored: scored)
            models, metrics = run(trainer._replace(layout=layout), models, sampled=sampled)
        found.append((named(models.policy.params), metrics))
    (params, metrics), (after, told) = found
    assert abs(metrics["kl/mean"]) > 1e-3 and metrics["sampler_gap/max"] > 0.1
    assert metrics.keys() == told.keys() and "kl/planner" in told and "entropy/old/mean" in told
    for name in set(told) - {"flops"}:
        np.testing.assert_allclose(metrics[name], told[name], atol=1e-5, err_msg=name)
    for name, x in params.items():
        np.testing.assert_allclose(after[name], x, atol=1e-6)


def test_what_many_steps_say_of_actions_is_what_the_first_epoch_said():
    """Without a ratio nothing is scored first, and each minibatch speaks as it is learnt from."""
    gradient = dataclasses.replace(GRPO, ratio="none")
    once, twice = (
        run(*prepared(gradient, Optimizer(0.1, epochs=n, minibatches=2)))[1] for n in (1, 2)
    )
    assert once["kl/mean"] == twice["kl/mean"] and once["kl/loss"] < twice["kl/loss"]


def test_minibatches_are_disjoint_and_each_is_a_step():
    trainer, models = prepared(PPO, dataclasses.replace(PPO_ADAM, epochs=1, minibatches=2))
    models, metrics = run(trainer, models)
    assert int(models.policy.opt_state[1][0].count) == 2
    parts = module._split(grouped(turns(), LAYOUT), trainer, random.Random(1))
    nodes = [b.actions.node_A.tolist() for part in parts for b in part]
    assert sorted(sum(nodes, [])) == [0, 1, 2, 3, 4, 5] and len(parts) == 2


def test_minibatches_are_drawn_and_an_equal_seed_draws_them_again():
    groups = grouped([Turn(k, "planner", (k, k), (1,)) for k in range(9)], LAYOUT)
    trainer, _ = prepared(GRPO, dataclasses.replace(GRPO_ADAM, minibatches=3))

    def drawn_by(seed: int) -> list[set[int]]:
        parts = module._split(groups, trainer, random.Random(seed))
        return [{n for b in part for n in b.actions.node_A.tolist()} for part in parts]

    assert drawn_by(0) == drawn_by(0) != drawn_by(1)
    assert [len(part) for part in drawn_by(0)] == [3, 3, 3]


@pytest.mark.parametrize(
    ("changes", "epochs", "minibatches", "needed"),
    [
        ({}, 1, 1, False),
        ({}, 2, 1, True),
        ({}, 1, 2, True),
        ({"ratio": "none"}, 2, 1, False),
        ({"stale_cap": 1.5}, 1, 1, True),
        ({"kl": KL("reward")}, 1, 1, True),
        ({"kl": KL("terminal")}, 1, 1, True),
        ({"critic": "shared", "advantage": "gae"}, 1, 1, True),
    ],
)
def test_a_policy_is_scored_first_where_its_one_step_cannot_tell(
    changes, epochs, minibatches, needed
):
    optimizer = Optimizer(0.1, epochs=epochs, minibatches=minibatches)
    trainer, _ = prepared(dataclasses.replace(GRPO, **changes), optimizer)
    assert module.needs_old(trainer) == needed


def test_a_model_whose_gradient_is_not_finite_is_skipped_alone_and_counted():
    """An advantage that is none stops the policy's step, a return that is none the critic's."""
    for spoiled, moved in (("advantage", [False, True]), ("returns", [True, False])):
        trainer, models = prepared(PPO, PPO_ADAM)
        parts = module._split(grouped(turns(), LAYOUT), trainer, random.Random(0))
        flat = [batch for part in parts for batch in part]
        scored = module.scored_actions(trainer, models, flat, number_of(), {})
        targets, _ = module.fix_targets(trainer, models, parts, scored)
        nan = np.full_like(targets[0][0].advantage, np.nan)
        before = [named(x.params) for x in (models.policy, models.critic)]
        models, sums, _ = module.optimize(
            trainer, models, flat, [t._replace(**{spoiled: nan}) for t in targets[0]]
        )
        after = [named(x.params) for x in (models.policy, models.critic)]
        pairs = zip(after, before, strict=True)
        found = [any((x != b[k]).any() for k, x in a.items()) for a, b in pairs]
        assert found == moved and float(sums["skipped"]) == 1.0


@pytest.mark.parametrize("model", ["policy", "critic"])
def test_an_update_to_parameters_that_are_not_finite_is_refused(model: str):
    """The gradient is finite: an infinite rate makes them, of one model alone."""
    trainer, models = prepared(PPO, PPO_ADAM)
    net = getattr(trainer, model)._replace(optimizer=optax.sgd(float("inf")))
    learner = getattr(models, model)
    learner = learner._replace(opt_state=net.optimizer.init(learner.params))
    with pytest.raises(UserError, match=f"parameters of the {model} are NaN or infinite"):
        run(trainer._replace(**{model: net}), models._replace(**{model: learner}))


def test_an_update_of_which_every_step_was_skipped_is_warned_of(recwarn):
    step = {"tokens": 4.0, "clipped": 1.0, "grad_norm": 1.0}
    module._means([step | {"skipped": 1.0}, step | {"skipped": 0.0}])
    critic = {"value/grad_norm": 1.0}
    module._means([step | critic | {"skipped": 1.0}])
    assert not recwarn.list
    with pytest.warns(UserWarning, match="every optimizer step of an update was skipped"):
        module._means([step | critic | {"skipped": 2.0}])


def test_operations_are_six_a_parameter_token_and_epoch_of_policy_and_critic():
    trainer, models = prepared(PPO, dataclasses.replace(PPO_ADAM, epochs=3))
    models, metrics = run(trainer, models)
    weights = sum(x.size for x in named(models.policy.params).values())
    weights += sum(x.size for x in named(models.critic.params).values())
    tokens = sum(group.tokens for group in grouped(turns(), LAYOUT))
    assert metrics["flops"] == 3 * 6 * weights * tokens


def test_of_gradients_there_is_one_tree_to_which_every_batch_is_added(monkeypatch):
    sums = []

    def gradient(*args, total, **kwargs):
        given = jax.tree.leaves(total)
        assert not sums or all(a is b for a, b in zip(given, sums[-1], strict=True))
        one = step_gradient(*args, total=total, **kwargs)
        assert all(x.is_deleted() for x in given if x.size)
        sums.append(jax.tree.leaves(one.grads))
        return one

    step_gradient = module.gradient
    monkeypatch.setattr(module, "gradient", gradient)
    trainer, models = prepared(GRPO, dataclasses.replace(GRPO_ADAM, epochs=1))
    run(trainer._replace(layout=Layout((16,), 16)), models)
    assert len(sums) > 2


def test_hosts_compare_what_they_place_as_often_whatever_the_number_of_batches(monkeypatch):
    """Each comparison waits for what the devices do, and for the other hosts."""
    placed = []
    place = module.place
    monkeypatch.setattr(module, "place", lambda *args: placed.append(None) or place(*args))
    trainer, models = prepared(GRPO, GRPO_ADAM)
    for tokens in (64, 16):
        run(
            trainer._replace(layout=Layout((16,), tokens)),
            models._replace(policy=refresh(models.policy)),
        )
        assert len(placed) == 2 + GRPO_ADAM.epochs  # two models' scores, and the steps
        placed.clear()


def test_without_groups_nothing_changes():
    trainer, models = prepared(GRPO, GRPO_ADAM)
    same, metrics = update(trainer, models, [], number_of(), {}, random.Random(0))
    assert same is models and metrics == {}


def test_what_another_policy_sampled_weighs_at_most_the_cap():
    objective = dataclasses.replace(GRPO, stale_cap=3.0, kl=KL("none"), entropy=0.0)
    trainer, models = prepared(objective, Optimizer(0.1))
    _, fresh = run(trainer, models)
    unlikely = {turn.node: (-50.0,) * len(turn.ids) for turn in turns()}
    _, stale = run(trainer, prepared(objective, Optimizer(0.1))[1], sampled=unlikely)
    np.testing.assert_allclose(stale["loss/policy"], 3 * fresh["loss/policy"], rtol=1e-5)
    assert fresh["sampler_gap/max"] == 0 and stale["sampler_gap/max"] > 40


# Where rewards come from.

MASK = np.array([[True, True, False], [True, False, False]])
LOGP = np.array([[-1.0, -2.0, np.nan], [-1.0, 9.0, 9.0]], np.float32)
REF = np.array([[-1.5, -2.25, 0.0], [-1.0, 7.0, 7.0]], np.float32)


def credit_of(objective: Objective, value: np.ndarray | None = None) -> list[np.ndarray]:
    numbers = np.array([1.0, 0.5], np.float32)
    alone = np.arange(2, dtype=np.int32)[:, None]
    scored = Scored(MASK, numbers, alone, LOGP, REF, value)
    tenth = jax.device_put(np.float32(0.1))
    return jax.device_get(credited(objective, jax.device_put(scored), tenth))


def test_the_credit_is_on_the_last_token_and_the_kl_on_each_or_on_the_last():
    zero = np.zeros((2, 3), np.float32)
    plain = {"advantage": "gae", "lam": 0.0}  # an advantage is then its token's own reward
    each, _, _ = credit_of(Objective(**plain, kl=KL("reward")), zero)
    np.testing.assert_allclose(each, [[-0.05, 1 - 0.025, 0], [0.5, 0, 0]], atol=1e-6)
    last, _, _ = credit_of(Objective(**plain, kl=KL("terminal")), zero)
    np.testing.assert_allclose(last, [[0, 1 - 0.075, 0], [0.5, 0, 0]], atol=1e-6)


@pytest.mark.parametrize(("estimator", "paid"), [("k1", 0.05), ("k2", 0.0125), ("k3", 0.0106531)])
def test_the_reward_pays_for_the_estimate_that_is_named(estimator, paid):
    """A tenth of the first token's: 0.5, 0.5^2 / 2 and exp(-0.5) - 1 + 0.5."""
    objective = Objective(advantage="gae", lam=0.0, kl=KL("reward", estimator))
    advantage, _, _ = credit_of(objective, np.zeros((2, 3), np.float32))
    np.testing.assert_allclose(advantage[0, 0], -paid, rtol=1e-5)


def test_without_a_critic_a_nodes_number_is_the_advantage_of_its_tokens():
    advantage, _, weight = credit_of(GRPO)
    np.testing.assert_array_equal(advantage, [[1, 1, 0], [0.5, 0, 0]])
    np.testing.assert_array_equal(weight, MASK)


def test_an_action_that_fills_its_row_has_its_credit_on_its_last_token():
    whole = Scored(MASK[:, :2], np.array([1.0, 0.5], np.float32), np.array([[0], [1]], np.int32))
    advantage, _, _ = credited(GRPO, jax.device_put(whole), jax.device_put(np.float32(0.1)))
    np.testing.assert_array_equal(jax.device_get(advantage), [[1, 1], [0.5, 0]])


def test_returns_are_of_advantages_before_whitening():
    value = np.array([[0.5, 0.25, 7.0], [1.0, 7.0, 7.0]], np.float32)
    advantage, returns, _ = credit_of(Objective(lam=1.0, kl=KL("none")), value)
    np.testing.assert_allclose(returns, [[1, 1, 0], [0.5, 0, 0]], atol=1e-6)
    assert abs(advantage[MASK].mean()) < 1e-6 and abs(advantage[MASK].std() - 1) < 1e-5


def test_over_conversations_a_turn_is_worth_what_the_turns_after_it_earn():
    """One conversation of two turns and one of the first of them alone, in float64 by hand."""
    first = Turn(0, "planner", (1, 2), (3, 4))
    second = Turn(1, "planner", first.context() + (9, 9), (6, 7, 8), after=0)
    other = Turn(2, "planner", (5,), (6,), after=7)  # what it follows is not trained
    objective = dataclasses.replace(
        PPO, span="conversation", advantage="gae", kl=KL("none"), gamma=0.9, lam=0.8
    )
    trainer, models = prepared(objective, PPO_ADAM)
    parts = module._split(grouped([first, second, other], LAYOUT), trainer, random.Random(0))
    flat = [batch for part in parts for batch in part]
    numbers = np.array([0.5, -1.0, 2.0], np.float32)
    scored = module.scored_actions(trainer, models, flat, numbers, {})
    values = np.linspace(-1, 2, scored.mask_AT.size, dtype=np.float32)
    scored = scored._replace(value_AT=values.reshape(scored.mask_AT.shape))
    _, advantage_AT = module.fix_targets(trainer, models, parts, scored)
    row = {node: a for a, node in enumerate(module.joined(flat).node_A.tolist())}
    value = [*scored.value_AT[row[0], :2], *scored.value_AT[row[1], :3]]
    reward, expected, advantage = [0, 0.5, 0, 0, -1.0], [], 0.0
    for t in reversed(range(5)):
        after = float(value[t + 1]) if t < 4 else 0.0
        advantage = reward[t] + 0.9 * after - float(value[t]) + 0.9 * 0.8 * advantage
        expected.insert(0, advantage)
    np.testing.assert_allclose(advantage_AT[row[0], :2], expected[:2], rtol=1e-5)
    np.testing.assert_allclose(advantage_AT[row[1], :3], expected[2:], rtol=1e-5)
    alone = 2.0 - scored.value_AT[row[2], 0]
    np.testing.assert_allclose(advantage_AT[row[2], :1], alone, rtol=1e-5)


# What changes and what stays.


def test_an_adaptive_coefficient_moves_towards_its_target_and_is_saved(tmp_path):
    trainer, models = prepared(STEERED, Optimizer(0.1), deep())
    models, metrics = run(trainer, models)  # no KL yet: 6 actions of 60, a fifth of a step down
    np.testing.assert_allclose(float(models.kl_coefficient), 0.1 * (1 - 0.2 * 6 / 60), rtol=1e-6)
    assert abs(metrics["kl/coefficient"] - 0.1) < 1e-6
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, models, {})
    _, fresh = prepared(STEERED, Optimizer(0.1), deep())
    restored, _ = checkpoints.restore(1, fresh)
    checkpoints.close()
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(restored), jax.device_get(models))


@pytest.mark.parametrize(
    ("epochs", "seen", "batch", "expected"),
    [
        (2, {"kl/mean": 1.0, "kl/loss": 9.0}, 6, 0.1 * (1 + (2.5 / 3 - 1) * 6 / 60)),
        (1, {"kl/mean": 9.0, "kl/loss": 1.4}, 6, 0.1 * (1 + (3.5 / 3 - 1) * 6 / 60)),
        (2, {"kl/mean": 0.0}, 600, 0.05),  # the floor
    ],
)
def test_a_coefficient_is_steered_by_the_nats_of_a_whole_action(epochs, seen, batch, expected):
    """Of 2.5 tokens, against a target of 3; a KL of the scores goes before that of the steps."""
    trainer, models = prepared(STEERED, Optimizer(0.1, epochs=epochs))
    metrics = seen | {"response_length/mean": 2.5}
    after = module._steered(trainer, models, metrics, batch)
    np.testing.assert_allclose(jax.device_get(after.kl_coefficient), expected, rtol=1e-6)


def test_metrics_are_means_over_the_tokens_of_all_steps_or_over_steps():
    step = {"tokens": 4.0, "clipped": 1.0, "entropy": 6.0, "kl": 2.0, "grad_norm": 1.0}
    other = {"tokens": 12.0, "clipped": 3.0, "entropy": 2.0, "kl": 6.0, "grad_norm": 2.0}
    found = module._means([step | {"skipped": 1.0}, other | {"skipped": 0.0}])
    expected = {"clip_frac": 0.25, "entropy": 0.5, "kl/loss": 0.5, "grad_norm": 1.5, "skipped": 1.0}
    assert found == expected


def test_what_actions_were_like_is_told_of_all_of_them_and_by_role():
    """By hand: an action of two tokens and one of one, of two roles."""
    zero = np.zeros(2, np.int32)
    actions = Actions(zero, np.array([0, 1]), zero, zero, np.array([2, 1]), zero)
    mask_AT = np.array([[True, True], [True, False]])
    logp_AT = np.array([[-1.0, -2.0], [-3.0, 9.0]], np.float32)
    scored = Scored(mask_AT, zero, zero[:, None], logp_AT, ref_logp_AT=logp_AT - 1)
    sampled = logp_AT + np.array([[0.5, -0.25], [0, 9]], np.float32)
    found = module.describe(
        ROLES, actions, scored._replace(behaviour_AT=sampled), np.array([[1.0, 2.0], [6.0, 9.0]])
    )
    assert found["kl/mean"] == found["kl/planner"] == found["kl/executor"] == 1.0
    assert found["sampler_gap/max"] == 0.5
    assert (found["advantage/mean"], found["advantage/planner"]) == (3.0, 1.5)
    assert (found["advantage/executor"], found["advantage/std/executor"]) == (6.0, 0.0)
    assert found["advantage/std/planner"] == 0.5 and found["advantage/std"] == 14**0.5 / 3**0.5
    assert found["response_length/mean"] == 1.5
    assert (found["response_length/planner"], found["response_length/executor"]) == (2.0, 1.0)


def test_a_mesh_takes_the_step_that_one_device_takes_and_resumes(tmp_path):
    mesh, adam = make_mesh((1, 2, 1), jax.devices()[:2]), Optimizer(0.1)
    decoder = drawn(DEEP, mesh=mesh)
    trainer, models = prepared(STEERED, adam, decoder)
    models, _ = run(trainer, models)
    first_moment = models.policy.opt_state[1][0].mu["embed"][...]
    assert first_moment.addressable_shards[0].data.shape == (12, 2)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, models, {})
    restored, _ = checkpoints.restore(1, prepared(STEERED, adam, decoder)[1])
    checkpoints.close()
    again, _ = run(trainer, restored)
    single, one = prepared(STEERED, adam, deep())
    expected, _ = run(single, run(single, one)[0])
    found, wanted = (jax.tree.leaves(jax.device_get(m)) for m in (again, expected))
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_on_a_mesh_the_steps_of_a_run_share_one_gradient_program(caplog):
    """What an optimizer step returns is laid out as it was, but spelled otherwise."""
    mesh = make_mesh((1, 2, 1), jax.devices()[:2])
    objective = dataclasses.replace(STEERED, entropy=0.03)  # no other test's program
    trainer, models = prepared(objective, Optimizer(0.1, epochs=2), drawn(DEEP, mesh=mesh))
    assert compilations("gradient", caplog, lambda: run(trainer, models)) == 1


@pytest.mark.parametrize("adapted", [False, True])
def test_weights_put_on_a_device_are_compiled_for_once(adapted: bool, caplog):
    """The weights of a folder are; what is made beside them (a value head, moments, an adapter) was
    not, and became so with the first step: a second program of each kind, the gradient's too."""
    base = Decoder.from_params(DEEP, jax.device_put(deep().params(), jax.devices()[0]))
    lora = LoRAConfig(2, 4.0, ("q_proj",))
    decoder = add_lora(base, lora, rngs=nnx.Rngs(1)) if adapted else base
    objective = dataclasses.replace(PPO, entropy=0.04)  # no other test's program
    trainer, models = prepared(objective, Optimizer(0.1, 0.2), decoder)
    models, _ = run(trainer, models)
    for name in ("score", "gradient", "apply"):
        assert compilations(name, caplog, lambda: run(trainer, refresh(models))) == 0, name


def test_a_reference_is_the_policy_given_and_not_a_copy_of_it():
    given = bigram(3)
    for objective, optimizer in ((PPO, PPO_ADAM), (GRPO, GRPO_ADAM)):
        _, models = prepared(objective, optimizer, given)
        own, others = jax.tree.leaves(given.params()), jax.tree.leaves(models.reference)
        assert {id(x) for x in own} == {id(x) for x in others}
        assert not {id(x) for x in own} & {id(x) for x in jax.tree.leaves(models.policy)}


@pytest.mark.parametrize("critic", ["own", "shared"])
@pytest.mark.parametrize("adapted", [False, True])
def test_a_reference_in_half_the_bytes_scores_to_the_last_bit_as_one_in_float32(critic, adapted):
    config = dataclasses.replace(DEEP, hidden_size=64, head_dim=16, qkv_bias=True)
    given, rng = drawn(config), np.random.default_rng(5)
    for norm in ("attn_norm", "mlp_norm", "q_norm", "k_norm"):  # all ones, which any dtype holds
        shape = given.layers[norm].shape
        given.layers[norm] = nnx.Param(jax.device_put(rng.normal(1, 0.1, shape).astype(np.float32)))
    if adapted:
        given = add_lora(given, LoRAConfig(2, 4.0, ("q_proj",)), rngs=nnx.Rngs(1))
    objective = dataclasses.replace(PPO, critic=critic)
    trainer, models = prepared(objective, PPO_ADAM, given, compute="bfloat16")
    kept, whole = models.reference, models.policy.params
    half = {name for name, x in by_path(kept).items() if x.dtype == jax.numpy.bfloat16}
    wide = {name for name in by_path(kept) if "_norm" in name or name.startswith("head/")}
    assert half == by_path(whole).keys() - wide and len(half) >= 2
    (batch,) = lay_out(grouped(turns(), LAYOUT), ROLES, LAYOUT)
    rows, heat = jax.device_put((batch.rows, np.float32(HEAT)))
    one, other = (
        score(trainer.policy.graph, params, trainer.policy.frozen, rows, heat).logp_RM
        for params in (kept, whole)
    )
    assert np.abs(one).max() > 1
    np.testing.assert_array_equal(one, other)


def test_a_checkpoint_with_a_float32_reference_goes_on_with_it_cast(tmp_path):
    _, models = prepared(STEERED, Optimizer(0.1), deep(), compute="bfloat16")
    moved = jax.tree.map(lambda x: x * np.float32(1.1), models.policy.params)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, models._replace(reference=moved), {})
    restored, _ = checkpoints.restore(1, models)
    checkpoints.close()
    expected = jax.tree.map(lambda x, like: x.astype(like.dtype), moved, models.reference)
    for found, wanted in zip(*map(jax.tree.leaves, (restored.reference, expected)), strict=True):
        assert found.dtype == wanted.dtype
        np.testing.assert_array_equal(*jax.device_get((found, wanted)))


def test_what_acts_is_cast_and_what_is_exported_is_what_was_trained():
    trainer, models = prepared(GRPO, GRPO_ADAM, compute="bfloat16")
    acts, kept = nnx.merge(*acting(trainer, models)), trained(trainer, models)
    assert acts.embed[...].dtype == jax.numpy.bfloat16
    assert kept.embed[...] is models.policy.params["embed"][...]


def test_the_policy_given_stays_as_it_is():
    before = jax.device_get(bigram(3).params())
    trainer, models = prepared(PPO, PPO_ADAM, bigram(3))
    models, _ = run(trainer, models)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(bigram(3).params()), before)
    graph, params = acting(trainer, models)
    assert isinstance(nnx.merge(graph, params), Decoder)


def test_an_adapter_is_trained_and_saved_alone_over_a_base_that_stays():
    base = nnx.merge(*policy())
    adapted = add_lora(base, LoRAConfig(2, 4.0, ("q_proj", "down_proj")), rngs=nnx.Rngs(1))
    objective = dataclasses.replace(GRPO, kl=KL("reward"), ratio="clip", entropy=0.0)
    layout = Layout(lengths=(16,), tokens=64)
    adam = Optimizer(0.01, epochs=2)
    trainer, models = prepare(adapted, objective, adam, layout, ROLES, 1.0, 1)
    saved = by_path(models)
    assert all("lora" in name or "count" in name or "kl_coeff" in name for name in saved)
    assert sum(x.size for x in saved.values()) < 5 * sum(
        x.size for x in jax.tree.leaves(models.policy.params)
    )
    before = jax.device_get((base.params(), models.policy.params))
    models, metrics = run(trainer, models)
    assert metrics["kl/mean"] == 0.0  # a fresh adapter computes what the reference computes
    after = jax.device_get((base.params(), models.policy.params))
    jax.tree.map(np.testing.assert_array_equal, after[0], before[0])
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), after[1], before[1])
    assert max(jax.tree.leaves(moved)) > 1e-3
    acted = nnx.merge(*acting(trainer, models))
    assert acted.adapter is not None and acted.embed[...] is base.embed[...]


def test_a_critic_beside_an_adapter_is_an_adapter_on_the_same_base():
    base = nnx.merge(*policy())
    adapted = add_lora(base, LoRAConfig(2, 4.0, ("q_proj",)), rngs=nnx.Rngs(1))
    trainer, models = prepared(PPO, PPO_ADAM, adapted)
    names = {name.split("/")[-2] for name in by_path(models.critic.params)}
    assert names == {"q_proj_lora_a", "q_proj_lora_b", "kernel", "bias"}
    trunk = nnx.merge(trainer.critic.graph, models.critic.params, trainer.critic.frozen).trunk
    assert trunk.embed[...] is base.embed[...]


def test_compute_is_in_the_given_dtype_over_float32_weights():
    trainer, models = prepared(GRPO, GRPO_ADAM, compute="bfloat16", remat="full")
    config = nnx.merge(*acting(trainer, models)).config
    assert (config.dtype, config.remat) == ("bfloat16", "full")
    models, _ = run(trainer, models)
    dtypes = {x.dtype for x in jax.tree.leaves((models.policy.params, models.policy.opt_state))}
    assert dtypes == {np.dtype(np.float32), np.dtype(np.int32)}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Objective(ratio="tight"), "ratio is 'tight': use one of clip, dual_clip, none"),
        (lambda: Objective(critic="two"), "critic is 'two'"),
        (lambda: Objective(value_loss="huber"), "value_loss is 'huber'"),
        (lambda: Objective(aggregation="sum"), "aggregation is 'sum'"),
        (lambda: Objective(advantage="best"), "advantage is 'best': use one of gae"),
        (lambda: Objective(advantage="group_centred"), "'own': .* use gae or whitened_gae"),
        (lambda: Objective(critic="none"), "'none': .* use group_normalised or"),
        (lambda: Objective(span="game"), "span is 'game'"),
        (lambda: Objective(role_weights=(("planner", 2.0),)), "this is 'token_mean', which knows"),
        (lambda: dataclasses.replace(GRPO, span="conversation"), "without a critic"),
        (lambda: KL("everywhere"), "kl.where is 'everywhere'"),
        (lambda: KL(estimator="k4"), "kl.estimator is 'k4'"),
        (lambda: KL("loss", "k1"), "pulls nowhere: use k2 or k3"),
        (lambda: Optimizer(0.1, schedule="step"), "schedule is 'step'"),
        (lambda: Optimizer(0.1, moments="half"), "moments is 'half': use one of float32"),
        (lambda: Optimizer(0.1, minibatches=0), "minibatches is 0: nothing would be trained"),
        (lambda: Optimizer(0.1, epochs=0), "epochs is 0: nothing would be trained"),
        (lambda: Optimizer(0.1, warmup=100.0), "warmup is 100: it is a share of all steps"),
        (lambda: Layout((1024, 512)), r"lengths is \(1024, 512\) .* lengths ascend"),
        (lambda: prepared(PPO, Optimizer(0.1)), "value_lr is 0"),
        (lambda: prepared(PPO, PPO_ADAM, remat="some"), "remat is 'some'"),
        (
            lambda: prepared(dataclasses.replace(PPO, role_weights=(("x", 1.0),)), PPO_ADAM),
            "role_weights is 'x': use one of planner, executor",
        ),
    ],
)
def test_a_choice_that_does_not_exist_is_refused_by_name(make, words):
    with pytest.raises(UserError, match=words):
        make()


def test_every_group_rule_makes_advantages_without_a_critic():
    for rule in ("group_normalised", "group_centred", "leave_one_out", "tree_group"):
        assert Objective(critic="none", advantage=rule).advantage == rule
