"""A taskset of verifiers: the tool is the MCP server of `ragrl serve retriever --mcp`.

vf-eval ragrl-envs --env.taskset.data mixture --env.taskset.search.url http://HOST:8000/mcp
"""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf

from jax_ragrl.text.metrics import exact_match, f1
from ragrl_envs.questions import INSTRUCTIONS, WORLD, load


class QuestionData(vf.TaskData):
    """A question with all of its correct answers."""

    answers: list[str]


class QuestionTask(vf.Task[QuestionData]):
    """The reward is the F1 of the last reply, 0 to 1; `exact` is the exact match."""

    @vf.reward
    async def f1(self, task: QuestionData, trace: vf.Trace) -> float:
        return f1(trace.last_reply, task.answers)

    @vf.metric
    async def exact(self, task: QuestionData, trace: vf.Trace) -> float:
        return exact_match(trace.last_reply, task.answers)


class Search(vf.Toolset[vf.SharedToolsetConfig]):
    """The tool `search` of a server that runs already."""


class QuestionTasksetConfig(vf.TasksetConfig):
    """`data` and `split` as in `ragrl_envs.questions.load`; `search.url` is the server."""

    data: str = WORLD
    split: str = "train"
    search: vf.SharedToolsetConfig = vf.SharedToolsetConfig(url="http://localhost:8000/mcp")


class QuestionTaskset(vf.Taskset[QuestionTask, QuestionTasksetConfig]):
    """The questions of a split."""

    def load(self) -> Iterator[QuestionTask]:
        for question in load(self.config.data, self.config.split):
            data = QuestionData(
                id=question.id,
                prompt=question.text,
                system_prompt=INSTRUCTIONS,
                answers=list(question.answers),
            )
            yield QuestionTask(data, self.config.task)

    @classmethod
    def toolsets(cls, config: QuestionTasksetConfig) -> list[vf.Toolset]:
        return [Search(config.search)]
