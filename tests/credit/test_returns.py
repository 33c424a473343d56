import itertools

import jax
import numpy as np
import pytest

from jax_ragrl.credit.returns import gae, gae_over_turns, mean_of_children, monte_carlo


def values_of(parents, leaf, reward, weight, rule=monte_carlo) -> tuple[np.ndarray, np.ndarray]:
    arrays = (
        np.array(parents, np.int32),
        np.array(leaf, bool),
        np.array(reward, np.float32),
        np.array(weight, np.float32),
    )
    return jax.device_get(jax.jit(rule)(*jax.device_put(arrays)))


def reference(parents, leaf, reward, weight):
    """Eq. 5 by recursion, in float64: the return of each path to a leaf, with its weight."""
    children = [[c for c in range(len(parents)) if parents[c] == n] for n in range(len(parents))]

    def below(n: int) -> list[tuple[float, float]]:
        own = float(reward[n])
        deeper = [(weight[c] * w, own + r) for c in children[n] for w, r in below(c)]
        return [(1.0, own)] + deeper if leaf[n] else deeper

    actual = [below(n) for n in range(len(parents))]
    weights = [sum(w for w, _ in leaves) for leaves in actual]
    totals = [sum(w * r for w, r in leaves) for leaves in actual]
    return [t / w if w else 0.0 for t, w in zip(totals, weights, strict=True)], weights


def random_forest(rng: np.random.Generator, count: int):
    """A random tree, parents before children; some end nodes are not leaves; weights 0.5 to 1.5."""
    parents = [int(rng.integers(-1, n)) if n else -1 for n in range(count)]
    ends = set(range(count)) - set(parents)
    leaf = [n in ends and rng.random() < 0.7 for n in range(count)]
    reward = rng.integers(-1, 2, count) / 2
    reward[[n in ends and not leaf[n] for n in range(count)]] = np.nan  # never read
    return parents, leaf, reward, rng.integers(1, 4, count) / 2


@pytest.mark.parametrize("seed", range(12))
def test_monte_carlo_equals_a_recursive_reference(seed):
    rng = np.random.default_rng(seed)
    forest = random_forest(rng, (1, 2, 7, 40)[seed % 4])
    value_N, weight_N = values_of(*forest)
    expected, weights = reference(*forest)
    np.testing.assert_allclose(value_N, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(weight_N, weights, rtol=1e-5)


def child_reference(n: int, parents, leaf, reward, weight) -> float | None:
    """The value of a node by recursion; None without a leaf below it."""
    children = [c for c in range(len(parents)) if parents[c] == n]
    values = {c: child_reference(c, parents, leaf, reward, weight) for c in children}
    counted = {c: value for c, value in values.items() if value is not None}
    if not counted:
        return float(reward[n]) if leaf[n] else None
    total = sum(weight[c] for c in counted)
    return float(reward[n]) + sum(weight[c] * value for c, value in counted.items()) / total


def test_the_mean_over_children_equals_a_recursive_reference():
    rng = np.random.default_rng(5)
    for _ in range(6):
        parents, leaf, reward, weight = random_forest(rng, 24)
        value_N, reached_N = values_of(parents, leaf, reward, weight, mean_of_children)
        for n in range(24):
            expected = child_reference(n, parents, leaf, reward, weight)
            assert reached_N[n] == (expected is not None)
            assert value_N[n] == pytest.approx(expected or 0.0, abs=1e-5)


def toy_tree(good: tuple[bool, bool]):
    """An action (0) before two others; below a good one are two leaves of 1, else one of 0."""
    parents, leaf, reward = [-1], [False], [0.0]
    for is_good in good:
        action = len(parents)
        leaves = 2 if is_good else 1
        parents += [0] + [action] * leaves
        leaf += [False] + [True] * leaves
        reward += [0.0] + [float(is_good)] * leaves
    return parents, leaf, reward, [1.0] * len(parents)


def test_only_the_mean_over_children_is_unbiased_on_trees_of_unequal_width():
    """The four trees are equally likely and the expected reward is 1/2; eq. 5 gives 7/12."""
    trees = [toy_tree(good) for good in itertools.product((True, False), repeat=2)]
    means = {
        rule: np.mean([values_of(*tree, rule)[0][0] for tree in trees])
        for rule in (monte_carlo, mean_of_children)
    }
    assert means[monte_carlo] == pytest.approx(7 / 12) and means[mean_of_children] == 0.5


def test_padding_nodes_change_nothing():
    forest = random_forest(np.random.default_rng(3), 20)
    parents, leaf, reward, weight = forest
    padded = ([*parents, -1, -1], [*leaf, False, False], [*reward, 7.0, 7.0], [*weight, 0.0, 0.0])
    for plain, longer in zip(values_of(*forest), values_of(*padded), strict=True):
        np.testing.assert_array_equal(longer[:20], plain)
        assert not longer[20:].any()


def gae_reference(reward, value, gamma, lam):
    """Eq. 16 by recursion, in float64."""
    if not len(reward):
        return []
    rest = gae_reference(reward[1:], value[1:], gamma, lam)
    after = value[1] if len(value) > 1 else 0.0
    delta = reward[0] + gamma * after - value[0]
    return [delta + gamma * lam * (rest[0] if rest else 0.0), *rest]


def advantages(reward, value, mask, **options) -> np.ndarray:
    arrays = (np.array(reward, np.float32), np.array(value, np.float32), np.array(mask))
    return jax.device_get(jax.jit(lambda *a: gae(*a, **options))(*jax.device_put(arrays)))


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.5), (1.0, 1.0), (0.97, 0.0)])
@pytest.mark.parametrize(
    "mask",
    [
        [True],
        [True] * 9,
        [True, True, True, False, False],  # padding
        [True, False, True],
        [True, True, False, False, True, False, True, True, False],
        [False, True, False, True],
        [False, False],
    ],
)
def test_gae_equals_a_recursive_reference_without_the_observations_between_turns(mask, gamma, lam):
    rng = np.random.default_rng(len(mask))
    kept_N = np.array(mask)
    reward, value = rng.normal(size=(2, len(mask)))
    expected = np.zeros(len(mask))
    own = gae_reference(reward[kept_N].tolist(), value[kept_N].tolist(), gamma, lam)
    expected[kept_N] = own
    reward[~kept_N], value[~kept_N] = np.nan, np.inf
    actual = advantages(reward, value, mask, gamma=gamma, lam=lam)
    np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=1e-5)


def test_gae_over_turns_is_the_mean_over_conversations():
    """Turns 1 and 2 continue turn 0, turn 3 is alone, row 4 is padding; reference in float64."""
    rng = np.random.default_rng(0)
    mask = np.arange(4)[None] < np.array([3, 4, 1, 2, 0])[:, None]
    reward, value = np.where(mask, rng.normal(size=(2, 5, 4)), np.nan)
    paths = np.array([[0, 1], [0, 2], [3, -1], [-1, -1]], np.int32)
    expected, times = np.zeros((5, 4)), np.zeros(5)
    for path in ([0, 1], [0, 2], [3]):
        kept_N = [(a, t) for a in path for t in range(4) if mask[a, t]]
        along = gae_reference(*([x[at] for at in kept_N] for x in (reward, value)), 0.9, 0.7)
        for at, x in zip(kept_N, along, strict=True):
            expected[at] += x
        times[path] += 1
    expected /= np.maximum(times, 1)[:, None]
    arrays = (*np.float32((reward, value)), mask, paths)
    actual = jax.jit(lambda *a: gae_over_turns(*a, gamma=0.9, lam=0.7))(*jax.device_put(arrays))
    np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=1e-5)


def test_padding_never_reaches_the_gradient_of_gae():
    value_T = jax.device_put(np.array([0.5, np.nan, 0.25, np.inf], np.float32))
    reward_T = jax.device_put(np.array([1.0, np.nan, 1.0, np.nan], np.float32))
    mask_T = jax.device_put(np.array([True, False, True, False]))
    grads = jax.grad(lambda r, v: gae(r, v, mask_T, lam=0.5)[0], (0, 1))(reward_T, value_T)
    # A_0 = r_0 + V_2 - V_0 + (r_2 - V_2) / 2
    np.testing.assert_array_equal(grads, [[1.0, 0.0, 0.5, 0.0], [-1.0, 0.0, 0.5, 0.0]])
