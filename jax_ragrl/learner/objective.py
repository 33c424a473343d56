"""The training objective as a table of choices: which losses are minimized, not how.

`gradients.py` and `targets.py` read its fields. `GRPO`, `PPO` and plain policy gradients are
combinations of them, see `configs/`.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
from annotated_types import Gt
from jax import Array

from jax_ragrl.config.functions import named_function
from jax_ragrl.config.ranges import NotNegative, Positive, Probability, Share
from jax_ragrl.config.schema import one_of
from jax_ragrl.credit import advantages
from jax_ragrl.errors import UserError
from jax_ragrl.losses import policy
from jax_ragrl.types import Tensor

CRITICS = ("own", "shared", "none")
VALUE_LOSSES = ("clipped", "plain")
GAE_ADVANTAGES = ("gae", "whitened_gae")
SPANS = ("turn", "conversation")
# Places of the KL penalty.
PLACES = ("none", "reward", "terminal", "loss")
ESTIMATORS = ("k1", "k2", "k3")
AGGREGATIONS = ("token_mean", "sequence_mean", "role_sum")


@dataclasses.dataclass(frozen=True)
class KL:
    """Penalty on the KL divergence from a reference policy.

    Fields:
      where: place of the penalty. `reward`: each token pays its own; `terminal`: the last token of
        an action pays for all of them; `loss`: a term of the loss; `none`: there is no reference.
      estimator: `k1`, `k2` or `k3` (Schulman 2020, "Approximating KL divergence").
      coefficient: weight of the penalty; the initial weight if `target` is not 0.
      target: desired KL per action in nats, towards which the coefficient is adapted; 0: fixed.
      horizon: number of actions over which the coefficient adapts (Ziegler et al. 2019).
      min_coefficient, max_coefficient: bounds of the adapted coefficient; a maximum of 0 is none.
    """

    where: str = "reward"
    estimator: str = "k1"
    coefficient: NotNegative = 0.005
    target: NotNegative = 0.0
    horizon: Positive = 10000.0
    min_coefficient: NotNegative = 0.0
    max_coefficient: NotNegative = 0.0

    def __post_init__(self) -> None:
        one_of("objective.kl.where", self.where, PLACES)
        one_of("objective.kl.estimator", self.estimator, ESTIMATORS)
        if self.max_coefficient and self.max_coefficient < self.min_coefficient:
            raise UserError(
                f"objective.kl.max_coefficient is {self.max_coefficient}, below min_coefficient "
                f"{self.min_coefficient}: raise the one, lower the other, or set the maximum to 0"
            )
        # The gradient of k1 is that of the log-probability, whose mean is zero.
        if (self.where, self.estimator) == ("loss", "k1"):
            raise UserError(
                "kl.estimator is 'k1' in the loss, but the mean of its gradient is zero, so it has "
                "no effect: use k2 or k3, or kl.where='reward'"
            )


@dataclasses.dataclass(frozen=True)
class Objective:
    """The function that an update minimizes.

    Fields:
      loss: the policy loss per token: `clipped_policy_loss` (PPO), `dual_clipped_policy_loss` (PPO,
        with losses of negative advantages also bounded, by `dual_clip`), `policy_gradient_loss`
        (for one step on fresh samples only), or `module:function` for one of your own, see
        `losses/policy.py`.
      eps_low, eps_high: the probability ratio is clipped to `[1 - eps_low, 1 + eps_high]`.
      dual_clip: bound of `dual_clipped_policy_loss`, as a multiple of the advantage; above 1.
      importance_weight_cap: upper bound of the importance weights of rollouts that an older policy
        sampled; 0: all weights are 1.
      critic: `own` (a separate model), `shared` (a head on the policy's trunk), or `none`.
      value_loss: `clipped` (around the old value, by `value_clip`) or `plain`.
      value_clip: largest change of a value that the clipped loss rewards.
      value_coefficient: weight of the value loss of a shared critic.
      advantage: `gae` or `whitened_gae`: credit is a reward that the critic spreads over tokens;
        or the group rule that computes the credit, which then is the advantage of all tokens of
        the action: a function of `credit/advantages.py`, or `module:function`.
      gae_span: what GAE runs over. `turn`: each turn alone; its credit includes all later rewards.
        `conversation`: the turns that continue each other; credit is the immediate reward of each
        (`credit.assign.immediate_credit`). Observations between turns are skipped.
      gamma, lam: discount and lambda of GAE, per token.
      kl: penalty on the distance from the reference.
      entropy_coefficient: weight of the entropy bonus, per nat.
      aggregation: `token_mean`, `sequence_mean` (mean of each action's mean) or `role_sum` (sum of
        each role's token mean). The loss of an `own` critic is always a token mean.
      skip_zero_advantage: whether an update leaves out groups whose credits are all 0. The
        gradient is the same, because their advantages are 0 and nothing else is in the loss. If no
        group has a credit, there is no update: no optimizer moves the weights by its momentum.
    """

    loss: str = "clipped_policy_loss"
    eps_low: Probability = 0.2
    eps_high: Positive = 0.2
    dual_clip: Annotated[float, Gt(1)] = 3.0
    importance_weight_cap: NotNegative = 0.0
    critic: str = "own"
    value_loss: str = "clipped"
    value_clip: Positive = 0.2
    value_coefficient: NotNegative = 0.1
    advantage: str = "whitened_gae"
    gae_span: str = "turn"
    gamma: Share = 1.0
    lam: Share = 0.95
    kl: KL = KL()
    entropy_coefficient: NotNegative = 0.0
    aggregation: str = "token_mean"
    skip_zero_advantage: bool = False

    def __post_init__(self) -> None:
        one_of("objective.critic", self.critic, CRITICS)
        one_of("objective.value_loss", self.value_loss, VALUE_LOSSES)
        one_of("objective.gae_span", self.gae_span, SPANS)
        one_of("objective.aggregation", self.aggregation, AGGREGATIONS)
        # GAE needs values, and group rules compute advantages without them.
        if (self.group_rule is None) != (self.critic != "none"):
            options = "a group rule" if self.critic == "none" else " or ".join(GAE_ADVANTAGES)
            raise UserError(
                f"objective.advantage is {self.advantage!r} with critic {self.critic!r}: a critic "
                f"is for {' or '.join(GAE_ADVANTAGES)}; with this one use {options}"
            )
        if self.gae_span == "conversation" and self.critic == "none":
            raise UserError(
                "objective.gae_span is 'conversation' without a critic, but GAE needs values to "
                "carry credit from turn to turn: use a critic, or span 'turn'"
            )

        others = self.critic != "none" or self.kl.where != "none" or self.entropy_coefficient
        if self.skip_zero_advantage and others:
            raise UserError(
                "objective.skip_zero_advantage is set, but the loss has a critic, a KL penalty or "
                "an entropy bonus, which train on actions with advantage 0 too: set it to False"
            )

        self.reads()  # refuses an unknown loss
        if ":" in self.loss:
            _check_loss(self)
        if ":" in self.advantage:
            _check_rule(self)

    @property
    def _loss(self) -> Callable[..., Array]:
        inputs = (*policy.INPUTS, *(f.name for f in dataclasses.fields(self)))
        return named_function("objective.loss", self.loss, policy, inputs)

    @property
    def group_rule(self) -> Callable[[Tensor], Tensor] | None:
        """The function from the rewards of a group to its advantages; None for GAE."""
        if self.advantage in GAE_ADVANTAGES:
            return None
        return named_function("objective.advantage", self.advantage, advantages, ("reward_K",))

    def reads(self, *inputs: str) -> bool:
        """Whether the policy loss has a parameter with one of these names."""
        return not inspect.signature(self._loss).parameters.keys().isdisjoint(inputs)

    def policy_loss(self, mask: Array, **inputs: Array) -> Array:
        """Returns the policy loss per token, float32 and 0 where the bool `mask` is False.

        `inputs` are float32 arrays of the shape of the mask, by the names in
        `losses.policy.INPUTS`. Raises `UserError` if the loss has another shape or dtype.
        """
        # Masked first: a nan outside the mask times a zero cotangent would still be a nan.
        arrays = {name: jnp.where(mask, x, 0.0) for name, x in inputs.items()}
        values = vars(self) | arrays | {"mask": mask}
        names = inspect.signature(self._loss).parameters
        loss = self._loss(**{name: values[name] for name in names if name in values})
        if (jnp.shape(loss), jnp.result_type(loss)) != (mask.shape, jnp.float32):
            raise UserError(
                f"objective.loss is {self.loss!r}, which returns {jnp.result_type(loss)} of shape "
                f"{jnp.shape(loss)} for tokens of shape {mask.shape}: return a float32 per token"
            )
        return jnp.where(mask, loss, 0.0)


def _check_loss(o: Objective) -> None:
    """Refuses a loss that fails, or is not finite, on three tokens and on padding."""
    arrays = dict.fromkeys(policy.INPUTS, np.ones(4, np.float32)) | {
        "logp": np.array([-0.1, -1.0, -3.0, np.nan], np.float32),
        "old_logp": np.array([-0.1, -1.5, -2.0, np.nan], np.float32),
        "advantage": np.array([1.0, -1.0, 0.0, np.nan], np.float32),
        "mask": np.array([True, True, True, False]),
    }
    inputs = jax.device_put(arrays)
    try:
        loss, pull = jax.vjp(lambda logp: o.policy_loss(**inputs | {"logp": logp}), inputs["logp"])
        values = jax.device_get((loss, *pull(jnp.ones_like(loss))))
    except UserError:
        raise
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]  # one line
        raise UserError(
            f"objective.loss is {o.loss!r}, but it fails ({reason}): compare it with a loss in "
            "losses/policy.py"
        ) from error
    if not np.isfinite(values).all():
        raise UserError(
            f"objective.loss is {o.loss!r}, but its value or its gradient is NaN or infinite for "
            f"log-probabilities {arrays['logp']}: bound exponents and divisors, and select with "
            "jnp.where before the arithmetic, not after it"
        )


def _check_rule(o: Objective) -> None:
    """Refuses a group rule that fails, or has no advantage for each of some rewards."""
    assert o.group_rule is not None
    for rewards in ([1.0, 0.0, 0.5], [1.0, 1.0]):  # a division by the deviation is 0 / 0
        try:
            advantage_K = np.asarray(o.group_rule(np.array(rewards, np.float32)))
        except Exception as error:
            advantage_K = np.asarray(error)
        is_right = advantage_K.shape == (len(rewards),) and advantage_K.dtype.kind in "fi"
        if not is_right or not np.isfinite(advantage_K).all():
            raise UserError(
                f"objective.advantage is {o.advantage!r}, but for the rewards {rewards} it gives "
                f"{advantage_K!r}: return one finite number per reward"
            )
