"""`ragrl warmup pool`: a language model acts as a policy, and its actions are scored."""

import dataclasses
import functools
import json
import random

import numpy as np
import pytest

from jax_ragrl.cli.main import main
from jax_ragrl.errors import EffectError, UserError
from jax_ragrl.llm.reader import WorldReader
from jax_ragrl.retrieval.remote import RemoteRetriever
from jax_ragrl.rollout.collect import ActionRequest
from jax_ragrl.rollout.expand import Branching, ForcedAction
from jax_ragrl.rollout.llm_policy import BEGIN, LLMActionSampler
from jax_ragrl.rollout.roles import ParsedAction, Role
from jax_ragrl.systems.c3po import parse_router
from jax_ragrl.systems.opera import Opera, Settings
from jax_ragrl.systems.opera.expert_pool import load_pool, word_cosines
from jax_ragrl.systems.opera.grammar import PLAN
from jax_ragrl.types import LLMRequest, Message, Sampling
from jax_ragrl.warmstart.expert_pool import (
    candidates_file,
    collect_pool,
    pool_rollouts,
    score_candidates,
    similarity_of,
)
from jax_ragrl.warmstart.teachers.opera import Teacher
from tests.llm.server import serving
from tests.tiny import tokenizer
from tests.warmstart.test_teachers import tokenizer as tiny_tokenizer
from tests.warmstart.test_teachers import world


class ScriptedLLM:
    """A scripted language model that records its requests."""

    name = "clerk"

    def __init__(self, reply) -> None:
        self._reply, self.requests = reply, []

    def complete(self, requests):
        self.requests += requests
        return [self._reply(request) for request in requests]


ROLE = Role("plan", lambda text: ParsedAction(text), Sampling(0.7, 1.0, 9))
QUESTION = (Message("user", "who"),)


def test_forced_texts_come_before_the_models_replies():
    llm = ScriptedLLM(lambda request: f"film {request.seed}")
    request = ActionRequest(ROLE, QUESTION, Branching(2, (ForcedAction("who"),)), seed=5)
    (actions,) = LLMActionSampler(llm, tokenizer()).sample([request])
    assert [a.text for a in actions] == ["who", "film 5", "film 6"]
    assert llm.requests == [
        LLMRequest("plan", QUESTION, Sampling(0.7, 1.0, 9), seed) for seed in (5, 6)
    ]
    for action in actions:
        assert tokenizer().decode(action.ids[:-1]) == action.text
        assert action.ids[-1] == tokenizer().stop_ids[0] and action.logps is None
        assert action.prompt_ids == tuple(tokenizer().chat(QUESTION))


@pytest.mark.parametrize(
    ("reply", "text"),
    [
        ("[Retrieval] who", "[Retrieval] who"),
        (" who directed", "[Retrieval] who directed"),
        ("[Planning]\n", "[Planning]"),  # a valid action of another kind
    ],
)
def test_a_forced_prefix_is_requested_and_continued(reply, text):
    llm = ScriptedLLM(lambda request: reply)
    forced = (ForcedAction("[Planning]"), ForcedAction("[Retrieval]", complete=False))
    role = Role("router", parse_router, Sampling(0.7, 1.0, 9))
    request = ActionRequest(role, QUESTION, Branching(1, forced), seed=5)
    (actions,) = LLMActionSampler(llm, tokenizer()).sample([request])
    assert [a.text for a in actions] == ["[Planning]", text, reply.strip()]
    assert {a.prompt_ids for a in actions} == {tuple(tokenizer().chat(QUESTION))}
    prefixed, free = llm.requests
    assert prefixed.messages[-1].content == f"who{BEGIN}[Retrieval]" and free.messages == QUESTION
    assert (prefixed.seed, free.seed) == (5, 6)


def test_stop_strings_and_the_temperature_apply():
    llm = ScriptedLLM(lambda request: "film</search> the</answer>")
    role = dataclasses.replace(ROLE, stop_strings=("</answer>", "</search>"), as_chat_turns=False)
    ((action,),) = LLMActionSampler(llm, tokenizer(), 0.2).sample(
        [ActionRequest(role, QUESTION, Branching(1), 0)]
    )
    assert action.text == tokenizer().decode(action.ids) == "film</search>"
    assert [r.sampling for r in llm.requests] == [Sampling(0.2, 1.0, 9)]


OPERA = Settings(Opera("opera_tiny", top_k=1), gold="world", min_plan_steps=1)


def pool_from(reply, out, count=6, heats=(0.3, 0.9)):
    """Returns the summary of a pool, and the requests to a language model with such replies."""
    synthetic, retriever = world()
    llm = ScriptedLLM(reply)
    writer = LLMActionSampler(llm, tiny_tokenizer())
    source = functools.partial(score_candidates, OPERA, writer, retriever, WorldReader(synthetic))
    rollouts = pool_rollouts(synthetic.questions["train"][:count], heats)
    return collect_pool(source, rollouts, out), llm.requests


def teacher_reply(request):
    """Replies like the teacher, which makes errors at high temperatures."""
    hot = 0.5 * (request.sampling.temperature > 0.5)
    teacher = Teacher(p_single_step=hot, p_accept_first=hot)
    return teacher.write(request.purpose, request.messages, (), random.Random(request.seed))


def test_every_temperature_gives_candidates_and_failures_give_none(tmp_path):
    def reply(request):
        return (
            EffectError("too hot") if request.sampling.temperature > 1.0 else teacher_reply(request)
        )

    heats, out = (0.3, 1.5), tmp_path / "pool.jsonl"
    summary, requests = pool_from(reply, out, heats=heats)
    assert {r.sampling.temperature for r in requests} == set(heats)
    assert sum(r.purpose == PLAN for r in requests) == 3 * len(heats) * 6
    plans = [c for c in load_pool(out) if c.role == PLAN]
    assert len(plans) == 6 and all(plan.score > 0.5 for plan in plans)
    assert (summary["failed"], summary["error"]) == (6, "too hot")


def test_the_encoder_of_the_index_compares_actions():
    _, retriever = world()
    assert similarity_of(retriever) is word_cosines, "hashed words have no meaning"
    assert similarity_of(RemoteRetriever("http://localhost:1")) is word_cosines

    class Constant:
        def encode_queries(self, texts):
            return np.ones((len(texts), 2), np.float32)

    similarity = similarity_of(dataclasses.replace(retriever, encoder=Constant()))
    np.testing.assert_allclose(similarity(["a", "b"]), 1.0, rtol=1e-6)


def test_without_any_action_there_is_no_pool(tmp_path):
    with pytest.raises(UserError, match="m is away"):
        pool_from(lambda request: EffectError("m is away"), tmp_path / "pool.jsonl", count=2)
    with pytest.raises(UserError, match="there are no questions"):
        pool_from(teacher_reply, tmp_path / "pool.jsonl", count=0)
    assert not (tmp_path / "pool.jsonl").exists()


def test_a_failed_rollout_is_retried_without_duplicates(tmp_path):
    full, parts = tmp_path / "full.jsonl", tmp_path / "parts.jsonl"
    pool_from(teacher_reply, full)

    def flaky(request):
        return EffectError("down") if request.seed % 7 == 0 else teacher_reply(request)

    summary, _ = pool_from(flaky, parts)
    assert summary["failed"] > 0 and summary["candidates"] > 0
    assert pool_from(teacher_reply, parts)[0]["failed"] == 0
    assert parts.read_text() == full.read_text()
    one, other = (sorted(candidates_file(f).read_text().splitlines()) for f in (full, parts))
    assert one == other


@pytest.mark.slow
def test_the_command_writes_a_pool_and_resumes(tmp_path, capsys):
    out, small = tmp_path / "pool.jsonl", "--config.data.world.size=60"
    with serving(lambda body: "nothing legal") as (address, bodies):
        arguments = ["--writer", f"openai:m@{address}", "--temperatures", "0.5", "--limit", "3"]
        command = ["warmup", "pool", f"--out={out}", small, *arguments]
        assert main(command) == 0
        count, text = len(bodies), out.read_text()
        assert main(command) == 0 and len(bodies) == count and out.read_text() == text
        assert main([*command, "--config.recipe.system.max_rewrites=1"]) == 2
    assert "recipe.system.max_rewrites differs" in capsys.readouterr().err
    assert len(bodies) >= 6 and {body["temperature"] for body in bodies} == {0.5}
    assert len(list(load_pool(out))) == len(out.read_text().splitlines()) > 0
    assert json.loads(out.read_text().splitlines()[0])["text"] == "nothing legal"
