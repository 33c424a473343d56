"""Counters of sampling work: how much of it was useful, and how much was padding or repetition."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class SamplingCounters:
    """Work of a sampler so far, on all devices of a process.

    Fields:
      tokens: new tokens that belong to an action.
      row_steps: rows times decode steps; a row that is done, or that is padding, counts as well.
      prefill_tokens: tokens of prompts that were run, padding included.
      programs: calls of a compiled program that decodes or prefills.
    """

    tokens: int = 0
    row_steps: int = 0
    prefill_tokens: int = 0
    programs: int = 0
