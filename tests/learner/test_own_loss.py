"""Losses and group rules of a user: those of the page *Algorithms* against loops in float64."""

import dataclasses
import random
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ragrl.errors import UserError
from jax_ragrl.learner.objective import KL, Objective
from jax_ragrl.learner.packing import group_turns
from jax_ragrl.learner.update import update
from jax_ragrl.runtime.sharding import make_mesh
from tests.conftest import REPO
from tests.docs.pages import PYTHON, blocks
from tests.jobs import config_job
from tests.learner import reference
from tests.learner.bigram import CONFIG, GRPO_ADAM, HEAT, LAYOUT, named, prepared, random_decoder
from tests.learner.test_update import turns

OWN = Objective(critic="none", advantage="group_centred", kl=KL("none"), eps_low=0.1, eps_high=0.3)


@pytest.fixture(autouse=True)
def own_losses(tmp_path, monkeypatch):
    """The module `own_losses` of the page."""
    (block,) = blocks(REPO / "docs" / "algorithms.md", PYTHON)
    (tmp_path / "own_losses.py").write_text(block.text)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("own_losses", None)


# Each loss gets log-probabilities of tokens: those to differentiate, those before the update, and
# constants, those before the step; and the credit and the turn of each token.


def cispo(logp, old, now, credit, turn):
    """J = 1 / sum_i |o_i| sum_i sum_t sg(clip(r_it)) A_i log pi_it."""
    return -np.mean(np.clip(np.exp(now - old), 0.9, 1.3) * credit * logp)


def gspo(logp, old, now, credit, turn):
    """J = 1/G sum_i min(s_i A_i, clip(s_i) A_i), s_i = (pi(o_i) / pi_old(o_i))^(1/|o_i|)."""
    sizes = np.bincount(turn)
    ratio, credit = np.exp(np.bincount(turn, logp - old) / sizes), np.bincount(turn, credit) / sizes
    return -np.mean(np.minimum(ratio * credit, np.clip(ratio, 0.9, 1.3) * credit))


def dr_grpo(logp, old, now, credit, turn):
    """J = 1/G sum_i 1/L sum_t min(r_it A_i, clip(r_it) A_i), with a constant L."""
    ratio = np.exp(logp - old)
    gain = np.minimum(ratio * credit, np.clip(ratio, 0.9, 1.3) * credit)
    return -gain.sum() / 512 / (turn.max() + 1)


@pytest.mark.slow
@pytest.mark.parametrize("epochs", [1, 3])
@pytest.mark.parametrize(
    ("loss", "aggregation"),
    [(cispo, "token_mean"), (gspo, "sequence_mean"), (dr_grpo, "sequence_mean")],
)
def test_the_losses_of_the_page_equal_their_papers(loss, aggregation, epochs):
    """Mean loss and parameters after an update, with gradients by central differences."""
    own = f"own_losses:{loss.__name__}"
    objective = dataclasses.replace(OWN, loss=own, aggregation=aggregation)
    optimizer = dataclasses.replace(GRPO_ADAM, policy_lr=0.03, epochs=epochs)
    policy, samples = prepared(objective, optimizer), turns()
    params, adam = named(policy.state.policy.params), reference.Adam(optimizer, 0.03, epochs)
    tokens = reference.Tokens.of(samples)
    credit = np.array([samples[i].credit for i in tokens.turn])
    old, losses = reference.logps(params, tokens, HEAT)[0], []
    for _ in range(epochs):

        def of(p, now=None):
            logp = reference.logps(p, tokens, HEAT)[0]
            return float(loss(logp, old, logp if now is None else now, credit, tokens.turn))

        losses.append(of(params))
        now = reference.logps(params, tokens, HEAT)[0]
        params = adam.step(params, reference.difference(lambda p, now=now: of(p, now), params))
    policy, metrics = update(policy, group_turns(samples, LAYOUT), random.Random(0))
    np.testing.assert_allclose(metrics["loss/policy"], np.mean(losses), rtol=1e-4, atol=1e-6)
    assert (metrics["clip_frac"] > 0.1) == (epochs > 1)  # of the tokens
    for name, x in named(policy.state.policy.params).items():
        np.testing.assert_allclose(x, params[name], atol=3e-5, err_msg=name)


def test_the_ratio_of_an_action_is_the_same_on_a_mesh():
    objective = dataclasses.replace(OWN, loss="own_losses:gspo", aggregation="sequence_mean")
    results = []
    for mesh in (None, make_mesh((2, 1, 1), jax.devices()[:2])):
        policy = prepared(objective, GRPO_ADAM, random_decoder(CONFIG, mesh=mesh))
        policy, _ = update(policy, group_turns(turns(), LAYOUT), random.Random(0))
        results.append(named(policy.state.policy.params))
    for name, x in results[0].items():
        np.testing.assert_allclose(results[1][name], x, atol=1e-4, err_msg=name)


def test_padding_reaches_neither_an_own_loss_nor_its_gradient():
    objective = dataclasses.replace(OWN, loss="own_losses:cispo")
    arrays = np.float32([[-1.0, np.nan], [-1.5, np.inf], [2.0, -np.inf]])
    logp, old, advantage, mask = jax.device_put((*arrays, np.array([True, False])))
    total = lambda logp: objective.policy_loss(  # noqa: E731
        mask, logp=logp, old_logp=old, advantage=advantage
    ).sum()
    loss, grad = jax.value_and_grad(total)(logp)
    np.testing.assert_allclose(loss, 1.3 * 2, rtol=1e-6)
    np.testing.assert_allclose(grad, [-1.3 * 2, 0.0], rtol=1e-6)


def test_a_config_names_own_functions_by_their_module():
    names = {"loss": "own_losses:cispo", "advantage": "own_losses:median_centred"}
    job = config_job("tiny/coda", {f"objective.{key}": name for key, name in names.items()})
    rule = job.credit.keywords["rule"]
    assert rule.__module__ == "own_losses" and rule(np.array([1.0, 0, 0])).tolist() == [1, 0, 0]


def with_a_typo(logp, old_lop):
    return logp - old_lop


def one_number(logp):
    return jnp.sum(logp)


def whole_numbers(logp):
    return (logp > 0).astype(jnp.int32)


def infinite(advantage, logp):
    return logp * jnp.sqrt(advantage - 1.0)


def infinite_gradient(logp, old_logp):
    return jnp.sqrt(jnp.abs(logp - old_logp))


def failing(logp):
    return logp + jnp.zeros(7)


def normalised(reward_K):
    return (reward_K - reward_K.mean()) / reward_K.std()


def best(reward_K):
    return reward_K.max()


def of_two(reward_K, group_K):
    return reward_K


HERE = "tests.learner.test_own_loss"


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("loss", "no_such_module:f", "use one of clipped_.* one of your own .No module named"),
        ("loss", f"{HERE}:no_such_loss", "has no attribute 'no_such_loss'"),
        ("loss", f"{HERE}:HERE", "'.* is not a callable object"),
        ("loss", f"{HERE}:with_a_typo", "parameter old_lop nothing has a value for: .* old_logp"),
        ("loss", f"{HERE}:one_number", r"returns float32 of shape \(\) for .*a float32 per token"),
        ("loss", f"{HERE}:whole_numbers", "returns int32"),
        ("loss", f"{HERE}:infinite", "NaN or infinite .* before the arithmetic"),
        ("loss", f"{HERE}:infinite_gradient", "NaN or infinite"),
        ("loss", f"{HERE}:failing", r"it fails \(TypeError: .*compare it with a loss"),
        ("advantage", f"{HERE}:normalised", r"rewards \[1.0, 1.0\] it gives array\(\[nan"),
        ("advantage", f"{HERE}:best", "one finite number per reward"),
        ("advantage", f"{HERE}:of_two", "parameter group_K nothing has a value for"),
        ("advantage", "no_such_module:f", "use one of group_centred, group_normalised, above"),
    ],
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_an_unusable_function_is_refused(key, value, message):
    with pytest.raises(UserError, match=message) as error:
        dataclasses.replace(OWN, **{key: value})
    assert str(error.value).startswith(f"objective.{key} is '{value}'")
