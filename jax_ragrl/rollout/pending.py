"""The actions of a request, as jobs of a sampler: token ids in and out."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jax_ragrl.rollout.collect import ActionRequest
from jax_ragrl.rollout.context import action_ids, context_ids, context_texts, reply_ids
from jax_ragrl.rollout.roles import UNCLOSED_THOUGHT, Role
from jax_ragrl.rollout.tree import Action
from jax_ragrl.sampling.jobs import Row, SamplingJob, Shapes
from jax_ragrl.text.thoughts import CLOSE
from jax_ragrl.text.tokenizer import ChatTokenizer

TOO_LONG = "Prompt Too Long"  # the error of an action whose prompt fits no static shape
# The faults of any system, each with a sentence; a system declares its own in the same way.
FAULTS = {
    TOO_LONG: "The prompt exceeds the longest static shape, so nothing was sampled.",
    UNCLOSED_THOUGHT: "The think block never ends.",
}
NO_PREFIX = -1  # the prefix number of actions without a forced prefix


@dataclasses.dataclass
class PendingActions:
    """The actions of a request, some of which are still to be sampled.

    Fields:
      request: the request.
      prompt: the ids of its prompt.
      opening: the think block that the prompt opens, if the role thinks: it belongs to the action.
      jobs: the jobs to sample, each with the number of its rows, by the index of the forced action
        whose beginning they have, or by `NO_PREFIX`.
      actions: the finished actions, by the same numbers.
    """

    request: ActionRequest
    prompt: tuple[int, ...]
    opening: str
    jobs: dict[int, tuple[SamplingJob, int]] = dataclasses.field(default_factory=dict)
    actions: dict[int, list[Action]] = dataclasses.field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        """Whether all actions are finished."""
        return not self.jobs

    def put(self, number: int, rows: Sequence[Row], tokenizer: ChatTokenizer) -> None:
        """Finishes the actions of a job.

        Args:
          number: the key of the job.
          rows: its samples.
          tokenizer: the tokenizer of the policy.
        """
        job, _ = self.jobs.pop(number)
        prefix = job.ids[len(job.ids) - job.prefix_length :]
        self.actions[number] = []
        for row in rows:
            ids = prefix + row.ids
            # A forced prefix was not sampled, so the whole action is scored like a forced one.
            logps = None if prefix else row.logps
            text = self.opening + tokenizer.decode(ids)
            self.actions[number].append(Action(self.prompt, ids, text, logps, removed=row.removed))

    def in_order(self) -> list[Action]:
        """Returns the forced actions in order, then the sampled ones."""
        numbers = [*range(len(self.request.branching.forced_actions)), NO_PREFIX]
        return [action for number in numbers for action in self.actions.get(number, [])]


def pending_actions(
    requests: Sequence[ActionRequest],
    tokenizer: ChatTokenizer,
    shapes: Shapes,
    *,
    greedy: bool = False,
) -> list[PendingActions]:
    """Returns the actions of requests with the jobs that sample them.

    A prompt that is longer than the longest static shape has one action without tokens and with an
    error in place of a job, instead of stopping the batch.

    Args:
      requests: the requests.
      tokenizer: the tokenizer of their policies.
      shapes: the static shapes of sampling.
      greedy: whether temperature 0 replaces the temperature of every role.
    """
    # Encode all texts in one call; prompts are assembled from the encoded texts.
    tokenizer.encode_ahead(text for r in requests for text in context_texts(r.messages, r.history))
    result = []
    for request in requests:
        role, branching = request.role, request.branching
        prompt = context_ids(
            tokenizer, request.messages, request.history, role.as_chat_turns, role.thinking
        )
        opening = tokenizer.opened_thought(prompt) if role.thinking else ""
        own = PendingActions(request, prompt, opening)
        result.append(own)
        # The ids that the rows of each job begin with, and the number of its rows.
        sampled: dict[int, tuple[tuple[int, ...], int]] = {}
        if branching.samples:
            sampled[NO_PREFIX] = (), branching.samples
        for number, forced_action in enumerate(branching.forced_actions):
            # A forced action does not think: it closes a block that is open.
            text = f"{CLOSE}\n\n{forced_action.text}" if opening else forced_action.text
            if forced_action.complete:
                ids = action_ids(tokenizer, text, role.as_chat_turns)
                own.actions[number] = [Action(prompt, ids, opening + text)]
            else:
                sampled[number] = reply_ids(tokenizer, text, role.as_chat_turns), 1
        for number, (prefix, width) in sampled.items():
            job = job_of_role(role, shapes)._replace(
                ids=prompt + prefix,
                # Each forced prefix has its own random stream (a Weyl sequence of the seed).
                seed=(request.seed + 0x9E3779B9 * (number + 1)) % 2**32,
                prefix_length=len(prefix),
            )
            if len(job.ids) > shapes.prompt_lengths[-1]:
                own.actions[number] = [Action((), (), "", (), TOO_LONG)]
            else:
                own.jobs[number] = (job._replace(temperature=0.0) if greedy else job), width
    return result


def job_of_role(role: Role, shapes: Shapes) -> SamplingJob:
    """Returns the sampling job of a role, without a prompt and a seed."""
    sampling = role.sampling
    return SamplingJob(
        ids=(),
        seed=0,
        # The compiled programs take the temperature as an argument; 0 selects the argmax.
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        # A longer action would not fit the caches.
        limit=min(sampling.max_tokens, shapes.max_new_tokens),
        allowed_token_regex="" if role.strict else role.allowed_token_regex,
        stop_strings=role.stop_strings,
        action_regex=role.action_regex if role.strict else "",
    )
