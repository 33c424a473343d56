"""Whether the policy knows its roles: sampled actions on a few questions, and their prompts.

Searches return passages of the corpus without searching, and a language model on a server is
replaced by a fixed reply, so that nothing is built and nothing is paid for.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jax_ragrl.errors import UserError
from jax_ragrl.llm.base import FixedLLM, FrozenLLM, NoLLM
from jax_ragrl.llm.kinds import NoLLMConfig, WorldReaderConfig
from jax_ragrl.rollout.collect import Environment, collect
from jax_ragrl.rollout.policy import PolicySampler
from jax_ragrl.rollout.roles import TOO_LONG
from jax_ragrl.rollout.tree import Forest
from jax_ragrl.run.config import Job
from jax_ragrl.run.models import load_llm, load_policies, mesh_for
from jax_ragrl.sampling.weights import for_sampling
from jax_ragrl.training.rollout_metrics import valid_samples
from jax_ragrl.types import Hits, Passage, Question
from jax_ragrl.validation.data import DataSample
from jax_ragrl.validation.findings import Finding, Level, guarded

ACTIONS = 16  # sampled per role, at least, if the questions reach the role
QUESTIONS = 8  # per batch
BATCHES = 4  # at most
ENOUGH, FEW = 0.5, 0.1  # shares of valid actions


class SampleRetriever(NamedTuple):
    """Returns passages of the corpus in turn, whatever the query."""

    passages: Sequence[Passage]

    @property
    def fingerprint(self) -> str:
        return "sample"

    def search(self, queries: Sequence[str], k: int) -> list[Hits]:
        # A multiple of the length of the query, so that different queries have different passages.
        count = len(self.passages)
        first = (len(query) * 7919 % count for query in queries)
        rows = ([self.passages[(n + i) % count] for i in range(min(k, count))] for n in first)
        return [Hits(tuple(row), (1.0,) * len(row)) for row in rows]


@guarded("roles")
def check_roles(job: Job, sample: DataSample) -> Iterator[Finding]:
    """Samples actions of each role, and reports valid ones and prompts that would be cut."""
    questions = sample.questions.get("train", ())
    passages = sample.passages or (sample.world.passages if sample.world else ())
    # A server has its own passages: one of usual length stands for them.
    passages = passages or (Passage("sample", "Title", "A sentence of a passage. " * 20),)
    if not questions:
        return
    print(
        "roles: samples actions of each role; the programs of the sampler compile first, which may "
        "take minutes (--quick leaves this check out)",
        file=sys.stderr,
        flush=True,
    )
    forests = list(_forests(job, questions, SampleRetriever(passages), sample))
    yield from _describe_roles(job, forests)
    yield _describe_prompts(job, forests)


def _forests(
    job: Job, questions: Sequence[Question], retriever: SampleRetriever, sample: DataSample
) -> Iterator[Forest]:
    """Yields rollouts of batches of questions until each role has written enough actions."""
    policies, tokenizer = load_policies(job, mesh_for(job))
    sampler = PolicySampler(for_sampling(policies), tokenizer, job.shapes)
    environment = Environment(sampler, retriever, _llm(job, sample), tokenizer.count)
    counts = dict.fromkeys(job.policy_of, 0)
    for first in range(0, min(len(questions), QUESTIONS * BATCHES), QUESTIONS):
        batch = questions[first : first + QUESTIONS]
        # The rollouts of training: the groups of the recipe give more actions per question.
        expander = job.recipe.expander(frozenset(job.policy_of))
        forest = collect(
            job.recipe.system, expander, batch, environment, seed=job.seed,
            rollouts=job.recipe.rollouts, growth=job.recipe.growth,
        )  # fmt: skip
        # Nothing here uses the network, so that a failure is a fault of the set-up.
        if forest.failures:
            raise UserError(f"a rollout failed with: {forest.failures[0]}")
        yield forest
        for role, (_, count) in valid_samples(forest).items():
            counts[role] += count
        if all(count >= ACTIONS for count in counts.values()):
            return


def _llm(job: Job, sample: DataSample) -> FrozenLLM:
    if isinstance(job.llm, NoLLMConfig):
        return NoLLM()  # which names the request of a system that needs a language model
    if isinstance(job.llm, WorldReaderConfig):
        return load_llm(job.llm, sample.world, job.recipe.system.style, job.shapes)
    return FixedLLM("The answer is not known.")


def _describe_roles(job: Job, forests: Sequence[Forest]) -> Iterator[Finding]:
    parts = [valid_samples(forest) for forest in forests]
    for role in job.policy_of:
        pairs = [part[role] for part in parts if role in part]
        count = sum(n for _, n in pairs)
        if not count:
            yield Finding("warning", "roles", f"{role} did not act: its actions are not checked")
            continue
        valid = sum(share * n for share, n in pairs) / count
        text = f"{valid:.0%} of {count} sampled actions of {role} are valid"
        if valid >= ENOUGH:
            yield Finding("ok", "roles", text)
        else:
            level: Level = "error" if valid < FEW else "warning"
            remedy = "begin from a warm start ('ragrl warmup' has the commands)"
            yield Finding(level, "roles", f"{text}: {remedy}")


def _describe_prompts(job: Job, forests: Sequence[Forest]) -> Finding:
    actions = [r.action for forest in forests for r in forest.records if r.action is not None]
    # Sampling and training have their own longest shapes; the shorter one decides.
    longest = min(job.shapes.prompt_lengths[-1], job.packing.row_lengths[-1])
    sizes = [len(action.prompt_ids) + len(action.ids) for action in actions]
    cut = sum(a.error == TOO_LONG or n > job.packing.row_lengths[-1]
              for a, n in zip(actions, sizes, strict=True))  # fmt: skip
    text = f"{cut} of {len(actions)} prompts are longer than {longest} tokens"
    if not cut:
        most = max(sizes, default=0)
        return Finding("ok", "prompts", f"{text}; the longest with its action has {most}")
    remedy = (
        "raise the longest of shapes.prompt_lengths and of packing.row_lengths, use fewer or "
        "shorter passages (data.chunk)"
    )
    # A few cut prompts lose their questions; many make the run meaningless.
    level: Level = "error" if cut > len(actions) / 2 else "warning"
    return Finding(level, "prompts", f"{text}: {remedy}")
