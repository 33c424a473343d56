"""Pipelined rollouts: while one part of a batch waits for the environment, another is sampled.

The branches of one rollout advance in lockstep: all wait for actions, then all for the retriever
and the frozen language model. So the sampling device is idle in every second round, unless the
batch is split into groups that are in different rounds.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

from jax_ragrl.rollout.collect import Environment
from jax_ragrl.rollout.data_parallel import merge_shards, shard_questions
from jax_ragrl.rollout.tree import Forest
from jax_ragrl.runtime.dispatch import is_on_device
from jax_ragrl.types import Question


def pipelined_rollout(
    questions: Sequence[Question],
    environment: Environment,
    count: int,
    roll_out: Callable[[Sequence[int], Environment], Forest],
) -> Forest:
    """Rolls out `count` groups of questions in concurrent threads; the forest equals that of one.

    The groups share weights, one retriever and the language models. Calls to the samplers and to
    language models on its devices exclude each other; calls to the retriever exclude each other.
    Each group makes smaller batches than the whole batch would.

    Args:
      questions: the batch.
      environment: sampler, retriever and language models.
      count: the number of groups; 1 is a plain call.
      roll_out: rolls out the questions of a group, which it gets by their indices in the batch, in
        an environment.
    """
    # Copies of a question must stay together, so groups are shards.
    count = min(count, len({question.id for question in questions}))
    if count < 2:
        return roll_out(range(len(questions)), environment)
    shards = shard_questions(questions, count)
    # One lock per resource, so that a search in one group overlaps with sampling in another.
    device, search = threading.Lock(), threading.Lock()

    # A reranker may be a language model on the sampler's devices.
    retriever = environment.retriever
    searches = device if is_on_device(retriever) else search

    def with_lock(model: Any) -> Any:
        # Servers accept concurrent requests, so a language model on a server has no lock.
        return ContextProxy(model, lambda: device) if is_on_device(model) else model

    exclusive = environment._replace(
        retriever=ContextProxy(retriever, lambda: searches),
        llm=with_lock(environment.llm),
        judge=with_lock(environment.judge),
    )
    with ThreadPoolExecutor(len(shards)) as pool:
        # `map` keeps the order of the groups and raises the first exception of a group.
        # Kept contexts are never shared: groups would find others in every run.
        samplers = [ContextProxy(separate(environment.sampler), lambda: device) for _ in shards]
        forests = pool.map(
            lambda group, sampler: roll_out(group, exclusive._replace(sampler=sampler)),
            map(list, shards),
            samplers,
        )
        return merge_shards(questions, shards, [*forests])


def separate(sampler: Any) -> Any:
    """Returns a sampler that shares no contexts with this one; itself if it keeps none."""
    return sampler.separate() if hasattr(sampler, "separate") else sampler


class ContextProxy:
    """A proxy of an object that makes every call within a context, such as a lock.

    The call of a generator ends with the generator.
    """

    def __init__(self, target: Any, context: Callable[[], AbstractContextManager[Any]]) -> None:
        self._target, self._context = target, context

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._target, name)
        return self._within(value) if callable(value) else value

    def _within(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def generate(*args: Any, **kwargs: Any) -> Iterator[Any]:
            with self._context():
                yield from call(*args, **kwargs)

        def within(*args: Any, **kwargs: Any) -> Any:
            with self._context():
                return call(*args, **kwargs)

        return generate if inspect.isgeneratorfunction(call) else within
