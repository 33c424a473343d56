"""The components of a run: data, retriever, language models and policies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from jax_ragrl.llm.base import FrozenLLM
from jax_ragrl.models.decoder import Decoder
from jax_ragrl.models.split import SplitModel
from jax_ragrl.retrieval.base import Retriever
from jax_ragrl.rollout.collect import ActionSampler, Environment
from jax_ragrl.rollout.tools import Tools
from jax_ragrl.sampling.weights import for_sampling
from jax_ragrl.text.tokenizer import ChatTokenizer
from jax_ragrl.types import Question


class Components(NamedTuple):
    """The components of a run: questions by split, policies by name, before training.

    Without a judge the rewards use the metric of the recipe.
    """

    questions: Mapping[str, tuple[Question, ...]]
    retriever: Retriever
    llm: FrozenLLM
    policies: Mapping[str, Decoder]
    tokenizer: ChatTokenizer
    judge: FrozenLLM | None = None
    tools: Tools = Tools({})

    def models(self) -> dict[str, SplitModel]:
        """Returns the policies in the form that samplers need, see `for_sampling`."""
        return for_sampling(self.policies)

    def environment(self, sampler: ActionSampler) -> Environment:
        """Returns the environment of rollouts, which measures calls in tokens of the policy."""
        count = self.tokenizer.count
        return Environment(sampler, self.retriever, self.llm, count, self.judge, self.tools)
