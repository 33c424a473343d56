"""Requests to a sampler, and the static shapes that they are padded to."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import NamedTuple

from jax_ragrl.config.ranges import Count, Lengths, Natural
from jax_ragrl.errors import UserError
from jax_ragrl.sampling.batches import cache_sizes

PROMPT_LENGTHS = (64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)


# The constraints of an action: `allowed_token_regex`, `stop_strings` and `action_regex` of its job.
JobGrammar = tuple[str, tuple[str, ...], str]


class SamplingJob(NamedTuple):
    """One prompt and its sampling parameters.

    Fields:
      ids: the token ids of the prompt, a forced prefix of the action included.
      seed: the seed of the sampling keys, below 2**32.
      temperature: 0 is greedy.
      top_p: nucleus size; 1 switches the filter off.
      limit: maximum of new tokens.
      allowed_token_regex: only tokens whose text matches, and stop tokens, are allowed; "" allows
        all.
      stop_strings: a row ends at the first token whose text completes one of these strings.
      action_regex: if not empty, the whole action matches this regular expression, and
        `allowed_token_regex` is not used.
      prefix_length: the number of last ids of the prompt that begin the action.
    """

    ids: tuple[int, ...]
    seed: int
    temperature: float
    top_p: float
    limit: int
    allowed_token_regex: str = ""
    stop_strings: tuple[str, ...] = ()
    action_regex: str = ""
    prefix_length: int = 0

    @property
    def grammar(self) -> JobGrammar:
        """The constraints of the action; jobs that share a program have equal ones."""
        return self.allowed_token_regex, self.stop_strings, self.action_regex


class Row(NamedTuple):
    """One sampled action.

    Fields:
      ids: token ids.
      logps: their log-probabilities.
      removed: the probability that the mask of a strict grammar removed per token, the mean over
        the tokens; None without a strict grammar.
    """

    ids: tuple[int, ...]
    logps: tuple[float, ...]
    removed: float | None = None


@dataclasses.dataclass(frozen=True)
class Shapes:
    """The static shapes of sampling: one program is compiled per shape.

    For each prompt length, batch size and power of two of equal prompts there is one program per
    cache size up to `initial_cache_size`. A batch with a row that may need more tokens has one
    program that starts, and at most one that continues for each size of the cache: 2048 new tokens
    have the sizes 128, 256, 512, 1024, 2048.

    Fields:
      prompt_lengths: bucket sizes of prompts in tokens, ascending. A prompt may be padded to a
        larger one than it needs, in a batch that has room.
      batch_sizes: bucket sizes of batches in prompts per device, ascending. If several devices
        share a batch, a batch of one bucket size in total is possible too, for few prompts. Equal
        prompts of a batch are computed once, and are then one prompt with several rows; the largest
        size also limits these.
      max_new_tokens: maximum of new tokens of any row.
      max_prompt_tokens: maximum of prompt tokens per device, padding included; the smallest batch
        is exempt.
      initial_cache_size: new tokens that a cache holds at first, if a row may need as many; it
        doubles up to `max_new_tokens`, rounded up to a multiple of 16 tokens. A batch of which
        half or more is done continues in a smaller one.
      copies: numbers of rows that one prompt may have in a batch, ascending from 1, if equal
        prompts are computed once. The smallest batch may have any of them, whatever its number of
        rows. Empty: powers of two, which waste few rows but need more programs.
      decode_rows: rows per device that are decoded together in slots, which are refilled as rows
        end (`sampling/engine.py`). 0: batches of prompts, which are not refilled but read a prompt
        once for all of its rows.
      slot_tokens: with `decode_rows`, the most tokens of all slots per device: while a long context
        is decoded, there are fewer slots. 0: always `decode_rows`.
      kept_contexts: with `decode_rows`, the room for contexts whose keys and values are kept from
        round to round of a rollout, in contexts of the largest length per device. Shorter contexts,
        and those that begin equally, take less of it. 0: as much room as all slots have.
    """

    prompt_lengths: Lengths = PROMPT_LENGTHS
    batch_sizes: Lengths = (1, 4, 16, 64)
    max_new_tokens: Count = 64
    max_prompt_tokens: Count = 16384
    initial_cache_size: Count = 128
    copies: Lengths = ()
    decode_rows: Natural = 0
    slot_tokens: Natural = 0
    kept_contexts: Natural = 0

    def __post_init__(self) -> None:
        if self.copies and (self.copies[0] != 1 or sorted({*self.copies}) != [*self.copies]):
            raise UserError(
                f"shapes.copies is {self.copies}: give ascending numbers from 1, such as (1, 8), "
                "or leave it empty"
            )

    @property
    def contexts(self) -> int:
        """The room for kept contexts per device, in contexts of the largest length."""
        if self.kept_contexts or not self.slot_tokens:
            return self.kept_contexts or self.decode_rows
        return max(1, self.slot_tokens // self.longest)

    @property
    def longest(self) -> int:
        """The tokens of the longest prompt with the longest reply."""
        return self.prompt_lengths[-1] + self.max_new_tokens

    def coarse(self, free: int) -> Shapes:
        """Returns the shapes without those that save no time over the next larger one.

        With `decode_rows` all stay, because the sizes of slots have their own lower limits.

        Args:
          free: prompt tokens per device that take negligible time, see `runtime.free_work`.
        """
        if self.decode_rows:
            return self
        lengths, sizes = [self.prompt_lengths[-1]], [self.batch_sizes[-1]]
        for length in reversed(self.prompt_lengths[:-1]):
            next_size, size = (self.max_batch_size(n) for n in (lengths[0], length))
            # A shorter length may allow larger batches.
            if size > next_size or next_size * lengths[0] > free:
                lengths.insert(0, length)
        most_tokens = min(free, self.max_prompt_tokens)
        rows = max(self.copies, default=1)  # per prompt; the smallest batch may have them
        for size in reversed(self.batch_sizes[:-1]):
            tokens = sizes[0] * max(lengths[-1], rows * self.max_new_tokens)
            if tokens > most_tokens:
                sizes.insert(0, size)
        return dataclasses.replace(self, prompt_lengths=tuple(lengths), batch_sizes=tuple(sizes))

    def copies_up_to(self, draws: int) -> Iterator[int]:
        """Yields the numbers of rows per prompt, up to the first one that holds `draws` rows."""
        # Powers of two without end, unless the config lists the numbers.
        numbers = iter(self.copies) if self.copies else map(lambda n: 1 << n, itertools.count())
        for copies in numbers:
            yield copies
            if copies >= draws:
                return

    def bucket_length(self, tokens: int) -> int | None:
        """Returns the smallest prompt length that holds `tokens`; None if none does."""
        return next((n for n in self.prompt_lengths if tokens <= n), None)

    def global_batch_sizes(self, devices: int = 1) -> list[int]:
        """Returns the batch sizes over all devices, ascending; each divides over the devices."""
        # For few prompts: a batch of a bucket size in total, rounded up to the devices.
        small = {-(-n // devices) * devices for n in self.batch_sizes}
        return sorted(small | {n * devices for n in self.batch_sizes})

    def batch_sizes_for(self, length: int, devices: int = 1, copies: int = 1) -> list[int]:
        """Returns the batch sizes over all devices that a prompt length allows, ascending.

        Args:
          length: the padded length of the prompts in tokens.
          devices: the number of devices that share the batch.
          copies: how many equal prompts each prompt of the batch stands for. More than 1 may allow
            no size, because a batch never has more rows than the largest batch without copies.
            A number that `self.copies` lists always allows the smallest batch.
        """
        first, *larger = self.global_batch_sizes(devices)
        limit = self.max_prompt_tokens * devices
        fitting = [first, *(n for n in larger if n * length <= limit)]
        # A number that a config lists must be of use: the smallest batch is exempt here, too.
        rows = max(first * copies if self.copies else 0, first, *larger)
        return [n for n in fitting if copies == 1 or n * copies <= rows]

    def max_batch_size(self, length: int, devices: int = 1) -> int:
        """Returns the largest batch of prompts of a padded length, over all devices."""
        return self.batch_sizes_for(length, devices)[-1]

    def cache_sizes_for(self, limit: int) -> tuple[int, ...]:
        """Returns the sizes that a cache takes until it holds `limit` new tokens."""
        sizes = cache_sizes(self.max_new_tokens, self.initial_cache_size)
        # Fewer tokens than the first size holds have a cache of a power of two of strides.
        first = next((n for n in cache_sizes(sizes[0], 1) if limit <= n), sizes[0])
        return (first, *(n for n, last in zip(sizes[1:], sizes, strict=False) if last < limit))
