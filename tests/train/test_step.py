from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_ragrl.batch import Group, Layout, Rows, grouped_mask, lay_out
from jax_ragrl.models.heads import Critic
from jax_ragrl.train.ppo import PPO, prepare, token_weights
from jax_ragrl.train.step import Targets, assess, policy_gradient, ppo_targets, score
from tests.tiny import policy

LAYOUT = Layout(lengths=(32, 48), tokens=96, siblings=2, action=8)
RNG = np.random.default_rng(1)


def ids(n: int) -> tuple[int, ...]:
    return tuple(RNG.integers(3, 250, n).tolist())


def groups() -> list[Group]:
    return [
        Group(ids(9), (0, 1), (ids(4), ids(8)), "a"),
        Group(ids(20), (2,), (ids(6),), "b"),
        Group(ids(30), (3, 4), (ids(1), ids(7)), "a"),
    ]


def logps_by_node(batches: list[Rows], heat: float = 1.0) -> dict[int, np.ndarray]:
    temperature = jax.device_put(np.float32(heat))
    out = {}
    for rows in batches:
        scores = jax.device_get(score(*policy(), jax.device_put(rows), temperature))
        for node, row, mask in zip(rows.node_A, scores, rows.mask_AT, strict=True):
            if node >= 0:
                out[int(node)] = row[mask]
    return out


def test_grouped_rows_score_like_rows_of_one_action():
    together = groups()
    alone = [
        Group(g.prompt, (node,), (action,), g.role)
        for g in together
        for node, action in zip(g.nodes, g.actions, strict=True)
    ]
    grouped = logps_by_node(lay_out(together, ["a", "b"], LAYOUT))
    single = logps_by_node(lay_out(alone, ["a", "b"], LAYOUT))
    assert grouped.keys() == single.keys() == {0, 1, 2, 3, 4}
    for node in grouped:
        np.testing.assert_allclose(grouped[node], single[node], atol=1e-5)


def targets_of(rows: Rows, weight: np.ndarray | None = None) -> Targets:
    ones = rows.mask_AT.astype(np.float32)
    old = RNG.normal(size=ones.shape).astype(np.float32) - 3
    weight = ones if weight is None else weight
    return Targets(old, ones, 0 * ones, ones, weight)


def test_gradients_reach_no_prompt_and_no_padding_token():
    """The loss reads nothing but action tokens: other targets may be anything, nan included."""
    (rows,) = lay_out(groups()[:1], ["a", "b"], LAYOUT)
    targets = targets_of(rows)
    heat = jax.device_put(np.float32(1.0))
    clean, _ = policy_gradient(
        *policy(), jax.device_put(rows), jax.device_put(targets), heat, eps=0.2
    )
    dirty = Targets(*(np.where(rows.mask_AT, x, np.nan) for x in targets))
    dirty = dirty._replace(weight_AT=targets.weight_AT)
    target_AT = np.where(rows.mask_AT, rows.target_AT, 7)
    spoiled, _ = policy_gradient(
        *policy(),
        jax.device_put(rows._replace(target_AT=target_AT)),
        jax.device_put(dirty),
        heat,
        eps=0.2,
    )
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b), clean, spoiled)


def test_only_positions_before_an_action_token_carry_gradient():
    """Gradient of the loss with respect to every input embedding row stops at the last source."""
    (rows,) = lay_out(groups()[:1], ["a", "b"], LAYOUT)
    last = int(rows.source_AT[rows.mask_AT].max())
    longer = rows.ids_RL.copy()
    longer[0, last + 2 :] = 5  # what stands after the last token of the last action is padding
    before = logps_by_node([rows])
    after = logps_by_node([rows._replace(ids_RL=longer)])
    for node in before:
        np.testing.assert_array_equal(before[node], after[node])


def test_siblings_do_not_see_each_other():
    segments = jnp.array([[1, 1, 2, 2, 3, 3, 0]])
    mask = np.asarray(grouped_mask(segments))[0]
    assert mask[4].tolist() == [True, True, False, False, True, False, False]
    assert mask[6].tolist() == [False] * 6 + [True]


def test_accumulated_gradients_equal_one_batch():
    small = Layout(lengths=(48,), tokens=48, siblings=2, action=8)
    large = Layout(lengths=(48,), tokens=144, siblings=2, action=8)
    heat = jax.device_put(np.float32(1.0))
    made = groups()

    def total(layout: Layout) -> list[np.ndarray]:
        grads = None
        for rows in lay_out(made, ["a", "b"], layout):
            ones = rows.mask_AT.astype(np.float32)
            targets = Targets(-3 * ones, ones, ones, ones, ones / 26)
            grad, _ = policy_gradient(
                *policy(), jax.device_put(rows), jax.device_put(targets), heat, eps=0.2
            )
            grads = grad if grads is None else jax.tree.map(np.add, grads, grad)
        return jax.tree.leaves(grads)

    for a, b in zip(total(small), total(large), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_role_weights_sum_to_the_role_sum_of_means():
    graph, params = policy()
    model = nnx.merge(graph, params)
    layout = Layout(lengths=(32, 48), tokens=48, siblings=2, action=8)
    trainer, _ = prepare(model, PPO(1e-3, 1e-3), layout, ["a", "b"], 1.0, 1)
    part = lay_out(groups(), ["a", "b"], layout)
    weights = token_weights([jax.device_put(r) for r in part], trainer)
    values = [RNG.normal(size=r.mask_AT.shape).astype(np.float32) for r in part]
    weighted = sum(float((v * w).sum()) for v, w in zip(values, weights, strict=True))
    x = np.concatenate(values)
    role = np.concatenate([np.broadcast_to(r.role_A[:, None], r.mask_AT.shape) for r in part])
    mask = np.concatenate([r.mask_AT for r in part])
    expected = sum(x[mask & (role == z)].mean(dtype=np.float64) for z in range(2))
    np.testing.assert_allclose(weighted, expected, rtol=1e-5)


def test_targets_put_the_credit_on_the_last_token_and_the_kl_on_all():
    logp = np.array([[-1.0, -2.0, 0.0], [-1.0, 9.0, 9.0]], np.float32)
    ref = np.array([[-1.5, -2.5, 0.0], [-1.0, 7.0, 7.0]], np.float32)
    mask = np.array([[True, True, False], [True, False, False]])
    zero = np.zeros_like(logp)
    credit = np.array([1.0, 0.5], np.float32)
    targets = ppo_targets(
        *jax.device_put((logp, ref, zero, credit, mask, zero, np.float32(0.1))),
        gamma=1.0,
        lam=1.0,
        whitened=False,
    )
    # rewards: row 0: -0.05, then -0.05 + 1; row 1: 0.5 - 0
    np.testing.assert_allclose(targets.return_AT, [[0.9, 0.95, 0], [0.5, 0, 0]], atol=1e-6)


def test_a_new_critic_values_everything_at_zero():
    graph, params = policy()
    critic = nnx.split(Critic.from_policy(nnx.merge(graph, params)), nnx.Param)
    (rows,) = lay_out(groups()[:1], ["a", "b"], LAYOUT)
    assert not np.any(assess(*critic, jax.device_put(rows)))
