"""The values that each numeric key of a config may have, in one table.

`schema.build` checks them when a config is read. A key that the table lacks, such as one of a
system outside of this package, must be finite.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from jax_ragrl.errors import UserError


class Range(NamedTuple):
    """The allowed values of a number, or of each number in a list.

    Fields:
      low: the smallest value.
      high: the largest value.
      above: whether the value must be above `low`.
      below: whether the value must be below `high`.
      others: further values.
      ascending: whether the numbers of a list must ascend.
    """

    low: float = -math.inf
    high: float = math.inf
    above: bool = False
    below: bool = False
    others: tuple[float, ...] = ()
    ascending: bool = False

    def __contains__(self, value: object) -> bool:
        """Whether a number is allowed; NaN never is."""
        if not isinstance(value, int | float) or math.isnan(value):
            return False
        # Open ends are for values that would divide by zero or never end.
        fits_low = value > self.low if self.above else value >= self.low
        fits_high = value < self.high if self.below else value <= self.high
        # Infinity would be in a range without an end; only a listed one is meant.
        return value in self.others or (fits_low and fits_high and math.isfinite(value))

    def __str__(self) -> str:
        """The allowed values in words."""
        parts = []
        if self.low > -math.inf:
            parts.append(f"{'above' if self.above else 'at least'} {self.low:g}")
        if self.high < math.inf:
            parts.append(f"{'below' if self.below else 'at most'} {self.high:g}")
        # Listed values have a meaning of their kind, such as -1 for the rest of a mesh.
        parts += [f"or {value:g}" for value in self.others]
        return ", ".join(["a finite number", *parts])


COUNT, POSITIVE = Range(1), Range(0, above=True)
NATURAL = NOT_NEGATIVE = Range(0)
SHARE, BELOW_ONE = Range(0, 1), Range(0, 1, below=True)
PROBABILITY = Range(0, 1, above=True)
LENGTHS = Range(1, ascending=True)
PENALTY = Range(high=0)

# By name, or `Class.name` if the name has another meaning in that class.
RANGES: Mapping[str, Range] = {
    # The length of a run, and its parts.
    **dict.fromkeys(
        "steps questions_per_step save_every eval_every save_trees_every epochs "
        "minibatches batch_size tokens_per_step log_every questions_per_world period "
        "patience baseline_steps".split(),
        COUNT,
    ),
    "Run.steps": NATURAL,
    "Run.patience": NATURAL,
    "staleness": SHARE,
    "WarmStart.steps": NATURAL,
    "WarmStart.save_every": NATURAL,
    "Finetune.save_every": NATURAL,
    "Warmup.save_every": NATURAL,
    **dict.fromkeys(
        "seed known_world_seed first_world_seed dev_questions test_questions trees_per_save "
        "max_train_per_file joint_steps known_facts_per_world max_batch_halvings train_per_file "
        "evaluation_depth role_gradients_every token_budget num_tokens".split(),
        NATURAL,
    ),
    "role_periods": COUNT,
    # The objective and the optimizer.
    "eps_low": PROBABILITY,
    "eps_high": POSITIVE,
    "dual_clip": Range(1, above=True),
    **dict.fromkeys("gamma lam final_lr_fraction".split(), SHARE),
    **dict.fromkeys("warmup_fraction b1 b2".split(), BELOW_ONE),
    **dict.fromkeys(
        "importance_weight_cap value_coefficient entropy_coefficient "
        "role_weights coefficient target min_coefficient max_coefficient policy_lr "
        "value_lr weight_decay kl_coefficient margin".split(),
        NOT_NEGATIVE,
    ),
    **dict.fromkeys("value_clip horizon max_grad_norm beta alpha learning_rate".split(), POSITIVE),
    "prompt_loss_weight": NOT_NEGATIVE,
    "rank": COUNT,
    # Devices and shapes.
    "mesh": Range(1, others=(-1,)),
    **dict.fromkeys("prompt_lengths batch_sizes row_lengths copies".split(), LENGTHS),
    **dict.fromkeys(
        "max_new_tokens max_prompt_tokens initial_cache_size tokens_per_device".split(), COUNT
    ),
    **dict.fromkeys("decode_rows slot_tokens kept_contexts".split(), NATURAL),
    # Data, retrievers and language models.
    **dict.fromkeys("size hops candidates concurrency passages_per_search".split(), COUNT),
    "overlap": NATURAL,
    **dict.fromkeys("famous_fraction recall b noise confusion".split(), SHARE),
    "k1": NOT_NEGATIVE,
    "weights": POSITIVE,
    "retries": NATURAL,
    "timeout": POSITIVE,
    "LocalLLMConfig.max_tokens": NATURAL,
    "threshold": POSITIVE,
    # Both ends of a bound may be open.
    "bounds": Range(others=(-math.inf, math.inf)),
    # Systems.
    **dict.fromkeys(
        "top_k max_depth max_documents roadmaps max_tokens width rollouts group_size max_turns "
        "max_executor_turns rewriter_max_tokens selector_max_tokens generator_max_tokens "
        "max_answer_words reply_tokens".split(),
        COUNT,
    ),
    **dict.fromkeys(
        "branching_depth router_samples min_plan_steps max_plan_steps max_rewrites".split(), NATURAL
    ),
    # Scores of a policy are divided by the temperature.
    "temperature": POSITIVE,
    "top_p": PROBABILITY,
    **dict.fromkeys("branching_probability ndcg_power".split(), SHARE),
    **dict.fromkeys("Penalties.rewriter Penalties.selector Penalties.generator".split(), PENALTY),
    **dict.fromkeys(
        "format_weight refinement_weight Costs.alpha token_weight retrieval_weight turn_weight "
        "dollars_per_1k_prompt_tokens dollars_per_1k_completion_tokens".split(),
        NOT_NEGATIVE,
    ),
    **dict.fromkeys(
        "dollars_per_million_prompt_tokens dollars_per_million_completion_tokens "
        "dollars_per_search".split(),
        NOT_NEGATIVE,
    ),
    "dollars_per_cost_unit": POSITIVE,
    # The sizes of a decoder that `ragrl warmup tiny` trains.
    **dict.fromkeys(
        "vocab_size hidden_size intermediate_size num_layers num_heads num_kv_heads head_dim "
        "sliding_window max_positions scan_unroll original_max_positions".split(),
        COUNT,
    ),
    "sliding_layers": NATURAL,
    **dict.fromkeys(
        "rope_theta rms_norm_eps low_freq high_freq beta_fast beta_slow attention_factor".split(),
        POSITIVE,
    ),
    "factor": Range(1),
}


def range_of(cls: type, name: str) -> Range:
    """Returns the allowed values of a numeric field of a dataclass."""
    return RANGES.get(f"{cls.__name__}.{name}", RANGES.get(name, Range()))


def check_range(cls: type, name: str, value: Any, where: str) -> None:
    """Checks a value of a config; texts, sections and None have no range.

    Args:
      cls: the dataclass that has the key.
      name: the key.
      value: its value.
      where: its dotted path, for the message.

    Raises:
      UserError: a number is not allowed, is not finite, or a list that must ascend does not.
    """
    numbers, limits = list(_numbers(value)), range_of(cls, name)
    if wrong := [number for number in numbers if number not in limits]:
        inside = "" if value == wrong[0] or len(numbers) == 1 else f" and has {wrong[0]}"
        raise UserError(f"{where} is {value}{inside}: use {limits}")
    if limits.ascending and numbers != sorted(set(numbers)):
        raise UserError(f"{where} is {value}: list the numbers in ascending order, each once")


def _numbers(value: Any) -> Iterator[float]:
    """Yields the numbers of a value; a section in a list has its own table."""
    # In Python, True is an int; a `NamedTuple` is a section.
    if isinstance(value, int | float) and not isinstance(value, bool):
        yield value
    elif type(value) in (list, tuple):
        for entry in value:
            yield from _numbers(entry)
