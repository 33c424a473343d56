"""The arithmetic of the audit of credit rules: float64, without rollouts (see `bench.credit`).

Axes: D decisions, A = 2 audited actions of a decision, U actions of which the value is replayed,
M continuations, R repetitions of a rule's rollouts, and L = 2 draws of a repetition, which differ
in the luck of the other roles alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

RESAMPLES = 1000
LEAST = 8  # decisions with unequal replayed values below which no interval is given
DECIDED = 2.0  # standard errors from 0, from which on the sign of an advantage counts as known


class Replay(NamedTuple):
    """Values of executed continuations; every error is a standard error, in units of the reward.

    Fields:
      advantage_A: Q(s, a) - V(s). V is a mean over actions that the policy sampled.
      error_A: of the advantage, by the finite numbers of continuations and of actions in V.
      gap_error: of Q(s, a_1) - Q(s, a_2), in which V cancels.
      value, value_error: V(s).
      shared_A: the covariance of the errors of `-value` and of `advantage_A`.
    """

    advantage_A: np.ndarray
    error_A: np.ndarray
    gap_error: float
    value: float
    value_error: float
    shared_A: np.ndarray


def replay_of(return_UM: np.ndarray, share_U: np.ndarray, draws: int) -> Replay:
    """Estimates advantages from returns, of which column j has the same keys for all actions.

    Args:
      return_UM: returns of the continuations after each action; the first two are the audited ones.
      share_U: the share of each action among those that V is the mean of.
      draws: the number of actions that V is the mean of, drawn apart from the audited ones.
    """
    count = return_UM.shape[1]
    value_M = share_U @ return_UM
    advantage_AM = return_UM[:2] - value_M
    value_U, value = return_UM.mean(1), float(value_M.mean())
    # With few draws the mean over actions is not yet the policy's value, however exact each is.
    of_actions = share_U @ (value_U - value) ** 2 / (draws - 1)
    covariance_A = [np.cov(-value_M, row)[0, 1] for row in advantage_AM]
    return Replay(
        advantage_A=value_U[:2] - value,
        error_A=np.sqrt(advantage_AM.var(1, ddof=1) / count + of_actions),
        gap_error=float((return_UM[0] - return_UM[1]).std(ddof=1) / np.sqrt(count)),
        value=value,
        value_error=float(np.sqrt(value_M.var(ddof=1) / count + of_actions)),
        shared_A=np.array(covariance_A) / count + of_actions,
    )


def moments_of(
    credit_ARL: np.ndarray, replay: Replay, *, is_return: bool, tokens: int, actions: int
) -> np.ndarray:
    """Returns the moments of one decision, float64 `[14]`, whose means over decisions `measures`
    reads. Each is free of the noise of both estimates: its expectation is that of exact values.

    Args:
      credit_ARL: the credit of each action in each draw; nan where it was not trained.
      replay: the replayed values of the decision.
      is_return: whether the credit is a return, of which V(s) is subtracted (a perfect critic).
      tokens, actions: of rollouts from the root: all tokens of actions, and actions with a credit.
    """
    is_trained = np.isfinite(credit_ARL)
    t_ARL = is_trained * float(is_return)
    credit_ARL = np.where(is_trained, credit_ARL, 0.0) - replay.value * t_ARL
    # A return has the credit t (R - V), with t = 1 if trained, else 0. An error e of V adds -t e:
    # E[e^2] times a square of t to the same square of credits, cov(-e, error) t to a product.
    own, square, noise, luck = _squares(credit_ARL) - replay.value_error**2 * _squares(t_ARL)
    joint, cov = _products(credit_ARL, replay.advantage_A) - _products(t_ARL, replay.shared_A)
    decided_A = np.abs(replay.advantage_A) > DECIDED * replay.error_A
    # A credit of 0 has no sign: half of these agree by chance.
    same_ARL = (np.sign(credit_ARL * replay.advantage_A[:, None, None]) + 1) / 2
    return np.array(
        [
            np.subtract(*replay.advantage_A) ** 2 - replay.gap_error**2,
            joint,
            own,
            cov,
            square,
            (replay.advantage_A**2 - replay.error_A**2).mean(),
            noise,
            luck,
            same_ARL[decided_A].mean((1, 2)).sum(),
            decided_A.sum(),
            is_trained.mean(),
            (credit_ARL.mean((1, 2)) - replay.advantage_A).mean(),
            tokens,
            actions,
        ],
        np.float64,
    )


def _squares(credit_ARL: np.ndarray) -> np.ndarray:
    """The square of the expected gap, and the mean squares of credits, of their noise and luck."""
    gap_R = (credit_ARL[0] - credit_ARL[1]).mean(-1)
    own = gap_R.mean() ** 2 - gap_R.var(ddof=1) / len(gap_R)
    luck = ((credit_ARL[..., 0] - credit_ARL[..., 1]) ** 2 / 2).mean()
    return np.array([own, (credit_ARL**2).mean(), credit_ARL.var(1, ddof=1).mean(), luck])


def _products(credit_ARL: np.ndarray, advantage_A: np.ndarray) -> np.ndarray:
    """The product of the gaps, and the mean product of credits with advantages."""
    mean_A = credit_ARL.mean((1, 2))
    gaps = np.subtract(*mean_A) * np.subtract(*advantage_A)
    return np.array([gaps, (mean_A * advantage_A).mean()])


def measures(moments_D: np.ndarray) -> dict[str, float]:
    """Returns the measures of a rule from its moments, `[..., 14]`, averaged over decisions.

    agreement   correlation of the expected credit's gap between two actions of a state with the
                replayed gap. 1: unbiased up to a scale. Corrected for the noise of both
    scale       slope of that gap on the replayed one; 1: the credit has the scale of the advantage
    bias        root mean square of the expected gap minus the replayed gap, in rewards
    correlation of one credit with the advantage, about 0 and not about means; corrected for the
                noise of the replay alone: the noise of a credit is what it measures. It and
                `worth` are nan (0 / 0) where nothing is trained: 0 would be a measurement
    sign        share of credits with the sign of the advantage, where that is known
    noise       standard deviation of the credit of one action in one state, in rewards
    luck        share of the noise (variance) that the draws of the other roles cause
    trained     share of draws in which the action is trained
    offset      mean of the credit minus the advantage: a baseline that depends on the state alone
    tokens      tokens per trained action, those of forced ones included
    worth       trained actions with exact advantages that hold the signal of 1,000 tokens: the
                signal-to-noise ratio of a sum of gradients grows with `correlation`^2 per action
    """
    gap, joint, own, cov, square, truth, noise, luck, same, decided, trained, offset, tokens, n = (
        np.moveaxis(moments_D, -1, 0)
    )
    with np.errstate(invalid="ignore", divide="ignore"):
        correlation = cov / np.sqrt(square * truth)
        return {
            "agreement": joint / np.sqrt(gap * own),
            "scale": joint / gap,
            "bias": np.sqrt(np.maximum(own - 2 * joint + gap, 0)),
            "correlation": correlation,
            "sign": same / decided,
            "noise": np.sqrt(noise),
            "luck": luck / noise,
            "trained": trained,
            "offset": offset,
            "tokens": tokens / n,
            "worth": 1000 * n / tokens * correlation * np.abs(correlation),
        }


def with_intervals(moments_DX: Sequence[np.ndarray]) -> Mapping[str, tuple[float, float, float]]:
    """Returns each measure with its 95 % interval, by a bootstrap over decisions.

    The interval is nan with too few decisions, whose spread it would understate.
    """
    moments = np.asarray(moments_DX, np.float64)
    # Equal draws for all rules of the same decisions, so that their intervals can be compared.
    drawn = np.random.default_rng(0).integers(0, len(moments), (RESAMPLES, len(moments)))
    resampled = measures(moments[drawn].mean(1))
    result = {}
    for name, value in measures(moments.mean(0)).items():
        values = np.asarray(resampled[name])
        values = values[np.isfinite(values)]
        is_enough = values.size and np.count_nonzero(moments[:, 5]) >= LEAST
        ends = np.quantile(values, [0.025, 0.975]) if is_enough else (np.nan, np.nan)
        result[name] = (float(value), float(ends[0]), float(ends[1]))
    return result
