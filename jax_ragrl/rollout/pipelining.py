"""A batch rolled out in cohorts: while one waits for the environment, another is sampled for.

The rollouts of a batch march in step: all branches wait for actions, then all for the retriever and
the frozen language model. A device that samples has nothing to do in every other round, unless some
questions are out of step with the others.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

from jax_ragrl.rollout.collect import Environment
from jax_ragrl.rollout.data_parallel import merge, split
from jax_ragrl.rollout.tree import Forest
from jax_ragrl.types import Question


def in_cohorts(
    questions: Sequence[Question],
    environment: Environment,
    count: int,
    roll_out: Callable[[Sequence[Question], Environment], Forest],
) -> Forest:
    """`roll_out(questions, environment)` in `count` parts side by side: the same forest.

    There is one sampler, and language models on its devices: they work for one cohort at a time,
    and so does the retriever. A cohort's batches are smaller than those of all.
    """
    shares = [share for share in split(questions, count) if share]
    if len(shares) < 2:
        return roll_out(questions, environment)
    device, search = threading.Lock(), threading.Lock()

    def locked(model: Any) -> Any:
        return Around(model, lambda: device) if getattr(model, "on_device", False) else model

    shared = environment._replace(
        sampler=Around(environment.sampler, lambda: device),
        retriever=Around(environment.retriever, lambda: search),
        llm=locked(environment.llm),
        judge=locked(environment.judge),
    )
    with ThreadPoolExecutor(len(shares)) as pool:
        parts = pool.map(lambda own: roll_out([questions[i] for i in own], shared), shares)
        return merge(questions, shares, [*parts])


class Around:
    """Another object, every call of which is made within a context, such as a lock."""

    def __init__(self, wrapped: Any, context: Callable[[], AbstractContextManager[Any]]) -> None:
        self._wrapped, self._context = wrapped, context

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._wrapped, name)
        return self._within(value) if callable(value) else value

    def _within(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def within(*args: Any, **kwargs: Any) -> Any:
            with self._context():
                return call(*args, **kwargs)

        return within
