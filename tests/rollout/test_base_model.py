"""Search-R1 with a base model, whose `eos` is not the token that ends turns of its template."""

import json

import numpy as np
import pytest

from jax_ragrl.export.weights import export
from jax_ragrl.learner.imitation import example
from jax_ragrl.learner.packing import group_turns, lay_out, turns_of
from jax_ragrl.rollout.collect import Environment, collect
from jax_ragrl.rollout.context import context_ids
from jax_ragrl.rollout.effects import ModelOutput, Observation
from jax_ragrl.rollout.expand import Branching, ForcedAction
from jax_ragrl.rollout.policy import PolicySampler
from jax_ragrl.run.models import load_policies
from jax_ragrl.sampling.sampler import Shapes
from jax_ragrl.sampling.weights import for_sampling
from jax_ragrl.types import Message
from tests.jobs import config_job
from tests.model_folders import base_model
from tests.rollout.tape import ANN, BOB, Tape

END, TEXT_END = 2, 0  # <|im_end|> and <|endoftext|>, the tokenizer's eos
FORCED = ForcedAction("<search>cats</search>")


class Recorder:
    def __init__(self, sampler: PolicySampler):
        self.sampler, self.calls = sampler, []

    def sample(self, requests):
        actions = self.sampler.sample(requests)
        self.calls += zip(requests, actions, strict=True)
        return actions


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return base_model(tmp_path_factory.mktemp("models") / "base")


@pytest.fixture(scope="module")
def job(folder):
    return config_job("tiny/search_r1", {"policy": folder})


@pytest.fixture(scope="module")
def loaded(job):
    return load_policies(job, None)


def template_ids(tokenizer, messages) -> list[int]:
    """The ids of Transformers, which renders and encodes the conversation as a whole."""
    conversation = [message._asdict() for message in messages]
    text = tokenizer._hf.apply_chat_template(
        conversation, tokenize=False, add_generation_prompt=True
    )
    return tokenizer._hf(text, add_special_tokens=False)["input_ids"]


@pytest.mark.slow
def test_contexts_equal_the_template_token_by_token_in_sampling_and_training(job, loaded):
    policies, tokenizer = loaded
    shapes = Shapes((80, 160, 288), batch_sizes=(8,), max_new_tokens=16)
    recorder = Recorder(PolicySampler(for_sampling(policies), tokenizer, shapes, greedy=True))
    environment = Environment(recorder, Tape({}), Tape({}), tokenizer.count)

    def forced_first(effect, question):
        # A search that the policy of C-3PO would not write, and a sampled action beside it.
        return Branching(1) if effect.history else Branching(1, (FORCED,))

    forest = collect(job.recipe.system, forced_first, (ANN, BOB), environment)
    # 1. Sampling: every prompt is the template's rendering of the conversation so far.
    several = 0
    for request, actions in recorder.calls:
        messages = [*request.messages]
        for segment in request.history:
            is_action = isinstance(segment, ModelOutput)
            text = tokenizer.decode(segment.ids) if is_action else segment.text
            messages.append(Message("assistant" if is_action else "user", text))
        several += sum(isinstance(segment, Observation) for segment in request.history)
        for action in actions:
            assert list(action.prompt_ids) == template_ids(tokenizer, messages)
    assert several >= 4
    forced = [action for _, actions in recorder.calls for action in actions if action.logps is None]
    assert forced and all(action.ids[-1] == END for action in forced)
    # 2. Training: the packed rows hold these contexts and no other end of a turn.
    turns = turns_of(forest, *np.ones((2, len(forest.records)), np.float32))
    assert any(turn.previous >= 0 for turn in turns)
    groups = group_turns(turns, job.packing)
    for batch in lay_out(groups, [*job.recipe.system.roles], job.packing):
        ids = np.asarray(batch.rows.ids_RL)
        # Padding has the id of <|endoftext|> too, but only after the last token of a row.
        assert all(TEXT_END not in np.trim_zeros(row, "b") for row in ids)


def test_supervised_targets_and_other_stop_tokens_end_as_the_template_ends_a_turn(loaded):
    _, tokenizer = loaded
    user, reply = Message("user", "Who?"), Message("assistant", "Ann.")
    sample = example(tokenizer, [user], reply.content, "agent")
    context = [*sample.prompt, *sample.target]
    assert context == template_ids(tokenizer, [user, reply])[: len(context)]
    assert sample.target[-1] == END
    action = (*tokenizer.encode("Ann."), TEXT_END)
    history = (ModelOutput(action), Observation("Why?"))
    context = context_ids(tokenizer, (Message("user", "Who?"),), history, True)
    expected = [Message("user", "Who?"), Message("assistant", "Ann."), Message("user", "Why?")]
    # The sampled token stays, because the policy is trained in the context that it was sampled in.
    assert [i for i in context if i != TEXT_END] == template_ids(tokenizer, expected)


def test_an_export_stops_at_the_end_of_a_turn(folder, loaded, tmp_path):
    (policy,) = loaded[0].values()
    out = export(policy, tmp_path / "out", folder).folder
    for name in ("config.json", "generation_config.json"):
        assert json.loads((out / name).read_text())["eos_token_id"] == [END, TEXT_END]
