"""`ragrl pool`: a language model writes in the place of a policy, and what it writes is scored."""

from __future__ import annotations

import dataclasses
import functools
import json
import random

import pytest

from jax_ragrl.cli.main import main
from jax_ragrl.errors import EffectError, UserError
from jax_ragrl.llm.reader import WorldReader
from jax_ragrl.rollout.collect import ActionRequest
from jax_ragrl.rollout.effects import Said, Told
from jax_ragrl.rollout.expand import Branching, Forced
from jax_ragrl.rollout.roles import Parsed, Role
from jax_ragrl.runtime.jsonl import rows_of
from jax_ragrl.systems.c3po import parse_router
from jax_ragrl.systems.opera.expert_pool import load_pool
from jax_ragrl.systems.opera.grammar import ANALYSIS, PLAN
from jax_ragrl.systems.opera.system import Settings
from jax_ragrl.types import LLMRequest, Message, Sampling
from jax_ragrl.warmstart import resumable as portions
from jax_ragrl.warmstart.expert_pool import (
    BEGIN,
    Ghostwriter,
    candidates_file,
    gather_pool,
    scored,
    tries_of,
)
from jax_ragrl.warmstart.teachers.opera import Teacher
from tests.llm.server import serving
from tests.tiny import tokenizer
from tests.warmstart.test_teachers import tokenizer as tiny_tokenizer
from tests.warmstart.test_teachers import world


class Clerk:
    """A language model that writes what a teacher would."""

    name = "clerk"

    def __init__(self, reply) -> None:
        self._reply, self.asked = reply, []

    def complete(self, requests):
        self.asked += requests
        return [self._reply(request) for request in requests]


ROLE = Role("plan", lambda text: Parsed(text), Sampling(0.7, 1.0, 9))
ASKED = (Message("user", "who"),)


def test_a_ghostwriter_writes_forced_texts_first_and_then_what_the_model_says():
    clerk = Clerk(lambda request: f"film {request.seed}")
    request = ActionRequest(ROLE, ASKED, Branching(2, (Forced("who"),)), seed=5)
    (actions,) = Ghostwriter(clerk, tokenizer()).sample([request])
    assert [a.text for a in actions] == ["who", "film 5", "film 6"]
    assert clerk.asked == [
        LLMRequest("plan", ASKED, Sampling(0.7, 1.0, 9), seed) for seed in (5, 6)
    ]
    for action in actions:
        assert tokenizer().decode(action.ids[:-1]) == action.text
        assert action.ids[-1] == tokenizer().stop_ids[0] and action.logps is None
        assert action.prompt_ids == tuple(tokenizer().chat(ASKED))


def test_a_ghostwriter_reads_the_conversation_so_far():
    clerk = Clerk(lambda request: "x")
    after = (Said(tuple(tokenizer().encode("film"))), Told("found"))
    Ghostwriter(clerk, tokenizer()).sample([ActionRequest(ROLE, ASKED, Branching(1), 0, after)])
    (asked,) = clerk.asked
    assert asked.messages[1:] == (Message("assistant", "film"), Message("user", "found"))


@pytest.mark.parametrize(
    ("reply", "text"),
    [
        ("[Retrieval] who", "[Retrieval] who"),
        (" who directed", "[Retrieval] who directed"),
        ("[Planning]\n", "[Planning]"),  # another action, by itself: not a search for it
    ],
)
def test_a_forced_beginning_is_asked_for_and_gone_on_with(reply, text):
    clerk = Clerk(lambda request: reply)
    forced = (Forced("[Planning]"), Forced("[Retrieval]", complete=False))
    role = Role("router", parse_router, Sampling(0.7, 1.0, 9))
    request = ActionRequest(role, ASKED, Branching(1, forced), seed=5)
    (actions,) = Ghostwriter(clerk, tokenizer()).sample([request])
    assert [a.text for a in actions] == ["[Planning]", text, reply.strip()]
    assert {a.prompt_ids for a in actions} == {tuple(tokenizer().chat(ASKED))}
    begun, free = clerk.asked
    assert begun.messages[-1].content == f"who{BEGIN}[Retrieval]" and free.messages == ASKED
    assert (begun.seed, free.seed) == (5, 6)


def test_a_ghostwriter_stops_where_a_role_stops_and_is_as_hot_as_it_is_told():
    clerk = Clerk(lambda request: "film</search> the</answer>")
    role = dataclasses.replace(ROLE, stops=("</answer>", "</search>"), chat=False)
    ((action,),) = Ghostwriter(clerk, tokenizer(), 0.2).sample(
        [ActionRequest(role, ASKED, Branching(1), 0)]
    )
    assert action.text == tokenizer().decode(action.ids) == "film</search>"
    assert [r.sampling for r in clerk.asked] == [Sampling(0.2, 1.0, 9)]


def test_a_failure_is_an_action_with_an_error():
    clerk = Clerk(lambda request: EffectError("down"))
    ((action,),) = Ghostwriter(clerk, tokenizer()).sample(
        [ActionRequest(ROLE, ASKED, Branching(1), 0)]
    )
    assert action.ids == () and action.error == "down"


OPERA = Settings("opera_tiny", top_k=1, gold="world", least_steps=1)


def gathered(reply, out, count=6, heats=(0.3, 0.9)):
    """The summary of a pool, and what was asked for it of a language model with such replies."""
    made, retriever = world()
    clerk = Clerk(reply)
    writer = Ghostwriter(clerk, tiny_tokenizer())
    source = functools.partial(scored, OPERA, writer, retriever, WorldReader(made))
    tries = tries_of(made.questions["train"][:count], heats)
    return gather_pool(source, tries, out), clerk.asked


def taught(request):
    """With a temperature a clerk is often wrong in its own way."""
    hot = 0.5 * (request.sampling.temperature > 0.5)
    teacher = Teacher(single_step=hot, credulous=hot)
    return teacher.write(request.purpose, request.messages, (), random.Random(request.seed))


def test_every_temperature_gives_candidates_and_failures_give_none(tmp_path):
    def reply(request):
        return EffectError("too hot") if request.sampling.temperature > 1.0 else taught(request)

    heats, out = (0.3, 1.5), tmp_path / "pool.jsonl"
    told, asked = gathered(reply, out, heats=heats)
    assert {r.sampling.temperature for r in asked} == set(heats)
    assert sum(r.purpose == PLAN for r in asked) == 3 * len(heats) * 6
    plans = [c for c in load_pool(out) if c.role == PLAN]
    assert len(plans) == 6 and all(plan.score > 0.5 for plan in plans)
    assert (told["failed"], told["error"]) == (6, "too hot")


def test_where_nothing_is_written_there_is_no_pool(tmp_path):
    with pytest.raises(UserError, match="m is away"):
        gathered(lambda request: EffectError("m is away"), tmp_path / "pool.jsonl", count=2)
    with pytest.raises(UserError, match="nothing was asked"):
        gathered(taught, tmp_path / "pool.jsonl", count=0)
    assert not (tmp_path / "pool.jsonl").exists()


def test_a_killed_pool_that_went_on_is_the_pool_of_one_go(tmp_path, monkeypatch):
    """Six questions at two temperatures: the second portion of four holds both."""
    whole, parts = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"
    told, asked = gathered(taught, whole)
    monkeypatch.setattr(portions, "CHUNK", 4)

    def plans(requests):
        return sum(r.purpose == PLAN for r in requests)

    def killed(request):
        if request.sampling.temperature > 0.5 and request.purpose == ANALYSIS:
            raise KeyboardInterrupt
        return taught(request)

    with pytest.raises(KeyboardInterrupt):
        gathered(killed, parts)
    kept = list(rows_of(candidates_file(parts)))
    assert kept and not parts.exists()
    with candidates_file(parts).open("a") as file:  # of a rollout that is not noted as done
        file.write(json.dumps({**kept[0], "rollout": "1 q", "text": "stale"}) + '\n{"rollout": "1')
    again, rest = gathered(taught, parts)
    assert parts.read_text() == whole.read_text() and again == told
    assert (plans(asked), plans(rest)) == (36, 24)
    assert plans(gathered(taught, parts)[1]) == 0 and parts.read_text() == whole.read_text()


def test_a_failed_rollout_is_tried_again_and_its_candidates_are_not_there_twice(tmp_path):
    whole, parts = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"
    gathered(taught, whole)

    def flaky(request):
        return EffectError("down") if request.seed % 7 == 0 else taught(request)

    told, _ = gathered(flaky, parts)
    assert told["failed"] > 0 and told["candidates"] > 0
    assert gathered(taught, parts)[0]["failed"] == 0
    assert parts.read_text() == whole.read_text()
    one, other = (sorted(candidates_file(f).read_text().splitlines()) for f in (whole, parts))
    assert one == other


@pytest.mark.slow
def test_the_command_writes_what_a_run_reads_and_goes_on(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    out, small = tmp_path / "pool.jsonl", "--config.data.world.size=60"
    with serving(lambda body: "nothing legal") as (address, seen):
        given = ["--writer", f"openai:m@{address}", "--temperatures", "0.5", "--limit", "3"]
        command = ["pool", f"--out={out}", small, *given]
        assert main(command) == 0
        count, text = len(seen), out.read_text()
        assert main(command) == 0 and len(seen) == count and out.read_text() == text
        assert main([*command, "--config.recipe.max_rewrites=1"]) == 2
    assert "recipe.max_rewrites differs" in capsys.readouterr().err
    assert len(seen) >= 6 and {body["temperature"] for body in seen} == {0.5}
    assert len(list(load_pool(out))) == len(out.read_text().splitlines()) > 0
    assert json.loads(out.read_text().splitlines()[0])["text"] == "nothing legal"


def test_another_system_has_no_pool(tmp_path, capsys):
    from jax_ragrl.cli.main import CONFIGS

    config = CONFIGS / "tiny" / "coda.py"
    assert main(["pool", f"--config={config}", f"--out={tmp_path / 'p'}"]) == 2
    assert "system opera" in capsys.readouterr().err


def test_a_file_that_is_no_pool_of_its_own_stays(tmp_path, capsys):
    out = tmp_path / "pool.jsonl"
    out.write_text("mine\n")
    assert main(["pool", f"--out={out}", "--config.data.world.size=60", "--limit=1"]) == 2
    assert "name another --out" in capsys.readouterr().err and out.read_text() == "mine\n"
