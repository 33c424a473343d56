"""Replays a tape of ragged, multi-turn, branching work, and counts what the sampler does.

    python docs/lab/tape.py [--conversations N] [--new TOKENS] [--kept-contexts N]

The tape fixes the conversations: their instructions, questions, turns, observations and branches.
The replies come from a small policy with random weights that ends a reply at random, so their
lengths differ as geometric numbers do, and branches of a turn end at unequal times.

The result is counters, which do not depend on the machine:
  - row-steps per useful token: 1 if no decode step of a row is wasted;
  - prefilled tokens per distinct token: the tokens that were run as prompts, padding included, per
    token of the trie of all contexts. Below 1 if replies are not run again in the next prompt.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import time
import types
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from jax_ragrl.models.config import DecoderConfig
from jax_ragrl.models.decoder import Decoder
from jax_ragrl.sampling.batches import SamplingCounters
from jax_ragrl.sampling.sampler import JobSampler, Row, SamplingJob, Shapes
from jax_ragrl.sampling.weights import for_sampling

VOCABULARY = 512
# Of 512 tokens that are about equally likely, 10 end a reply: its mean is about 50 tokens.
STOPS = tuple(range(10))
TOKENIZER: Any = types.SimpleNamespace(
    stop_ids=STOPS, allowed_tokens=lambda _: None, stop_transitions=lambda _: None
)
POLICY = DecoderConfig(
    vocab_size=VOCABULARY,
    hidden_size=32,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    intermediate_size=64,
)


@dataclasses.dataclass(frozen=True)
class TapeWork:
    """What is replayed.

    Fields:
      conversations: how many conversations of the tape are replayed; 0: all.
      new: maximum of new tokens per reply.
      kept_contexts: as in `Shapes`.
    """

    conversations: int = 0
    new: int = 512
    kept_contexts: int = 64

    def shapes(self) -> Shapes:
        """The static shapes of the sampler."""
        return Shapes(
            prompt_lengths=(256, 512, 1024, 2048),
            batch_sizes=(1, 4, 16, 64),
            max_new_tokens=self.new,
            max_prompt_tokens=32768,
            kept_contexts=self.kept_contexts,
        )


class Branch(NamedTuple):
    """A live branch of a conversation.

    Fields:
      conversation: its number.
      copy: the number of the rollout of the conversation.
      path: the numbers of the siblings that led here.
      ids: the prompt of the next turn.
    """

    conversation: int
    copy: int
    path: tuple[int, ...]
    ids: tuple[int, ...]


def bench_tape(work: TapeWork) -> dict[str, Any]:
    """Replays the tape."""
    tape = read_tape(work.conversations)
    model = for_sampling({"policy": Decoder(POLICY, rngs=nnx.Rngs(0))})["policy"]
    sampler, start = JobSampler(model, TOKENIZER, work.shapes()), time.process_time()
    rounds = [*replay(tape, sampler, work.new)]
    return {
        "device": jax.devices()[0].device_kind,
        **dataclasses.asdict(work),
        "replies": sum(len(siblings) for _, rows in rounds for siblings in rows),
        **summary(sampler.counters, [job.ids for jobs, _ in rounds for job in jobs]),
        "batches_of_jobs": len(rounds),
        "cpu_s": round(time.process_time() - start, 1),
    }


def read_tape(conversations: int = 0) -> dict[str, Any]:
    """Returns the tape: lengths in tokens of instructions, questions and observations.

    Args:
      conversations: how many of its conversations to return; 0: all.
    """
    tape: dict[str, Any] = json.loads(pathlib.Path(__file__).with_suffix(".json").read_text())
    tape["conversations"] = tape["conversations"][: conversations or None]
    return tape


def replay(
    tape: dict[str, Any], sampler: JobSampler, limit: int
) -> Iterator[tuple[list[SamplingJob], list[list[Row]]]]:
    """Yields the jobs and the rows of each batch of jobs, round by round.

    Args:
      tape: as `read_tape` returns it.
      sampler: samples the replies.
      limit: maximum of new tokens per reply.
    """
    live = [
        Branch(number, copy, (), _opening(tape, number))
        for number, conversation in enumerate(tape["conversations"])
        for copy in range(conversation["copies"])
    ]
    while live:
        turns = [tape["conversations"][b.conversation]["turns"][len(b.path)] for b in live]
        following: list[Branch] = []
        # Like a policy sampler, one call per number of siblings.
        for width in sorted({turn["siblings"] for turn in turns}):
            pairs = [p for p in zip(live, turns, strict=True) if p[1]["siblings"] == width]
            jobs = [SamplingJob(b.ids, _seed(b), 1.0, 1.0, limit) for b, _ in pairs]
            rows = sampler.start(jobs, width)()
            yield jobs, rows
            for (branch, turn), siblings in zip(pairs, rows, strict=True):
                for i, row in enumerate(siblings[: turn["follow"]]):
                    following += _next(tape, branch, i, row)
        live = following


def _opening(tape: dict[str, Any], number: int) -> tuple[int, ...]:
    conversation = tape["conversations"][number]
    return _role(tape, conversation["turns"][0]) + _question(tape, number)


def _next(tape: dict[str, Any], branch: Branch, sibling: int, row: Row) -> list[Branch]:
    """Returns the branch that follows a reply; none after the last turn."""
    turns = tape["conversations"][branch.conversation]["turns"]
    path = (*branch.path, sibling)
    if len(path) == len(turns):
        return []
    turn, next_turn = turns[len(path) - 1], turns[len(path)]
    # Observations depend on the path alone, not on the order of work.
    name = ("observation", branch.conversation, branch.copy, path)
    observation = _tokens(name, turn["observation"])
    if next_turn["role"] == turn["role"]:
        ids = branch.ids + row.ids + observation
    else:  # a new context: the next role reads the question and the observation
        ids = _role(tape, next_turn) + _question(tape, branch.conversation) + observation
    return [branch._replace(path=path, ids=ids)]


def _role(tape: dict[str, Any], turn: dict[str, int]) -> tuple[int, ...]:
    return _tokens(("role", turn["role"]), tape["roles"][turn["role"]])


def _question(tape: dict[str, Any], number: int) -> tuple[int, ...]:
    return _tokens(("question", number), tape["conversations"][number]["question"])


def _tokens(name: tuple[Any, ...], count: int) -> tuple[int, ...]:
    """Returns random tokens that are a function of a name."""
    rng = np.random.default_rng(zlib.crc32(repr(name).encode()))
    return tuple(rng.integers(len(STOPS), VOCABULARY, count).tolist())


def _seed(branch: Branch) -> int:
    return zlib.crc32(repr((branch.conversation, branch.copy, branch.path)).encode())


def summary(counters: SamplingCounters, prompts: Sequence[tuple[int, ...]]) -> dict[str, Any]:
    """Returns the counters with their ratios."""
    distinct = distinct_tokens(prompts)
    return dataclasses.asdict(counters) | {
        "distinct_tokens": distinct,
        "row_steps_per_token": round(counters.row_steps / counters.tokens, 3),
        "prefill_per_distinct_token": round(counters.prefill_tokens / distinct, 3),
    }


def distinct_tokens(prompts: Sequence[tuple[int, ...]]) -> int:
    """Returns the number of tokens in the trie of some prompts."""
    count, last = 0, np.array([], np.int32)
    for ids in sorted(set(prompts)):
        own = np.array(ids, np.int32)
        n = min(len(own), len(last))
        common = np.cumprod(own[:n] == last[:n]).sum()
        count, last = count + len(ids) - int(common), own
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    for field in dataclasses.fields(TapeWork):
        option = f"--{field.name.replace('_', '-')}"
        parser.add_argument(option, type=int, default=field.default)
    print(json.dumps(bench_tape(TapeWork(**vars(parser.parse_args())))))


if __name__ == "__main__":
    main()
