"""An environment server of OpenEnv. An episode is one question; an action searches or answers.

RAGRL_DATA=mixture RAGRL_RETRIEVER=http://HOST:8000 uvicorn ragrl_envs.environment:app
"""

from __future__ import annotations

import functools
import os
import random
import uuid
from typing import Any

from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app
from pydantic import Field

from jax_ragrl.retrieval.remote import RemoteRetriever
from jax_ragrl.text.metrics import f1
from jax_ragrl.types import Hits, Question
from ragrl_envs.questions import INSTRUCTIONS, WORLD, load

SPLITS = ("train", "dev", "test")
MAX_SEARCHES = 10  # a further one ends the episode without a reward
TOP_K = 3  # passages per search
# Sessions share what an environment reads.
questions = functools.cache(load)


class QuestionAction(Action):
    """Either a search or an answer, which ends the episode."""

    search: str | None = Field(default=None, description="query; the reply has passages")
    answer: str | None = Field(default=None, description="the answer, in a few words")


class QuestionObservation(Observation):
    """`text` is the question, then the passages; the reward is F1, 0 to 1, at the end."""

    text: str = ""


class QuestionEnvironment(Environment[QuestionAction, QuestionObservation, State]):
    """Questions of a data set, see `ragrl_envs.questions.load`.

    Args:
      data: the data set.
      retriever: the address of `ragrl serve retriever`.
    """

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, data: str = WORLD, retriever: str = "http://localhost:8000") -> None:
        super().__init__()
        self._data, self._retriever = data, RemoteRetriever(retriever)
        self._question: Question | None = None
        self._state = State(step_count=0)

    def list_splits(self) -> list[str]:
        return list(SPLITS)

    def num_tasks(self, split: str) -> int:
        return len(questions(self._data, split))

    def get_task(self, split: str, index: int) -> dict[str, Any]:
        """A question without its answers."""
        question = questions(self._data, split)[index]
        return {"id": question.id, "index": index, "question": question.text}

    def reset(
        self,
        seed: int | None = None,
        episode_id: str | None = None,
        split: str = "train",
        index: int | None = None,
        **_: Any,
    ) -> QuestionObservation:
        """Starts with the question `index` of a split, or with one that the seed draws."""
        all_of = questions(self._data, split)
        self._question = random.Random(seed).choice(all_of) if index is None else all_of[index]
        self._state = State(episode_id=episode_id or str(uuid.uuid4()), step_count=0)
        return QuestionObservation(text=f"{INSTRUCTIONS}\n\n{self._question.text}")

    def step(
        self, action: QuestionAction, timeout_s: float | None = None, **_: Any
    ) -> QuestionObservation:
        """Searches, or ends the episode.

        Raises:
          ValueError: there is no question, or the action is not one of the two.
          EffectError: the retriever failed.
        """
        if self._question is None:
            raise ValueError("no question has been asked, or it is answered: call reset")
        if (action.search is None) == (action.answer is None):
            raise ValueError("give either search or answer")
        self._state.step_count += 1
        if action.search is None or self._state.step_count > MAX_SEARCHES:
            reward = f1(action.answer or "", self._question.answers)
            self._question = None
            return QuestionObservation(done=True, reward=reward)
        (hits,) = self._retriever.search([action.search], TOP_K)
        if not isinstance(hits, Hits):
            raise hits
        passages = [f"{passage.title}\n{passage.text}" for passage in hits.passages]
        return QuestionObservation(text="\n\n".join(passages))

    @property
    def state(self) -> State:
        return self._state


def from_environment() -> QuestionEnvironment:
    """The environment that the variables RAGRL_DATA and RAGRL_RETRIEVER describe."""
    names = {"data": "RAGRL_DATA", "retriever": "RAGRL_RETRIEVER"}
    return QuestionEnvironment(**{k: os.environ[v] for k, v in names.items() if v in os.environ})


app = create_fastapi_app(
    from_environment,
    QuestionAction,
    QuestionObservation,
    max_concurrent_envs=64,
    env_name="ragrl",
)
