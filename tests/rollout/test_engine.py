"""Actions of an engine that a test plays: corrected as in float64, and refused if not exact."""

import dataclasses
import json
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from jax_ragrl.errors import UserError
from jax_ragrl.learner.optimizer import Optimizer
from jax_ragrl.learner.packing import Turn, group_turns
from jax_ragrl.learner.update import update
from jax_ragrl.llm.openai import OpenAILLM
from jax_ragrl.rollout.engine import EngineSampler
from jax_ragrl.sampling.jobs import Row, SamplingJob
from tests.jobs import config_job
from tests.learner import reference
from tests.learner.bigram import GRPO, HEAT, LAYOUT, named, prepared
from tests.llm.server import serving
from tests.tiny import tokenizer

PROMPT, IDS = (4, 5), (3, 7, 8, 9)
JOB = SamplingJob(PROMPT, seed=1, temperature=HEAT, top_p=1.0, limit=8)


def stream(ids=IDS, logps=(-1.0,) * 4, reason="stop", prompt=2, **fields: Any) -> bytes:
    """The events of a streamed reply in the form of vLLM, one token each."""
    tokens = [
        {"text": "x", "token_ids": [i], "logprobs": {"token_logprobs": [logp]}} | fields
        for i, logp in zip(ids, logps, strict=True)
    ]
    usage = {"prompt_tokens": prompt, "completion_tokens": len(ids)}
    end = {"text": "", "finish_reason": reason}
    events = [
        *({"choices": [x]} for x in tokens),
        {"choices": [end]},
        {"choices": [], "usage": usage},
    ]
    return b"".join(b"data: %s\n\n" % json.dumps(x).encode() for x in events) + b"data: [DONE]\n\n"


def sampled(reply: bytes, job: SamplingJob = JOB) -> tuple[Row, Mapping[str, Any]]:
    """The action that an engine writes with a reply, and the request for it."""
    with serving(lambda _: reply) as (address, seen):
        client = OpenAILLM("policy", address, retries=0, timeout=60)
        ((row,),) = EngineSampler(client, address, tokenizer()).start([job], 1)()
    return row, seen[0]


def test_the_update_on_a_biased_engine_equals_its_equations_in_float64():
    """Probabilities are off by known factors, one of them beyond the cap; so is a second action."""
    objective = dataclasses.replace(GRPO, importance_weight_cap=2.0)
    adam = Optimizer(0.1, schedule="constant")
    policy = prepared(objective, adam)
    before = named(policy.state.policy.params)
    turns = []
    for k, (ids, bias) in enumerate(
        [(IDS, (0.3, -0.5, -2.0, 0.0)), (IDS[::-1], (1.0, 0.2, 0, -3))]
    ):
        turn = Turn(k, "planner", PROMPT, ids, credit=1.5 - 2 * k)
        right, _ = reference.logps(before, reference.Tokens.of([turn]), HEAT)
        row, body = sampled(stream(ids, np.minimum(right + bias, 0).tolist()))
        assert row.ids == ids and body["prompt"] == list(PROMPT) and body["max_tokens"] == 8
        turns.append(turn._replace(behaviour_logps=row.logps))
    expected, _ = reference.update(objective, adam, before, None, before, turns, HEAT)
    policy, metrics = update(policy, group_turns(turns, LAYOUT), random.Random(0))
    for name, x in expected.items():
        np.testing.assert_allclose(named(policy.state.policy.params)[name], x, atol=1e-4)
    plain = reference.update(GRPO, adam, before, None, before, turns, HEAT)[0]
    assert max(np.abs(plain[name] - x).max() for name, x in expected.items()) > 1e-2
    assert metrics["importance_weight/capped"] == 2 / 8 and metrics["sampler_gap/max"] > 2.9


def test_an_action_ends_where_it_would_in_this_process():
    """The token that completes a stop string is its last one, whatever the engine sends then."""
    first, *_ = tokenizer().encode("film")
    row, body = sampled(stream((first, *IDS), (-1.0,) * 5), JOB._replace(stop_strings=("f",)))
    assert row == Row((first,), (-1.0,)) and body["stop"] == ["f"]
    end = tokenizer().stop_ids[0]
    assert sampled(stream((3, end, 7, 8)))[0].ids == (3, end)


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (stream(token_ids=None, logprobs=None), "return_token_ids were asked for, but the reply"),
        (stream(logprobs={"token_logprobs": []}), "return_token_ids were asked for"),
        (
            stream(token_ids=None, logprobs={"content": [{"token": "x", "logprob": -1.0}]}),
            "were as",
        ),
        (stream(logps=(-1.0, float("nan"), -1.0, -1.0)), "it has no end, or log-prob"),
        (stream(prompt=3), "it read 3 tokens of a prompt of 2"),
        (stream(ids=(3, 7, 8, 900)), "its tokens are .3, 7, 8, 900., and the tokenizer has 300"),
        (stream(reason="length"), "it ended an action of 4 tokens: give it a longer context"),
        (stream((), ()), "its tokens are"),
        (b"data: {}", "choices"),
    ],
)
def test_a_reply_that_is_not_exact_ends_the_run(reply, message):
    with pytest.raises(UserError, match=message):
        sampled(reply)


ENGINE = {"engine.base_url": "http://127.0.0.1:1/v1", "engine.sync": "./restart.sh"}
ENGINE |= {"objective.importance_weight_cap": 2.0}


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        ("search_r1", {}, ""),
        ("search_r1", {"objective.importance_weight_cap": 0.0}, "weight_cap is 0: its probab"),
        ("search_r1", {"engine.sync": " "}, "engine.sync is empty"),
        ("search_r1", {"engine.base_url": "localhost:1"}, "without http:// or https://"),
        ("search_r1", {"engine.weights": "adapter"}, "'adapter', but lora is not set"),
        ("search_r1", {"grammar": "strict"}, "certain tokens only"),
        ("mmoa_rag", {}, "cannot sample role selector, which may"),
        ("search_r1", {"recipe.system.top_p": 0.9}, ""),
        (
            "search_r1",
            {"recipe.system.top_p": 0.9, "recipe.system.temperature": 0.7},
            "set one of them to 1",
        ),
        ("coda", {"policies": (("planner", "tiny"),)}, "engine has one model: use one policy"),
    ],
)
def test_a_config_that_no_engine_can_sample_is_refused(config, changes, message):
    if not message:
        assert config_job(f"tiny/{config}", ENGINE | changes).engine.sync == "./restart.sh"
        return
    with pytest.raises(UserError, match=message):
        config_job(f"tiny/{config}", ENGINE | changes)
