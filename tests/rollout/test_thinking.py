"""Roles that think, whose block is never parsed, and base models, whose `eos` ends no turn."""

import dataclasses

import numpy as np
import pytest

from jax_ragrl.learner.imitation import example
from jax_ragrl.learner.packing import group_turns, lay_out, turns_of
from jax_ragrl.llm.base import MeteredReply, without_thoughts
from jax_ragrl.llm.judge import grade_answers
from jax_ragrl.llm.local import LocalLLM
from jax_ragrl.rollout.collect import ActionRequest, Environment, collect
from jax_ragrl.rollout.context import context_ids
from jax_ragrl.rollout.effects import ModelOutput, Observation
from jax_ragrl.rollout.expand import Branching, ForcedAction, single_chain
from jax_ragrl.rollout.policy import PolicySampler
from jax_ragrl.rollout.roles import UNCLOSED_THOUGHT, ParsedAction, Role, parse_action
from jax_ragrl.run.load import load_job
from jax_ragrl.run.models import load_policies
from jax_ragrl.sampling.sampler import Shapes
from jax_ragrl.sampling.weights import for_sampling
from jax_ragrl.systems.base import ChangedRoles, innermost_system
from jax_ragrl.types import LLMRequest, Message, Question
from tests.jobs import config_job, config_values
from tests.model_folders import base_model
from tests.rollout.tape import ANN, BOB, Tape, system
from tests.thinking import ALWAYS, SWITCHED, thinking_tokenizer

BLOCK = "<think>\nOne hop.\n</think>\n\n"
USER = (Message("user", "Who?"),)


def echo(text: str) -> ParsedAction:
    return ParsedAction("echo", (text,), thought="own")


THINKS = Role("role", echo, thinking=True)


def test_the_grammar_reads_what_follows_the_block():
    parsed = parse_action(THINKS, f"{BLOCK}[LLM]")
    assert parsed.args == ("[LLM]",) and parsed.text == "[LLM]"
    # C-3PO and OPERA show thoughts in later prompts; a block must not enter them.
    assert parsed.thought == "own"
    unclosed = parse_action(THINKS, "<think>One hop. [LLM]")
    assert (unclosed.valid, unclosed.error, unclosed.thought) == (False, UNCLOSED_THOUGHT, "")


@pytest.mark.parametrize("changes", [{"thinking": False}, {"reads_thoughts": True}])
def test_a_role_without_thinking_or_with_think_tags_reads_the_whole_text(changes):
    role = dataclasses.replace(THINKS, **changes)
    text = f"{BLOCK}[LLM]"
    assert parse_action(role, text) == ParsedAction("echo", (text,), thought="own", text=text)


@pytest.mark.parametrize("name", ["c3po", "coda", "mao_arag", "mmoa_rag", "opera", "search_r1"])
def test_the_config_key_sets_roles_in_training_and_evaluation(name):
    values = config_values(f"tiny/{name}")
    plain, job = load_job(values), load_job(values | {"thinking": "on"})
    assert not any(role.thinking for role in plain.recipe.system.roles.values())
    for recipe_system in (job.recipe.system, job.recipe.evaluation_system):
        for role in recipe_system.roles.values():
            # A grammar mask excludes the tokens of a block.
            assert role.thinking == (not role.allowed_token_regex)
            assert role.reads_thoughts == (name in ("coda", "search_r1"))
    assert innermost_system(job.recipe.system) == innermost_system(plain.recipe.system)


def test_earlier_blocks_stay_in_a_context_that_only_grows():
    chat = thinking_tokenizer(SWITCHED)
    first = tuple(chat.chat(USER, thinking=True))
    action = (*chat.encode(f"{BLOCK}film"), chat.stop_ids[0])
    history = (ModelOutput(action), Observation("directed"))
    context = context_ids(chat, USER, history, True, thinking=True)
    assert context[: len(first) + len(action)] == first + action


def test_the_whole_block_is_trained():
    texts = {"router": [f"{BLOCK}[Retrieval] Ann"], "filter": [f"{BLOCK}Thought: t\nAction: [1]"]}
    thinks = ChangedRoles(system(), lambda role: dataclasses.replace(role, thinking=True))
    forest = collect(thinks, single_chain, (ANN,), Tape(texts).environment())
    (leaf,) = [record for record in forest.records if record.role == "leaf"]
    assert leaf.finish_reason == "answered"
    ones_N = np.ones(len(forest.records), np.float32)
    for turn in turns_of(forest, ones_N, ones_N):
        assert bytes(turn.ids).decode().startswith(BLOCK)


def test_a_forced_action_closes_the_block_that_its_prompt_opens():
    chat = thinking_tokenizer(ALWAYS)
    branching = Branching(forced_actions=(ForcedAction("[LLM]"),), samples=0)
    request = ActionRequest(THINKS, USER, branching, seed=0)
    ((action,),) = PolicySampler({}, chat).sample([request])
    turn = chat._hf.decode([*action.prompt_ids, *action.ids])
    assert turn.endswith("assistant\n<think>\n</think>\n\n[LLM]<|im_end|>")
    assert parse_action(THINKS, action.text).args == ("[LLM]",)
    plain = dataclasses.replace(THINKS, thinking=False)
    ((action,),) = PolicySampler({}, chat).sample([request._replace(role=plain)])
    assert action.text == "[LLM]"


def test_systems_and_judges_read_replies_without_reasoning_which_is_still_counted():
    tape = Tape({"router": ["[No Retrieval]"]}, replies={"answer_direct": f"{BLOCK}Ulm"})
    forest = collect(system(), single_chain, (ANN,), tape.environment())
    (leaf,) = [record for record in forest.records if record.role == "leaf"]
    assert leaf.answer == "Ulm"
    judge = Tape({}, replies={"judge": "<think>Is it true?</think>False"})
    question = Question("q", "Where?", ("Ulm",))
    assert grade_answers(judge, [question], ["Rom"]).tolist() == [0.0]
    for text in (f"{BLOCK}Ulm\ufffd", "Ulm\ud83d"):
        (reply,) = without_thoughts([MeteredReply(text, 3, 9)])
        assert reply == "Ulm\ufffd" and (reply.prompt_tokens, reply.completion_tokens) == (3, 9)


def test_a_local_models_reply_begins_with_the_block_that_its_prompt_opens(monkeypatch):
    chat = thinking_tokenizer(ALWAYS)
    ids = tuple(chat.encode("Ann\n</think>\n\nUlm"))
    jobs = []

    def sample(model, tokenizer, requests, width, shapes):
        jobs.extend(requests)
        return [[(ids, ())] for _ in requests]

    monkeypatch.setattr("jax_ragrl.llm.local.sample_jobs", sample)
    request = LLMRequest("answer", USER)
    shapes = PolicySampler({}, chat).shapes
    for thinking, reply in ((True, "<think>\nAnn\n</think>\n\nUlm"), (False, chat.decode(ids))):
        llm = LocalLLM(None, chat, shapes, thinking=thinking)
        assert llm.complete([request]) == [reply]
        assert jobs[-1].ids == tuple(chat.chat(USER, thinking=thinking))


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
