"""The action sampler of a run: policies as writers of actions, token ids in and out."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from jax_ragrl.errors import UserError
from jax_ragrl.models.split import SplitModel
from jax_ragrl.rollout.collect import ActionRequest
from jax_ragrl.rollout.context import action_ids, context_ids, context_texts
from jax_ragrl.rollout.engine import EngineSampler
from jax_ragrl.rollout.roles import TOO_LONG, Role
from jax_ragrl.rollout.tree import Action
from jax_ragrl.sampling.batches import SamplingCounters
from jax_ragrl.sampling.jobs import SamplingJob
from jax_ragrl.sampling.sampler import JobSampler, Shapes
from jax_ragrl.text.thoughts import CLOSE
from jax_ragrl.text.tokenizer import ChatTokenizer

SamplerModels = Mapping[str, SplitModel]


class PendingActions(NamedTuple):
    """The actions of a request that are still to be sampled.

    Fields:
      job: the sampling job of each; their prompt, and the forced prefix that they begin with.
      opening: the think block that the prompt opens, if the role thinks: it belongs to the action.
      actions: the list that the actions go to.
    """

    job: SamplingJob
    width: int
    prompt: tuple[int, ...]
    opening: str
    actions: list[Action]


@dataclasses.dataclass(frozen=True)
class PolicySampler:
    """Samples the actions of each role with the policy of the role.

    Fields:
      models: split decoders by the name of their policy.
      shapes: no action is longer than `shapes.max_new_tokens`, whatever its role allows.
      greedy: whether temperature 0 replaces the temperature of every role.
      samplers: those that policies without an entry in `models` act by, such as an `EngineSampler`.
    """

    models: SamplerModels
    tokenizer: ChatTokenizer
    shapes: Shapes = Shapes()
    greedy: bool = False
    counters: SamplingCounters = dataclasses.field(default_factory=SamplingCounters)
    # By policy; that of a model is added at its first use, and keeps contexts from round to round.
    samplers: dict[str, JobSampler | EngineSampler] = dataclasses.field(
        repr=False, compare=False, default_factory=dict
    )

    def sample(self, requests: Sequence[ActionRequest]) -> list[list[Action]]:
        """Returns for each request the forced actions in order, then the sampled ones.

        A prompt longer than the longest static shape yields one action with no tokens and an error.
        """
        texts = (text for r in requests for text in context_texts(r.messages, r.history))
        self.tokenizer.encode_ahead(texts)
        # By request: a list per forced action, and last the list of the samples.
        groups = [[list[Action]() for _ in (*r.branching.forced_actions, None)] for r in requests]
        batches: dict[tuple[str, int], list[PendingActions]] = {}  # by policy and number of rows
        for request, own in zip(requests, groups, strict=True):
            for pending in self._prepare(request, own):
                batches.setdefault((request.role.policy, pending.width), []).append(pending)
        # Start all jobs before waiting for one, so that the device is busy while rows are read.
        started = []
        for policy, width in sorted(batches):
            if policy not in self.samplers:
                of_model = self.models[policy], self.tokenizer, self.shapes, self.counters
                self.samplers[policy] = JobSampler(*of_model)
            batch = batches[policy, width]
            jobs = [pending.job for pending in batch]
            started.append((batch, self.samplers[policy].start(jobs, width)))
        for batch, wait in started:
            for (job, _, prompt, opening, actions), rows in zip(batch, wait(), strict=True):
                prefix = job.ids[len(job.ids) - job.prefix_length :]
                for row in rows:
                    ids = prefix + row.ids
                    # A forced prefix was not sampled, so the whole action is scored like a forced
                    # one.
                    logps = None if prefix else row.logps
                    text = opening + self.tokenizer.decode(ids)
                    actions.append(Action(prompt, ids, text, logps, removed=row.removed))
        return [[action for actions in own for action in actions] for own in groups]

    def _prepare(
        self, request: ActionRequest, groups: Sequence[list[Action]]
    ) -> list[PendingActions]:
        """Writes the complete forced actions of a request; returns those to sample."""
        role, branching, tokenizer = request.role, request.branching, self.tokenizer
        prompt = context_ids(
            tokenizer, request.messages, request.history, role.as_chat_turns, role.thinking
        )
        opening = tokenizer.opened_thought(prompt) if role.thinking else ""
        # The ids that actions begin with and their number, by the index of their list.
        sampled: dict[int, tuple[tuple[int, ...], int]] = {}
        if branching.samples:
            sampled[-1] = (), branching.samples
        for number, forced_action in enumerate(branching.forced_actions):
            # A forced action does not think: it closes a block that is open.
            text = f"{CLOSE}\n\n{forced_action.text}" if opening else forced_action.text
            if forced_action.complete:
                ids = action_ids(tokenizer, text, role.as_chat_turns)
                groups[number].append(Action(prompt, ids, opening + text))
            else:
                ids = tuple(tokenizer.encode_action(text, after_prompt=role.as_chat_turns))
                sampled[number] = ids, 1
        pending = []
        for number, (prefix, width) in sampled.items():
            job = SamplingJob(
                ids=prompt + prefix,
                # Each forced prefix has its own random stream (a Weyl sequence of the seed).
                seed=(request.seed + 0x9E3779B9 * (number + 1)) % 2**32,
                # The compiled programs take the temperature as an argument; 0 selects the argmax.
                temperature=0.0 if self.greedy else role.sampling.temperature,
                top_p=role.sampling.top_p,
                # A longer action would not fit the caches.
                limit=min(role.sampling.max_tokens, self.shapes.max_new_tokens),
                allowed_token_regex="" if role.strict else role.allowed_token_regex,
                stop_strings=role.stop_strings,
                action_regex=role.action_regex if role.strict else "",
                prefix_length=len(prefix),
            )
            if len(job.ids) > self.shapes.prompt_lengths[-1]:
                groups[number].append(Action((), (), "", (), TOO_LONG))
            else:
                pending.append(PendingActions(job, width, prompt, opening, groups[number]))
        return pending


def check_grammars(roles: Iterable[Role], tokenizer: ChatTokenizer) -> None:
    """Compiles the grammars of the strict roles among `roles`; the tokenizer caches them.

    Raises:
      UserError: a regular expression cannot be compiled, the tokenizer cannot write it, or even
        the shortest action has more tokens than the role may write.
    """
    for role in (role for role in roles if role.strict):
        shortest = tokenizer.automaton(role.action_regex).tokens_left()
        limit = role.sampling.max_tokens
        if shortest > limit:
            raise UserError(
                f"role {role.name} may write {limit} tokens, but the shortest action of its strict "
                f"grammar has {shortest}: raise the role's maximum of tokens in recipe.system, or "
                "set grammar to 'loose'"
            )
