"""An update in NumPy float64 from its equations, with gradients by central differences.

The model is a decoder without layers, whose logits after a token depend on that token alone:

  hidden(i) = embed[i] / rms(embed[i]) * gain,   logits(i) = lm_head hidden(i) / temperature
  value(i) = kernel . hidden(i) + bias
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from jax_ragrl.learner.objective import Objective
from jax_ragrl.learner.optimizer import Optimizer
from jax_ragrl.learner.packing import Turn

Params = dict[str, np.ndarray]


class Tokens(NamedTuple):
    """All trained tokens: the token before each, its id, its turn, and bool `[T, V]` allowed ids.

    `allowed` None: everything is allowed.
    """

    source: np.ndarray
    target: np.ndarray
    turn: np.ndarray
    allowed: np.ndarray | None = None

    @classmethod
    def of(cls, turns: list[Turn]) -> "Tokens":
        rows = [
            (before, token, i)
            for i, turn in enumerate(turns)
            for before, token in zip((turn.prompt[-1], *turn.ids), turn.ids, strict=False)
        ]
        return cls(*np.array(rows).T)


def hidden(p: Params, source: np.ndarray) -> np.ndarray:
    x = p["embed"][source]
    return x / np.sqrt((x**2).mean(axis=1, keepdims=True) + 1e-6) * p["final_norm"]


def logps(p: Params, tokens: Tokens, temperature: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns the log-probability of each token and the entropy before it."""
    logits = hidden(p, tokens.source) @ p["lm_head"].T / temperature
    if tokens.allowed is not None:
        logits = np.where(tokens.allowed, logits, -1e9)
    logits -= logits.max(axis=1, keepdims=True)
    all_logps = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    chosen = all_logps[np.arange(len(tokens.target)), tokens.target]
    return chosen, -(np.exp(all_logps) * all_logps).sum(axis=1)


def values(p: Params, tokens: Tokens) -> np.ndarray:
    return hidden(p, tokens.source) @ p["kernel"] + p["bias"]


def gae(reward: np.ndarray, value: np.ndarray, turn: np.ndarray, gamma: float, lam: float):
    advantage = np.zeros_like(reward)
    for t in reversed(range(len(reward))):
        last = t + 1 == len(reward) or turn[t + 1] != turn[t]
        after = (0.0, 0.0) if last else (value[t + 1], advantage[t + 1])
        advantage[t] = reward[t] + gamma * after[0] - value[t] + gamma * lam * after[1]
    return advantage


def weights(o: Objective, tokens: Tokens, roles: np.ndarray) -> np.ndarray:
    """Returns the weight of each token in the policy loss; `roles` has one role per token."""
    if o.aggregation == "token_mean":
        return np.full(len(roles), 1 / len(roles))
    if o.aggregation == "sequence_mean":
        sizes = np.bincount(tokens.turn)
        return 1 / (len(sizes) * sizes[tokens.turn])
    return np.array([1 / (roles == r).sum() for r in roles])


def difference(loss: Callable[[Params], float], p: Params, step: float = 1e-5) -> Params:
    grads = {name: np.zeros_like(x) for name, x in p.items()}
    for name, x in p.items():
        for at in np.ndindex(x.shape):
            losses = []
            for sign in (1, -1):
                shifted = np.array(x)
                shifted[at] += sign * step
                losses.append(loss(p | {name: shifted}))
            grads[name][at] = (losses[0] - losses[1]) / (2 * step)
    return grads


class Adam:
    """Kingma and Ba 2015 on a gradient clipped to a norm, with a cosine or constant rate."""

    def __init__(self, optimizer: Optimizer, peak: float, total: int):
        self.o, self.peak, self.total, self.count = optimizer, peak, total, 0
        self.m: Params = {}
        self.v: Params = {}

    def step(self, p: Params, grads: Params) -> Params:
        norm = np.sqrt(sum((g**2).sum() for g in grads.values()))
        scale = min(1.0, self.o.max_grad_norm / norm)
        scale_lr = 1.0
        if self.o.schedule == "cosine":
            wave = 0.5 * (1 + np.cos(np.pi * self.count / self.total))
            scale_lr = (1 - self.o.final_lr_fraction) * wave + self.o.final_lr_fraction
        self.count += 1
        out = {}
        for name, g in grads.items():
            g = g * scale
            self.m[name] = self.o.b1 * self.m.get(name, 0.0) + (1 - self.o.b1) * g
            self.v[name] = self.o.b2 * self.v.get(name, 0.0) + (1 - self.o.b2) * g**2
            m = self.m[name] / (1 - self.o.b1**self.count)
            v = self.v[name] / (1 - self.o.b2**self.count)
            out[name] = p[name] - self.peak * scale_lr * m / (np.sqrt(v) + 1e-8)
        return out


def update(
    o, optimizer, policy, critic, reference, turns, temperature, allowed=None
) -> tuple[Params, Params | None]:
    """Takes `epochs` steps on all turns at once; `allowed` is bool `[V]` per role."""
    tokens = Tokens.of(turns)
    roles = np.array([turns[i].role for i in tokens.turn])
    if allowed is not None:
        tokens = tokens._replace(allowed=np.stack([allowed[role] for role in roles]))
    old, _ = logps(policy, tokens, temperature)
    ref, _ = logps(reference, tokens, temperature)
    last = np.append(tokens.turn[1:] != tokens.turn[:-1], True)
    credit = np.array([turn.credit for turn in turns])
    reward = np.where(last, credit[tokens.turn], 0.0)
    if o.kl.where == "reward":
        reward = reward - o.kl.coefficient * (old - ref)
    if critic is None:
        old_value = np.zeros(len(reward))
        advantage = gae(reward, old_value, tokens.turn, 1.0, 1.0)
    else:
        old_value = values(critic, tokens)
        advantage = gae(reward, old_value, tokens.turn, o.gamma, o.lam)
    returns = advantage + old_value
    if o.advantage == "whitened_gae":
        advantage = (advantage - advantage.mean()) / np.sqrt(advantage.var() + 1e-8)
    weight = weights(o, tokens, roles)
    if o.importance_weight_cap:
        behaviour = np.concatenate([turn.behaviour_logps for turn in turns])
        weight = weight * np.minimum(np.exp(old - behaviour), o.importance_weight_cap)

    def policy_loss(p: Params) -> float:
        logp, entropy = logps(p, tokens, temperature)
        ratio = np.exp(logp - old)
        clipped = np.clip(ratio, 1 - o.eps_low, 1 + o.eps_high)
        gain = np.minimum(ratio * advantage, clipped * advantage)
        if o.loss == "dual_clipped_policy_loss":
            gain = np.where(advantage < 0, np.maximum(gain, o.dual_clip * advantage), gain)
        if o.loss == "policy_gradient_loss":
            gain = logp * advantage
        loss = -gain - o.entropy_coefficient * entropy
        if o.kl.where == "loss":
            loss = loss + o.kl.coefficient * (np.exp(ref - logp) - 1 - (ref - logp))
        return float((weight * loss).sum())

    def critic_loss(p: Params) -> float:
        value = values(p, tokens)
        near = old_value + np.clip(value - old_value, -o.value_clip, o.value_clip)
        return float(0.5 * np.maximum((value - returns) ** 2, (near - returns) ** 2).mean())

    adam = Adam(optimizer, optimizer.policy_lr, optimizer.epochs)
    value_adam = Adam(optimizer, optimizer.value_lr, optimizer.epochs)
    for _ in range(optimizer.epochs):
        policy = adam.step(policy, difference(policy_loss, policy))
        if critic is not None:
            critic = value_adam.step(critic, difference(critic_loss, critic))
    return policy, critic
