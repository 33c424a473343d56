"""A complete update: against float64, over devices, with adapters, saved and restored."""

import dataclasses
import random

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from jax_ragrl.errors import UserError
from jax_ragrl.learner import passes
from jax_ragrl.learner import update as update_module
from jax_ragrl.learner.checkpoint import Checkpoints, by_path
from jax_ragrl.learner.gradients import score
from jax_ragrl.learner.objective import KL, Objective
from jax_ragrl.learner.optimizer import Optimizer
from jax_ragrl.learner.packing import Actions, Layout, Minibatches, Turn, group_turns, lay_out
from jax_ragrl.learner.state import Policy, sampling_model, trained_decoder
from jax_ragrl.learner.targets import ActionScores, compute_advantages
from jax_ragrl.learner.update import split_minibatches, update
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
    named,
    prepared,
    random_decoder,
)
from tests.tiny import policy as tiny_policy


def turns() -> list[Turn]:
    """Returns two groups of siblings and a second turn after an observation, with credit."""
    draw = np.random.default_rng(3)

    def ids(n: int) -> tuple[int, ...]:
        return tuple(draw.integers(0, 12, n).tolist())

    first, second = ids(4), ids(3)
    out = [Turn(k, "planner", first, ids(3 + k)) for k in range(3)]
    out += [Turn(3 + k, "executor", second, ids(4)) for k in range(2)]
    out.append(Turn(5, "planner", out[0].context() + ids(3), ids(2)))
    credit = np.random.default_rng(4).normal(size=6).astype(np.float32).tolist()
    return [turn._replace(credit=x) for turn, x in zip(out, credit, strict=True)]


def run(policy: Policy, samples: list[Turn] | None = None, layout: Layout = LAYOUT):
    return update(policy, group_turns(samples or turns(), layout), random.Random(0))


def minibatches(policy: Policy, samples: list[Turn] | None = None, seed: int = 0) -> Minibatches:
    groups = group_turns(samples or turns(), LAYOUT)
    return split_minibatches(groups, policy.spec, random.Random(seed))


def with_layout(policy: Policy, layout: Layout) -> Policy:
    return policy._replace(spec=policy.spec._replace(layout=layout))


def grammar() -> dict[str, np.ndarray]:
    """Returns, by role, the tokens that it writes in `turns` as its only allowed ones, `[V]`."""
    ids = {z: [t for turn in turns() if turn.role == z for t in turn.ids] for z in ROLES}
    return {z: np.isin(np.arange(CONFIG.vocab_size), x) for z, x in ids.items()}


@pytest.mark.parametrize("kind", ["PPO", "GRPO", "GRPO under a grammar", "policy gradient"])
def test_an_update_equals_its_equations_in_float64(kind):
    """In four short rows; under a grammar in several batches of longer rows."""
    objective, optimizer = {
        "PPO": (PPO, PPO_ADAM),
        "GRPO": (GRPO, GRPO_ADAM),
        "GRPO under a grammar": (GRPO, GRPO_ADAM),
        "policy gradient": (
            Objective(
                "policy_gradient_loss",
                critic="none",
                advantage="group_centred",
                kl=KL("loss", "k3", 0.5),
            ),
            Optimizer(0.1),
        ),
    }[kind]
    allowed = grammar() if "grammar" in kind else None
    allowed_ZV = None if allowed is None else np.stack([allowed[z] for z in ROLES])
    policy = prepared(objective, optimizer, allowed_ZV=allowed_ZV)
    if allowed is not None:
        policy = with_layout(policy, Layout((32,), 32))
    move = jax.jit(lambda tree: jax.tree.map(lambda x: 0.9 * x + 0.05, tree))
    other = move(policy.state.reference)
    policy = policy.with_state(reference=other)  # a KL that is not zero
    before, critic = named(policy.state.policy.params), None
    if policy.state.critic is not None:
        head = policy.state.critic.params["head"]["kernel"]
        head.set_value(jax.device_put(np.linspace(-1, 1, 4, dtype=np.float32)))
        critic = named(policy.state.critic.params)
    expected, expected_critic = reference.update(
        *(objective, optimizer, before, critic, named(other)), turns(), HEAT, allowed
    )
    policy, _ = run(policy)
    actual, atol = named(policy.state.policy.params), 1e-3 * optimizer.policy_lr
    for name, x in expected.items():
        assert np.abs(x - before[name]).max() > optimizer.policy_lr / 2  # the step is not trivial
        np.testing.assert_allclose(actual[name], x, atol=atol, err_msg=name)
    if critic is not None:
        actual, atol = named(policy.state.critic.params), 1e-3 * optimizer.value_lr
        for name, x in expected_critic.items():
            np.testing.assert_allclose(actual[name], x, atol=atol, err_msg=name)


UNPENALIZED = Objective(
    "policy_gradient_loss", critic="none", advantage="group_centred", kl=KL("none")
)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "role_sum"])
def test_groups_of_advantage_zero_can_be_left_out(aggregation):
    """Each role's denominator, the optimizer's step and the order of groups remain the same."""
    credits = (0, 0, 0, 1.5, -0.5, 0)
    samples = [turn._replace(credit=x) for turn, x in zip(turns(), credits, strict=True)]
    objective = dataclasses.replace(UNPENALIZED, aggregation=aggregation)
    params, norms, skipped = [], [], []
    for skip in (False, True):
        chosen = dataclasses.replace(objective, skip_zero_advantage=skip)
        policy, metrics = run(prepared(chosen, Optimizer(0.1)), samples)
        params.append(named(policy.state.policy.params))
        norms.append(metrics["grad_norm"])  # Adam hides a factor of the gradient
        skipped.append(metrics.get("zero_advantage_frac"))
    np.testing.assert_allclose(norms[1], norms[0], rtol=1e-5)
    for name, x in params[1].items():
        np.testing.assert_allclose(x, params[0][name], atol=1e-6, err_msg=name)
    assert skipped[0] is None
    assert 0 < skipped[1] < 1


def test_without_groups_or_their_credit_there_is_no_update():
    """The momentum of an earlier update would move the weights."""
    objective = dataclasses.replace(UNPENALIZED, skip_zero_advantage=True)
    policy, _ = run(prepared(objective, Optimizer(0.1)), turns())
    before = jax.tree.leaves(jax.device_get(policy.state))
    policy, metrics = run(policy, [turn._replace(credit=0.0) for turn in turns()])
    assert metrics["zero_advantage_frac"] == 1 and "grad_norm" not in metrics
    for one, other in zip(before, jax.tree.leaves(jax.device_get(policy.state)), strict=True):
        np.testing.assert_array_equal(one, other)
    policy = prepared(GRPO, GRPO_ADAM)
    same, metrics = update(policy, [], random.Random(0))
    assert same is policy and metrics == {}


@pytest.mark.parametrize("change", [{"kl": KL("loss", "k3")}, {"entropy_coefficient": 0.1}])
def test_groups_of_advantage_zero_stay_if_the_loss_has_other_terms(change):
    with pytest.raises(UserError, match="which train on actions with advantage 0 too"):
        dataclasses.replace(GRPO, **({"kl": KL("none"), "skip_zero_advantage": True} | change))


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["policy_gradient_loss", "dual_clipped_policy_loss"])
def test_a_scoring_pass_changes_nothing_in_a_single_step(loss, monkeypatch):
    """Neither the step nor its metrics: the first gradient pass yields the same outputs."""
    logps = {0: (-1.0,) * 3, 4: (-2.0,) * 4}
    samples = [t._replace(behaviour_logps=logps.get(t.node, ())) for t in turns()]
    results = []
    for separate in (False, True):
        policy = prepared(dataclasses.replace(GRPO, loss=loss), Optimizer(0.1))
        other = jax.tree.map(lambda x: 0.9 * x, policy.state.reference)
        policy = with_layout(policy.with_state(reference=other), Layout((32,), 32))  # two batches
        assert not update_module.needs_old_logps(policy.spec)
        with monkeypatch.context() as patch:
            patch.setattr(update_module, "needs_old_logps", lambda _, separate=separate: separate)
            policy, metrics = run(policy, samples)
        results.append((named(policy.state.policy.params), metrics))
    (params, metrics), (expected, expected_metrics) = results
    assert abs(metrics["kl/mean"]) > 1e-3 and metrics["sampler_gap/max"] > 0.1
    assert metrics.keys() == expected_metrics.keys()
    assert {"kl/planner", "entropy/old/mean"} <= metrics.keys()
    for name in metrics.keys() - {"flops"}:
        np.testing.assert_allclose(metrics[name], expected_metrics[name], atol=1e-5, err_msg=name)
    for name, x in params.items():
        np.testing.assert_allclose(expected[name], x, atol=1e-6)


def test_action_metrics_come_from_the_first_epoch():
    """Without a ratio there is no scoring pass: each minibatch is scored as it is trained on."""
    objective = dataclasses.replace(GRPO, loss="policy_gradient_loss")
    one, two = (
        run(prepared(objective, Optimizer(0.1, epochs=n, minibatches=2)))[1] for n in (1, 2)
    )
    assert one["kl/mean"] == two["kl/mean"] and one["kl/loss"] < two["kl/loss"]


def test_minibatches_are_disjoint_depend_on_the_seed_only_and_each_is_a_step():
    samples = [Turn(k, "planner", (k, k), (1,)) for k in range(9)]
    policy = prepared(GRPO, dataclasses.replace(GRPO_ADAM, epochs=1, minibatches=3))

    def nodes(seed: int) -> list[set[int]]:
        parts = minibatches(policy, samples, seed).parts
        return [{n for b in part for n in b.actions.node_A.tolist()} for part in parts]

    assert nodes(0) == nodes(0) != nodes(1)
    assert [len(part) for part in nodes(0)] == [3, 3, 3] and set.union(*nodes(0)) == {*range(9)}
    policy, _ = run(policy, samples)
    assert int(policy.state.policy.opt_state[1][0].count) == 3


@pytest.mark.parametrize(
    ("changes", "epochs", "minibatches", "needed"),
    [
        ({}, 1, 1, False),
        ({}, 2, 1, True),
        ({}, 1, 2, True),
        ({"loss": "policy_gradient_loss"}, 2, 1, False),
        ({"importance_weight_cap": 1.5}, 1, 1, True),
        ({"kl": KL("reward")}, 1, 1, True),
        ({"kl": KL("terminal")}, 1, 1, True),
        ({"critic": "shared", "advantage": "gae"}, 1, 1, True),
    ],
)
def test_a_scoring_pass_is_run_only_if_needed(changes, epochs, minibatches, needed):
    optimizer = Optimizer(0.1, epochs=epochs, minibatches=minibatches)
    policy = prepared(dataclasses.replace(GRPO, **changes), optimizer)
    assert update_module.needs_old_logps(policy.spec) == needed


def test_only_the_model_with_a_non_finite_gradient_is_skipped():
    """NaN advantages skip the step of the policy, NaN returns the step of the critic."""
    for field, moved in (("advantage", [False, True]), ("returns", [True, False])):
        policy = prepared(PPO, PPO_ADAM)
        data = minibatches(policy)
        scores = update_module.score_actions(policy, data)
        targets, *_ = update_module.compute_targets(policy, data, scores)
        nan = np.full_like(targets[0][0].advantage, np.nan)
        before = [named(x.params) for x in (policy.state.policy, policy.state.critic)]
        policy, sums, _ = update_module.optimize(
            policy, data.parts[0], [t._replace(**{field: nan}) for t in targets[0]]
        )
        after = [named(x.params) for x in (policy.state.policy, policy.state.critic)]
        pairs = zip(after, before, strict=True)
        changed = [any((x != b[k]).any() for k, x in a.items()) for a, b in pairs]
        assert changed == moved and float(sums["skipped"]) == 1.0


@pytest.mark.parametrize("model", ["policy", "critic"])
def test_an_update_to_non_finite_parameters_is_refused(model):
    """The gradient is finite; an infinite learning rate of one model makes them infinite."""
    policy = prepared(PPO, PPO_ADAM)
    spec = getattr(policy.spec, model)._replace(optimizer=optax.sgd(float("inf")))
    state = getattr(policy.state, model)
    state = state._replace(opt_state=spec.optimizer.init(state.params))
    policy = policy._replace(spec=policy.spec._replace(**{model: spec}))
    with pytest.raises(UserError, match=f"parameters of the {model} are NaN or infinite"):
        run(policy.with_state(**{model: state}))


def test_an_update_without_any_step_warns(recwarn):
    step = {"tokens": 4.0, "clipped": 1.0, "grad_norm": 1.0}
    update_module._step_metrics([step | {"skipped": 1.0}, step | {"skipped": 0.0}])
    critic = {"value/grad_norm": 1.0}
    update_module._step_metrics([step | critic | {"skipped": 1.0}])
    assert not recwarn.list
    with pytest.warns(UserWarning, match="every optimizer step of an update was skipped"):
        update_module._step_metrics([step | critic | {"skipped": 2.0}])


@pytest.mark.parametrize("shares_devices", [False, True])
def test_programs_of_an_update_give_way_to_rollouts_on_its_devices(shares_devices, monkeypatch):
    """A rollout that starts a program waits for one program of the update, not for all of them."""
    events = []

    def note(module, name: str, event: str) -> None:
        original = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *args, **kwargs: events.append(event) or original(*args, **kwargs)
        )

    note(passes, "gradient", "start")
    note(passes, "score", "start")
    note(jax, "block_until_ready", "wait")
    policy = with_layout(prepared(PPO, PPO_ADAM), Layout((16,), 16))
    run(policy._replace(spec=policy.spec._replace(shares_devices=shares_devices)))
    starts = events.count("start")
    assert starts > 6 and events == ["start", *(["wait"] if shares_devices else [])] * starts


MASK = np.array([[True, True, False], [True, False, False]])
LOGP = np.array([[-1.0, -2.0, np.nan], [-1.0, 9.0, 9.0]], np.float32)
REF = np.array([[-1.5, -2.25, 0.0], [-1.0, 7.0, 7.0]], np.float32)


def targets_of(objective: Objective, value: np.ndarray | None = None) -> list[np.ndarray]:
    """Returns advantages, returns and importance weights of two actions with credit 1 and 0.5."""
    credit_A = np.array([1.0, 0.5], np.float32)
    path_CS = np.arange(2, dtype=np.int32)[:, None]
    scores = ActionScores(MASK, credit_A, path_CS, LOGP, REF, value)
    tenth = jax.device_put(np.float32(0.1))
    return jax.device_get(compute_advantages(objective, jax.device_put(scores), tenth))


def test_credit_is_on_the_last_token_of_any_row_and_kl_on_its_place():
    zero = np.zeros((2, 3), np.float32)
    plain = {"advantage": "gae", "lam": 0.0}  # the advantage is then the reward of the token
    each, _, _ = targets_of(Objective(**plain, kl=KL("reward")), zero)
    np.testing.assert_allclose(each, [[-0.05, 1 - 0.025, 0], [0.5, 0, 0]], atol=1e-6)
    last, _, _ = targets_of(Objective(**plain, kl=KL("terminal")), zero)
    np.testing.assert_allclose(last, [[0, 1 - 0.075, 0], [0.5, 0, 0]], atol=1e-6)
    credit_A, path_CS = np.array([1.0, 0.5], np.float32), np.array([[0], [1]], np.int32)
    scores = jax.device_put(ActionScores(MASK[:, :2], credit_A, path_CS))
    advantage, _, _ = compute_advantages(GRPO, scores, jax.device_put(np.float32(0.1)))
    np.testing.assert_array_equal(jax.device_get(advantage), [[1, 1], [0.5, 0]])


@pytest.mark.parametrize(
    ("estimator", "penalty"), [("k1", 0.05), ("k2", 0.0125), ("k3", 0.0106531)]
)
def test_the_penalty_uses_the_selected_estimator(estimator, penalty):
    """A tenth of the estimate of the first token: 0.5, 0.5^2 / 2 and exp(-0.5) - 1 + 0.5."""
    objective = Objective(advantage="gae", lam=0.0, kl=KL("reward", estimator))
    advantage, _, _ = targets_of(objective, np.zeros((2, 3), np.float32))
    np.testing.assert_allclose(advantage[0, 0], -penalty, rtol=1e-5)


def test_conversation_gae_equals_its_recursion_in_float64():
    """A conversation of two turns, and a turn whose predecessor is not trained."""
    first = Turn(0, "planner", (1, 2), (3, 4), credit=0.5)
    second = Turn(1, "planner", first.context() + (9, 9), (6, 7, 8), previous=0, credit=-1.0)
    other = Turn(2, "planner", (5,), (6,), previous=7, credit=2.0)
    objective = dataclasses.replace(
        PPO, gae_span="conversation", advantage="gae", kl=KL("none"), gamma=0.9, lam=0.8
    )
    policy = prepared(objective, PPO_ADAM)
    data = minibatches(policy, [first, second, other])
    scores = update_module.score_actions(policy, data)
    values = np.linspace(-1, 2, scores.mask_AT.size, dtype=np.float32)
    scores = scores._replace(value_AT=values.reshape(scores.mask_AT.shape))
    _, advantage_AT, _ = update_module.compute_targets(policy, data, scores)
    row = {node: a for a, node in enumerate(data.actions.node_A.tolist())}
    value = [*scores.value_AT[row[0], :2], *scores.value_AT[row[1], :3]]
    reward, expected, advantage = [0, 0.5, 0, 0, -1.0], [], 0.0
    for t in reversed(range(5)):
        after = float(value[t + 1]) if t < 4 else 0.0
        advantage = reward[t] + 0.9 * after - float(value[t]) + 0.9 * 0.8 * advantage
        expected.insert(0, advantage)
    np.testing.assert_allclose(advantage_AT[row[0], :2], expected[:2], rtol=1e-5)
    np.testing.assert_allclose(advantage_AT[row[1], :3], expected[2:], rtol=1e-5)
    alone = 2.0 - scores.value_AT[row[2], 0]
    np.testing.assert_allclose(advantage_AT[row[2], :1], alone, rtol=1e-5)


@pytest.mark.parametrize(
    ("epochs", "metrics", "actions", "expected"),
    [
        (2, {"kl/mean": 1.0, "kl/loss": 9.0}, 6, 0.1 * (1 + (2.5 / 3 - 1) * 6 / 60)),
        (1, {"kl/mean": 9.0, "kl/loss": 1.4}, 6, 0.1 * (1 + (3.5 / 3 - 1) * 6 / 60)),
        (2, {"kl/mean": 0.0}, 600, 0.05),  # the floor
        (2, {"kl/mean": 99.0}, 6000, 0.25),  # the ceiling
    ],
)
def test_a_kl_coefficient_adapts_to_nats_per_action(epochs, metrics, actions, expected):
    """Actions have 2.5 tokens, the target is 3; scores before the update have priority."""
    policy = prepared(STEERED, Optimizer(0.1, epochs=epochs))
    metrics = metrics | {"response_length/mean": 2.5}
    adapted = update_module._adapt_kl(policy, metrics, actions)
    actual = jax.device_get(adapted.state.kl_coefficient)
    np.testing.assert_allclose(actual, expected, rtol=1e-6)


def test_step_metrics_are_means_and_action_metrics_overall_and_per_role():
    step = {"tokens": 4.0, "clipped": 1.0, "entropy": 6.0, "kl": 2.0, "grad_norm": 1.0}
    other = {"tokens": 12.0, "clipped": 3.0, "entropy": 2.0, "kl": 6.0, "grad_norm": 2.0}
    actual = update_module._step_metrics([step | {"skipped": 1.0}, other | {"skipped": 0.0}])
    expected = {"clip_frac": 0.25, "entropy": 0.5, "kl/loss": 0.5, "grad_norm": 1.5, "skipped": 1.0}
    assert actual == expected
    # An action of two tokens and one of a single token, of two roles.
    zero = np.zeros(2, np.int32)
    actions = Actions(zero, np.array([0, 1]), zero, zero, np.array([2, 1]), zero, zero)
    mask_AT = np.array([[True, True], [True, False]])
    logp_AT = np.array([[-1.0, -2.0], [-3.0, 9.0]], np.float32)
    scores = ActionScores(
        *(mask_AT, zero, zero[:, None], logp_AT),
        ref_logp_AT=logp_AT - 1,
        behaviour_logp_AT=logp_AT + np.array([[0.5, -0.25], [0, 9]], np.float32),
    )
    advantage_AT = np.array([[1.0, 2.0], [6.0, 9.0]])
    metrics = update_module.action_metrics(ROLES, actions, scores, advantage_AT)
    assert metrics["kl/mean"] == metrics["kl/planner"] == metrics["kl/executor"] == 1.0
    assert metrics["sampler_gap/max"] == 0.5
    assert (metrics["advantage/mean"], metrics["advantage/planner"]) == (3.0, 1.5)
    assert (metrics["advantage/executor"], metrics["advantage/std/executor"]) == (6.0, 0.0)
    assert metrics["advantage/std/planner"] == 0.5 and metrics["advantage/std"] == 14**0.5 / 3**0.5
    assert metrics["response_length/mean"] == 1.5
    assert (metrics["response_length/planner"], metrics["response_length/executor"]) == (2.0, 1.0)


def test_a_mesh_takes_the_same_step_and_resumes(tmp_path):
    mesh, adam = make_mesh((1, 2, 1), jax.devices()[:2]), Optimizer(0.1)
    decoder = random_decoder(DEEP, mesh=mesh)
    policy, metrics = run(prepared(STEERED, adam, decoder))
    # No KL yet: 6 actions of a horizon of 60, at the largest relative error of a fifth.
    adapted = float(policy.state.kl_coefficient)
    np.testing.assert_allclose(adapted, 0.1 * (1 - 0.2 * 6 / 60), rtol=1e-6)
    assert abs(metrics["kl/coefficient"] - 0.1) < 1e-6 and metrics["flops"] > 0
    first_moment = policy.state.policy.opt_state[1][0].mu["embed"][...]
    assert first_moment.addressable_shards[0].data.shape == (12, 2)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, policy.state, {})
    restored, _ = checkpoints.restore(1, prepared(STEERED, adam, decoder).state)
    checkpoints.close()
    resumed, _ = run(policy._replace(state=restored))
    single, _ = run(run(prepared(STEERED, adam, deep()))[0])
    actual, expected = (jax.tree.leaves(jax.device_get(p.state)) for p in (resumed, single))
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_on_a_mesh_all_steps_share_one_gradient_program(caplog):
    """An optimizer step returns equal shardings with another spelling."""
    mesh = make_mesh((1, 2, 1), jax.devices()[:2])
    objective = dataclasses.replace(STEERED, entropy_coefficient=0.03)  # no other test's program
    policy = prepared(objective, Optimizer(0.1, epochs=2), random_decoder(DEEP, mesh=mesh))
    assert compilations("gradient", caplog, lambda: run(policy)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("adapted", [False, True])
def test_committed_weights_are_compiled_for_once(adapted, caplog):
    """Weights of a folder are committed; a new value head, moments or adapter would become so with
    the first step only, which would need a second program of each kind."""
    base = Decoder.from_params(DEEP, jax.device_put(deep().params(), jax.devices()[0]))
    lora = LoRAConfig(2, 4.0, ("q_proj",))
    decoder = add_lora(base, lora, rngs=nnx.Rngs(1)) if adapted else base
    objective = dataclasses.replace(PPO, entropy_coefficient=0.04)  # no other test's program
    policy, _ = run(prepared(objective, Optimizer(0.1, 0.2), decoder))
    assert compilations("score", caplog, lambda: run(policy)) == 0
    assert not [f for f in ("gradient", "apply") if f"compilation of jit({f})" in caplog.text]


def test_a_reference_shares_the_initial_arrays_which_an_update_leaves_unchanged():
    decoder = bigram(3)
    before = jax.device_get(decoder.params())
    for objective, optimizer in ((PPO, PPO_ADAM), (GRPO, GRPO_ADAM)):
        policy = prepared(objective, optimizer, decoder)
        own, others = jax.tree.leaves(decoder.params()), jax.tree.leaves(policy.state.reference)
        assert {id(x) for x in own} == {id(x) for x in others}
        assert not {id(x) for x in own} & {id(x) for x in jax.tree.leaves(policy.state.policy)}
        run(policy)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(decoder.params()), before)


@pytest.mark.parametrize("critic", ["own", "shared"])
@pytest.mark.parametrize("adapted", [False, True])
def test_a_bfloat16_reference_scores_like_float32(critic, adapted):
    """The scores are bitwise equal."""
    config = dataclasses.replace(DEEP, hidden_size=64, head_dim=16, qkv_bias=True)
    decoder, rng = random_decoder(config), np.random.default_rng(5)
    for norm in ("attn_norm", "mlp_norm", "q_norm", "k_norm"):  # all ones, exact in any dtype
        shape = decoder.layers[norm].shape
        decoder.layers[norm] = nnx.Param(
            jax.device_put(rng.normal(1, 0.1, shape).astype(np.float32))
        )
    if adapted:
        decoder = add_lora(decoder, LoRAConfig(2, 4.0, ("q_proj",)), rngs=nnx.Rngs(1))
    objective = dataclasses.replace(PPO, critic=critic)
    policy = prepared(objective, PPO_ADAM, decoder, compute="bfloat16")
    reference_params, params = policy.state.reference, policy.state.policy.params
    flat = by_path(reference_params)
    half = {name for name, x in flat.items() if x.dtype == jax.numpy.bfloat16}
    wide = {name for name in flat if "_norm" in name or name.startswith("head/")}
    assert half == by_path(params).keys() - wide and len(half) >= 2
    (batch,) = lay_out(group_turns(turns(), LAYOUT), ROLES, LAYOUT)
    rows, heat = jax.device_put((batch.rows, np.float32(HEAT)))
    one, other = (
        score(policy.spec.policy.with_params(x), rows, heat).logp_RM
        for x in (reference_params, params)
    )
    assert np.abs(one).max() > 1
    np.testing.assert_array_equal(one, other)


def test_a_restored_float32_reference_is_cast(tmp_path):
    state = prepared(STEERED, Optimizer(0.1), deep(), compute="bfloat16").state
    moved = jax.tree.map(lambda x: x * np.float32(1.1), state.policy.params)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state._replace(reference=moved), {})
    restored, _ = checkpoints.restore(1, state)
    checkpoints.close()
    expected = jax.tree.map(lambda x, like: x.astype(like.dtype), moved, state.reference)
    for x, y in zip(*map(jax.tree.leaves, (restored.reference, expected)), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(*jax.device_get((x, y)))


def test_only_adapters_are_trained_and_saved_of_policy_and_critic():
    base = nnx.merge(*tiny_policy())
    adapted = add_lora(base, LoRAConfig(2, 4.0, ("q_proj", "down_proj")), rngs=nnx.Rngs(1))
    objective = dataclasses.replace(
        GRPO, kl=KL("reward"), loss="clipped_policy_loss", entropy_coefficient=0.0
    )
    policy = prepared(objective, Optimizer(0.01, epochs=2), adapted)
    saved = by_path(policy.state)
    assert all("lora" in name or "count" in name or "kl_coeff" in name for name in saved)
    assert sum(x.size for x in saved.values()) < 5 * sum(
        x.size for x in jax.tree.leaves(policy.state.policy.params)
    )
    before = jax.device_get((base.params(), policy.state.policy.params))
    policy, metrics = run(policy)
    assert metrics["kl/mean"] == 0.0  # a new adapter changes no output
    after = jax.device_get((base.params(), policy.state.policy.params))
    jax.tree.map(np.testing.assert_array_equal, after[0], before[0])
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), after[1], before[1])
    assert max(jax.tree.leaves(moved)) > 1e-3
    decoder = sampling_model(policy).merge()
    assert decoder.adapter is not None and decoder.embed[...] is base.embed[...]
    base = nnx.merge(*tiny_policy())
    adapted = add_lora(base, LoRAConfig(2, 4.0, ("q_proj",)), rngs=nnx.Rngs(1))
    policy = prepared(PPO, PPO_ADAM, adapted)
    params = policy.state.critic.params
    names = {name.split("/")[-2] for name in by_path(params)}
    assert names == {"q_proj_lora_a", "q_proj_lora_b", "kernel", "bias"}
    trunk = policy.spec.critic.with_params(params).merge().trunk
    assert trunk.embed[...] is base.embed[...]


def test_the_compute_dtype_leaves_weights_in_float32():
    policy = prepared(GRPO, GRPO_ADAM, compute="bfloat16", remat="full")
    sampling, trained = sampling_model(policy).merge(), trained_decoder(policy)
    assert (sampling.config.dtype, sampling.config.remat) == ("bfloat16", "full")
    assert sampling.embed[...].dtype == jax.numpy.bfloat16
    assert trained.embed[...] is policy.state.policy.params["embed"][...]
    policy, _ = run(policy)
    dtypes = {x.dtype for x in jax.tree.leaves(policy.state.policy)}
    assert dtypes == {np.dtype(np.float32), np.dtype(np.int32)}


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Objective(loss="tight"), "loss is 'tight': use one of clipped_policy_loss, dual_"),
        # A function of the module for another purpose, and one that is private.
        (lambda: Objective(loss="truncated_importance_weight"), "use one of clipped_policy_loss"),
        (lambda: Objective(loss="_ratio"), "use one of clipped_policy_loss"),
        *(
            (lambda name=name: Objective(**{name: "two"}), f"{name} is 'two'")
            for name in ("critic", "value_loss", "aggregation", "gae_span")
        ),
        (
            lambda: Objective(critic="none", advantage="best"),
            "advantage is 'best': use one of group",
        ),
        (lambda: Objective(advantage="group_centred"), "'own': .* use gae or whitened_gae"),
        (lambda: Objective(critic="none"), "'none': .* use a group rule"),
        (lambda: dataclasses.replace(GRPO, gae_span="conversation"), "without a critic"),
        (lambda: KL("everywhere"), "kl.where is 'everywhere'"),
        (lambda: KL(estimator="k4"), "kl.estimator is 'k4'"),
        (lambda: KL("loss", "k1"), "no effect: use k2 or k3"),
        (lambda: Optimizer(0.1, schedule="step"), "schedule is 'step'"),
        (lambda: Optimizer(0.1, moment_dtype="half"), "moment_dtype is 'half': use one of float32"),
        (lambda: Layout((1024, 512)), r"lengths is \(1024, 512\) .* lengths must ascend"),
        (lambda: prepared(PPO, Optimizer(0.1)), "value_lr is 0"),
        (lambda: prepared(PPO, PPO_ADAM, remat="some"), "remat is 'some'"),
    ],
)
def test_an_unknown_choice_is_refused_by_name(build, message):
    with pytest.raises(UserError, match=message):
        build()
