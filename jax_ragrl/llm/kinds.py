"""Kinds of a frozen language model in a config: the sections `llm`, `judge` and `writer`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from jax_ragrl.config.ranges import Count, Natural, Positive, Share
from jax_ragrl.config.schema import check_scheme
from jax_ragrl.errors import UserError

Dtype = Literal["float32", "bfloat16"]
Thinking = Literal["off", "on"]


@dataclasses.dataclass(frozen=True)
class WorldReaderConfig:
    """The rule-based reader of the synthetic corpus.

    Fields:
      max_documents: documents that it reads; later ones of a prompt are ignored.
      noise: the probability that one irrelevant document distracts it.
      confusion: the same for a document with the requested relation of a similarly named entity.
    """

    max_documents: Count = 5
    noise: Share = 0.1
    confusion: Share = 0.35
    kind: Literal["world_reader"] = "world_reader"


@dataclasses.dataclass(frozen=True)
class LocalLLMConfig:
    """A model on this machine's devices.

    Fields:
      model: a model by its name: a folder, a `.gguf` file, `OWNER/NAME`, `tiny` or `smollm2`.
      int8: eight-bit weights (needs Qwix). A policy in training keeps its own precision: the same
        weights must sample and score.
      dtype: the dtype of the weights and of the computation.
      max_tokens: limit on the new tokens of a reply, in addition to that of the request; 0: none.
      thinking: whether a reply may begin with a think block, as `thinking` for policies. The block
        counts for the maximum length of a reply and is removed before the reply is used.
    """

    model: str = "tiny"
    int8: bool = False
    dtype: Dtype = "float32"
    max_tokens: Natural = 0
    thinking: Thinking = "off"
    kind: Literal["local"] = "local"


@dataclasses.dataclass(frozen=True)
class OpenAIConfig:
    """A model behind an OpenAI-compatible server; see `llm/openai.py`.

    Fields:
      model: the name of the model on the server.
      base_url: the address of the server; None: OpenAI's.
      concurrency: most requests in flight at once. It begins with 4, rises while replies come
        soon, and falls if the server is overloaded (429, 503, time-outs).
      retries: attempts after a failed request.
      timeout: seconds of the first try, to the last byte of the reply; up to 4 times as many after
        a late one.
      extra_body: further fields of each request's JSON body; None removes a field.
      cache: whether replies are stored in the folder of the run (`llm_cache.sqlite`), and equal
        requests are answered from there.
      replies: a file of recorded replies (`ragrl replies`), which precede the cache, or the name of
        a packaged one, such as `mixture:replies`; empty: none.
      replies_only: whether a request without a recorded reply ends the run, instead of being sent.
    """

    model: str
    base_url: str | None = None
    concurrency: Count = 256
    retries: Natural = 5
    timeout: Positive = 60.0
    extra_body: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    cache: bool = True
    replies: str = ""
    replies_only: bool = False
    kind: Literal["openai"] = "openai"

    def __post_init__(self) -> None:
        if self.base_url:
            check_scheme("base_url", self.base_url)
        if self.replies_only and not self.replies:
            raise UserError(
                "replies_only is set without replies: give the file of recorded replies that "
                "'ragrl replies' wrote, or leave replies_only out"
            )


@dataclasses.dataclass(frozen=True)
class NoLLMConfig:
    """No frozen language model: for systems that never ask one, and for a run without a judge."""

    kind: Literal["none"] = "none"


LLM = WorldReaderConfig | LocalLLMConfig | OpenAIConfig | NoLLMConfig
