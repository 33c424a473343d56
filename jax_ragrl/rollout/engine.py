"""An external engine that writes the rollouts of a policy, in the place of `JobSampler`.

The engine is a server with OpenAI's completions. Prompts go out as token ids. Replies are read as a
stream of token ids with the log-probabilities at which they were sampled; no text is tokenized.

    llama.cpp   `logprobs.content` has the ids and, at temperatures other than 1, `prob`, the
                probability after the temperature. Tests run its server (`test_engine.py`).
    vLLM        `token_ids` (`return_token_ids`, 0.10.2 and newer) with `logprobs.token_logprobs`.
                From its documentation, not run: temperatures other than 1 need a server with
                `--logprobs-mode processed_logprobs`.

llama.cpp leaves out tokens that end within a character. An action that has one is asked for again
(`_with_pieces`), with an exact result.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, NoReturn, TypeVar

import numpy as np

from jax_ragrl.config.ranges import Count, Natural, Positive
from jax_ragrl.config.schema import check_scheme
from jax_ragrl.errors import EffectError, UserError
from jax_ragrl.json_text import loads
from jax_ragrl.llm.openai import OpenAILLM
from jax_ragrl.models.gguf_file import check_package
from jax_ragrl.runtime.servers import wait_for
from jax_ragrl.sampling.jobs import Row, SamplingJob
from jax_ragrl.sampling.sampler import JobSamples
from jax_ragrl.text.tokenizer import ChatTokenizer

T = TypeVar("T")
EVERY = 1 << 20  # more tokens than a vocabulary has
NO_TOKENS = (
    "logprobs and return_token_ids were asked for, but the reply has text without ids and "
    "log-probabilities of its tokens: use llama.cpp's server, or vLLM 0.10.2 or newer"
)


@dataclasses.dataclass(frozen=True)
class Engine:
    """A server that samples the rollouts of training; evaluations sample in this process.

    Fields:
      base_url: its address, such as `http://localhost:8080/v1`.
      sync: the command that gives it new weights, called with two more arguments, the folder of
        the policy and the number of the step, from 0. When it ends, the engine has the weights.
      model: the engine's name of the model.
      weights: what the folder holds: `model` (Hugging Face layout, adapters merged), `gguf` (also
        `model.gguf`), or `adapter` (PEFT).
      dtype: the dtype of a model's weights.
      concurrency, retries, timeout: as of the section `llm`; a try is one action.
    """

    base_url: str
    sync: str
    model: str = "policy"
    weights: Literal["model", "gguf", "adapter"] = "model"
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    concurrency: Count = 256
    retries: Natural = 5
    timeout: Positive = 120.0

    def __post_init__(self) -> None:
        check_scheme("engine.base_url", self.base_url)
        if not self.sync.strip():
            raise UserError(
                "engine.sync is empty, so the engine would keep its weights: give a command that "
                "loads those of a folder, see docs/howto/engine.md"
            )
        if self.weights == "gguf":
            check_package("engine.weights 'gguf'")


class Reply(NamedTuple):
    """The tokens of a reply; the counts are the server's, None if it reports none."""

    ids: tuple[int, ...]
    logps: tuple[float, ...]
    reason: str
    num_tokens: int | None
    num_prompt_tokens: int | None


class EngineSampler:
    """Samples jobs on an engine; the arguments and results of `start` are those of `JobSampler`.

    It may also end an action at further tokens that end a text of the model. `UserError` if a
    request fails in all of its tries, or a reply is not what was asked for.
    """

    def __init__(self, server: OpenAILLM, base_url: str, tokenizer: ChatTokenizer) -> None:
        self._server, self._tokenizer = server, tokenizer
        self._own_address = base_url.rstrip("/").removesuffix("/v1") + "/completion"

    def start(self, jobs: Sequence[SamplingJob], width: int) -> Callable[[], JobSamples]:
        async def rows() -> list[Row]:
            return await asyncio.gather(*(self._row(j, k) for j in jobs for k in range(width)))

        def finish() -> JobSamples:
            flat = wait_for(rows())
            return [flat[i : i + width] for i in range(0, len(flat), width)]

        return finish

    async def _row(self, job: SamplingJob, sibling: int) -> Row:
        body: dict[str, Any] = {"model": self._server.name, "prompt": job.ids, "logprobs": 1}
        body |= {"max_tokens": job.limit, "temperature": job.temperature, "top_p": job.top_p}
        # Each sibling has its own stream (a Weyl sequence of the seed).
        body |= {"seed": (job.seed + 0x9E3779B9 * sibling) % 2**31}
        body |= {"stop": job.stop_strings, "include_stop_str_in_output": True}
        body |= {"stop_token_ids": self._tokenizer.stop_ids, "return_token_ids": True}
        body |= {"post_sampling_probs": job.temperature not in (0, 1)}
        # llama.cpp cuts the log-probabilities of a stop string unless the reply is streamed.
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        # Nothing else may change the distribution, whatever the defaults of the server are.
        body |= {"samplers": ["top_p", "temperature"], "top_k": 0, "min_p": 0.0}
        body |= {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
        reply = await self._ask("/completions", body, read_stream)
        if reply.num_prompt_tokens not in (None, len(job.ids)):
            self._refuse(f"it read {reply.num_prompt_tokens} tokens of a prompt of {len(job.ids)}")
        if reply.num_tokens not in (None, len(reply.ids)):
            reply = await self._with_pieces(job, body)
        if len(reply.ids) < job.limit and reply.reason == "length":
            self._refuse(f"it ended an action of {len(reply.ids)} tokens: give it a longer context")
        ids = self._cut(job, reply.ids)
        if not ids or not all(0 <= i < len(self._tokenizer) for i in ids):
            self._refuse(f"its tokens are {ids}, and the tokenizer has {len(self._tokenizer)}")
        return Row(ids, reply.logps[: len(ids)])

    def _cut(self, job: SamplingJob, ids: Sequence[int]) -> tuple[int, ...]:
        """Returns the tokens up to the first one that ends the action in this process."""
        table, state = self._tokenizer.stop_transitions(job.stop_strings), 0
        for n, i in enumerate(ids, 1):
            if table is not None:
                state = int(table[state, min(i, table.shape[1] - 1)])
            if i in self._tokenizer.stop_ids or (table is not None and state == len(table) - 1):
                return tuple(ids[:n])
        return tuple(ids)

    async def _with_pieces(self, job: SamplingJob, body: dict[str, Any]) -> Reply:
        """Asks llama.cpp for a reply again of which the stream lacks tokens, by its own interface.

        That one lists the ids of all tokens, but no log-probabilities of those that end within a
        character. These come from the whole distribution at each of their places.
        """
        body = {**body, "stream": False, "stop": [], "n_probs": 1, "return_tokens": True}
        value = await self._ask(self._own_address, body | {"n_predict": job.limit}, loads)
        ids = self._cut(job, value["tokens"])
        found = iter(value["completion_probabilities"])
        logps, temperature = list[float](), job.temperature or 1.0
        for n, i in enumerate(ids):
            if not self._tokenizer.decode(ids[: n + 1]).endswith("\ufffd"):
                if (token := next(found, {"id": None}))["id"] != i:
                    self._refuse(f"it reports token {token['id']} in the place of {i}")
                logps.append(_logp(token))
                continue
            # Another token is forced, because this one would be left out again.
            forced = {"n_predict": 1, "n_probs": EVERY, "temperature": 0.0, "samplers": []}
            forced |= {"logit_bias": [[self._tokenizer.stop_ids[0], 1e4]]}
            forced |= {"post_sampling_probs": False, "prompt": job.ids + ids[:n]}
            place = await self._ask(self._own_address, body | forced, loads)
            found_V = place["completion_probabilities"][0]["top_logprobs"]
            logits = {x["id"]: x["logprob"] / temperature for x in found_V}
            logps.append(logits[i] - float(np.logaddexp.reduce([*logits.values()])))
        is_cut = value["stop_type"] == "limit" and ids == tuple(value["tokens"])
        return Reply(ids, tuple(logps), "length" if is_cut else "stop", len(ids), len(job.ids))

    async def _ask(self, path: str, body: Mapping[str, Any], read: Callable[[bytes], T]) -> T:
        reply = await self._server.ask(path, body, "a rollout of the policy", read)
        if isinstance(reply, EffectError):
            raise UserError(f"engine: {reply}; start it, and then the same command again")
        return reply

    def _refuse(self, why: str) -> NoReturn:
        raise UserError(f"engine {self._server.name} at {self._own_address} cannot be used: {why}")


def read_stream(body: bytes) -> Reply:
    """Reads the events of a streamed completion.

    Raises:
      EffectError: tokens come without ids or log-probabilities.
      ValueError, KeyError, TypeError: the body is no such stream.
    """
    ids, logps, reason, usage = list[int](), list[float](), "", dict[str, int]()
    lines = [line[6:] for line in body.splitlines() if line.startswith(b"data: {")]
    for event in map(loads, lines):
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            reason = choice.get("finish_reason") or reason
            found = choice.get("logprobs") or {}
            own: list[tuple[Any, ...]]
            if content := found.get("content"):
                own = [(x.get("id"), _logp(x)) for x in content]
            else:
                parts = choice.get("token_ids") or (), found.get("token_logprobs") or ()
                own = [*itertools.zip_longest(*parts)]
            if None in itertools.chain(*own) or (choice.get("text") and not own):
                raise EffectError(NO_TOKENS)
            ids += [i for i, _ in own]
            logps += [logp for _, logp in own]
    if not reason or not all(math.isfinite(x) and x < 1e-3 for x in logps):
        raise ValueError(f"it has no end, or log-probabilities {logps[-3:]}")
    counts = usage.get("completion_tokens"), usage.get("prompt_tokens")
    return Reply(tuple(ids), tuple(logps), reason, *counts)


def _logp(token: Mapping[str, Any]) -> float:
    return float(token["logprob"] if "logprob" in token else math.log(token["prob"]))
