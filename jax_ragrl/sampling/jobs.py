"""Requests to a sampler, and the static shapes that they are padded to."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

from jax_ragrl.config.ranges import Count, Lengths, Natural
from jax_ragrl.sampling.decode import CHECK_STRIDE

FIRST_CACHE = 128  # new tokens that a cache holds at first
PROMPT_LENGTHS = (64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)


# The constraints of an action: `allowed_token_regex`, `stop_strings` and `action_regex` of its job.
JobGrammar = tuple[str, tuple[str, ...], str]


class SamplingJob(NamedTuple):
    """One prompt, a forced prefix of the action included, and its sampling parameters.

    `seed` is below 2**32. A `temperature` of 0 is greedy, and a `top_p` of 1 switches that filter
    off. `limit` is the maximum of new tokens. The action has only tokens whose text matches
    `allowed_token_regex`, if it is not empty, and ends at the first token that completes one of
    `stop_strings`; or the whole action matches `action_regex`. Its first `prefix_length` ids are
    the last ones of the prompt.
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

    Each prompt length, batch size and power of two of equal prompts has a program that runs prompts
    and, for each size of the cache, one that decodes: 2048 new tokens have the sizes 128, 256, 512,
    1024, 2048. A batch of which half or more is done continues in a smaller one.

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
      kept_contexts: the room for contexts whose keys and values are kept from turn to turn, in
        contexts of the largest length. Shorter contexts, and those that begin equally, take less of
        it. 0, and if several devices share a batch: none are kept.
    """

    prompt_lengths: Lengths = PROMPT_LENGTHS
    batch_sizes: Lengths = (1, 4, 16, 64)
    max_new_tokens: Count = 64
    max_prompt_tokens: Count = 16384
    kept_contexts: Natural = 0

    @property
    def longest(self) -> int:
        return self.prompt_lengths[-1] + self.max_new_tokens

    def coarse(self, free: int) -> Shapes:
        """Returns the shapes without those that save no time over the next larger one.

        `free` prompt tokens per device take negligible time, see `runtime.free_work`.
        """
        lengths, sizes = [self.prompt_lengths[-1]], [self.batch_sizes[-1]]
        for length in reversed(self.prompt_lengths[:-1]):
            next_size, size = (self.max_batch_size(n) for n in (lengths[0], length))
            # A shorter length may allow larger batches.
            if size > next_size or next_size * lengths[0] > free:
                lengths.insert(0, length)
        most_tokens = min(free, self.max_prompt_tokens)
        for size in reversed(self.batch_sizes[:-1]):
            if sizes[0] * max(lengths[-1], self.max_new_tokens) > most_tokens:
                sizes.insert(0, size)
        return dataclasses.replace(self, prompt_lengths=tuple(lengths), batch_sizes=tuple(sizes))

    def copies_up_to(self, draws: int) -> Iterator[int]:
        """Yields the numbers of rows per prompt, up to the first one that holds `draws` rows."""
        copies = 1
        while copies < draws:
            yield copies
            copies *= 2
        yield copies

    def bucket_length(self, tokens: int) -> int | None:
        return next((n for n in self.prompt_lengths if tokens <= n), None)

    def global_batch_sizes(self, devices: int = 1) -> list[int]:
        """Returns the batch sizes over all devices, ascending; each divides over the devices."""
        # For few prompts: a batch of a bucket size in total, rounded up to the devices.
        small = {-(-n // devices) * devices for n in self.batch_sizes}
        return sorted(small | {n * devices for n in self.batch_sizes})

    def batch_sizes_for(self, length: int, devices: int = 1, copies: int = 1) -> list[int]:
        """Returns the batch sizes over all devices that a padded prompt length allows, ascending.

        Each prompt stands for `copies` equal ones. More than 1 may allow no size, because a batch
        never has more rows than the largest batch without copies.
        """
        first, *larger = self.global_batch_sizes(devices)
        limit = self.max_prompt_tokens * devices
        fitting = [first, *(n for n in larger if n * length <= limit)]
        rows = max([first, *larger])
        return [n for n in fitting if copies == 1 or n * copies <= rows]

    def max_batch_size(self, length: int, devices: int = 1) -> int:
        return self.batch_sizes_for(length, devices)[-1]

    def cache_sizes_for(self, limit: int) -> tuple[int, ...]:
        """Returns the sizes that a cache takes until it holds `limit` new tokens.

        All are multiples of `CHECK_STRIDE`: a program that checks its rows at this interval never
        runs past the end of its cache, and the kernel of a GPU can divide the cache into blocks of
        keys (`prefix_attention.KEY_BLOCKS`).
        """
        sizes = [CHECK_STRIDE]
        while sizes[-1] < min(limit, FIRST_CACHE):
            sizes[-1] *= 2
        while sizes[-1] < limit:
            sizes.append(2 * sizes[-1])
        largest = CHECK_STRIDE * -(-self.max_new_tokens // CHECK_STRIDE)
        return tuple(min(n, largest) for n in sizes)
