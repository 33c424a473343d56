"""llama.cpp's server writes the rollouts of a policy: exact tokens, a small gap, new weights."""

import contextlib
import functools
import math
import pathlib
import shlex
import socket
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_ragrl.learner.state import trained_decoder
from jax_ragrl.llm.openai import OpenAILLM
from jax_ragrl.models.by_name import SMOLLM2
from jax_ragrl.models.decoder import Decoder, causal_mask
from jax_ragrl.models.gguf_export import write_gguf
from jax_ragrl.models.hf import save_decoder
from jax_ragrl.models.split import SplitModel
from jax_ragrl.rollout.engine import EngineSampler
from jax_ragrl.run.build import build_components
from jax_ragrl.run.models import load_policy, policy_folder
from jax_ragrl.sampling.jobs import Row, SamplingJob
from jax_ragrl.sampling.sampler import Shapes, sample_jobs
from jax_ragrl.text.tokenizer import ChatTokenizer
from jax_ragrl.training import loop
from jax_ragrl.training.handover import Handover
from jax_ragrl.training.log import read_metrics
from jax_ragrl.types import Message
from tests.jobs import config_job
from tests.llm import llama_server
from tests.llm.llama_server import MISSING, llama_cpp

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}"),
]
PATIENCE = 300.0
QUESTIONS = (
    "What is the capital of France?",
    "Who wrote Hamlet, and when was it first performed?",
    "Name three rivers in Germany.",
)
# The largest differences seen with weights in float32: 2.6e-4 in 97 tokens of SmolLM2, 2.8e-5 in
# 300 tokens of the tiny policy.
TOLERANCE = 1e-3


def engine(address: str, tokenizer: ChatTokenizer) -> EngineSampler:
    return EngineSampler(OpenAILLM("policy", address, timeout=PATIENCE), address, tokenizer)


def logps_of(decoder: Decoder, job: SamplingJob, row: Row) -> np.ndarray:
    """The log-probabilities of an action that the decoder computes, without the sampler's code."""
    first, last = len(job.ids), len(job.ids) + len(row.ids)
    ids_BL = np.zeros((1, 128), np.int32)  # all actions in one shape, of one program
    ids_BL[0, :last] = (*job.ids, *row.ids)
    logits_LV = _logits(*nnx.split(decoder), jax.device_put(ids_BL))
    logps_LV = np.asarray(jax.nn.log_softmax(logits_LV / (job.temperature or 1.0)))
    return logps_LV[np.arange(first - 1, last - 1), row.ids]


@functools.partial(jax.jit, static_argnums=0)
def _logits(graph, state, ids_BL):
    decoder, positions_BL = nnx.merge(graph, state), jnp.arange(ids_BL.shape[1])[None]
    hidden_BLD, _ = decoder(ids_BL, positions_BL, causal_mask(jnp.ones_like(ids_BL)))
    return decoder.logits(hidden_BLD)[0]


def test_tokens_and_log_probabilities_are_those_of_this_process(tmp_path):
    """Greedy tokens, sampled ones at two temperatures, a stop string, and pieces of characters."""
    decoder, tokenizer = load_policy(SMOLLM2)
    folder = save_decoder(decoder, tmp_path / "f32", policy_folder(SMOLLM2), dtype="float32")
    prompts = [tuple(tokenizer.chat([Message("user", text)])) for text in QUESTIONS]
    greedy = [SamplingJob(ids, 0, 0.0, 1.0, 12) for ids in prompts]
    others = [
        greedy[0]._replace(temperature=1.0, seed=1),
        greedy[1]._replace(temperature=0.6, seed=2),
        greedy[0]._replace(stop_strings=("France",)),
        SamplingJob(tuple(tokenizer.encode("\U0001f9ff" * 8)), 3, 0.6, 1.0, 4),
    ]
    with llama_cpp(write_gguf(folder)) as (address, _):
        rows = [row for (row,) in engine(address, tokenizer).start(greedy + others, 1)()]
    shapes = Shapes((64,), (4,), max_new_tokens=12)
    own = sample_jobs(SplitModel.from_model(decoder), tokenizer, greedy, 1, shapes)
    assert [row.ids for row in rows[:3]] == [row.ids for (row,) in own]
    for job, row in zip(greedy + others, rows, strict=True):
        np.testing.assert_allclose(row.logps, logps_of(decoder, job, row), atol=TOLERANCE)
    stopped, pieces = rows[-2:]
    assert tokenizer.decode(stopped.ids).endswith("France") and 1 < len(stopped.ids) < 12
    assert len(pieces.ids) == 4 and tokenizer.decode(pieces.ids[:1]) == "\ufffd"


SETTINGS = {
    "lora.rank": 4,
    "data.world.size": 60,
    "index.kind": "exact",
    "recipe.rollouts": 2,
    "recipe.system.max_tokens": 24,
    "objective.importance_weight_cap": 2.0,
    # Moves the policy whatever the rewards are.
    "objective.entropy_coefficient": 0.5,
    "optimizer.policy_lr": 0.03,
    "optimizer.minibatches": 1,
    "run.steps": 3,
    "run.questions_per_step": 2,
    "run.dev_questions": 0,
    "run.eval_before_training": False,
    "guard.update_kl.action": "off",
    "engine.weights": "gguf",
    "engine.dtype": "float32",
    "engine.timeout": PATIENCE,
}


@contextlib.contextmanager
def restarted(folder: pathlib.Path):
    """The settings of a server that `engine.sync` starts, and leaves as it is at step 1."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    pid_file = folder / "pid"
    start = shlex.join([sys.executable, llama_server.__file__, str(port), str(pid_file)])
    command = ["sh", "-c", f'test "$1" = 1 || exec {start} "$0" "$1"']
    address = {"engine.base_url": f"http://127.0.0.1:{port}/v1"}
    try:
        yield address | {"engine.sync": shlex.join(command)}
    finally:
        llama_server.stop(pid_file)


def test_a_run_hands_its_weights_over_and_measures_what_is_left(tmp_path):
    """Three steps of Search-R1 with an adapter; the second has an engine with older weights."""
    with restarted(tmp_path) as address:
        settings = SETTINGS | address
        job = config_job("tiny/search_r1", settings)
        parts = build_components(job, tmp_path)
        policies = loop.train(job, parts, tmp_path)
        rows = read_metrics(tmp_path)
        gaps = [row["sampler_gap/mean"] for row in rows]
        assert max(gaps[0], gaps[2]) < 1e-4 < 1e-2 < gaps[1]
        for row in rows:
            assert math.isfinite(row["grad_norm"]) and 0 < row["importance_weight/mean"] <= 2
            assert row["failed"] == 0 and row["policy_tokens"] > 0
        weights = [row["importance_weight/mean"] for row in rows]
        assert abs(weights[0] - 1) < 1e-4 < 1e-2 < abs(weights[1] - 1)
        assert [folder.name for folder in (tmp_path / "engine").iterdir()] == ["2"]
        # The server still has the weights of the second update, and then those of the third.
        (name, policy), *_ = policies.items()
        decoder, handover = trained_decoder(policy), Handover(job, parts.tokenizer, tmp_path, 3)
        prompt = tuple(parts.tokenizer.chat([Message("user", QUESTIONS[0])]))
        asked = SamplingJob(prompt, 0, 1.0, 1.0, 12)
        ((old,),) = engine(settings["engine.base_url"], parts.tokenizer).start([asked], 1)()
        ((new,),) = handover.samplers(policies)[name].start([asked], 1)()
        assert np.abs(old.logps - logps_of(decoder, asked, old)).max() > 1e-2
        np.testing.assert_allclose(new.logps, logps_of(decoder, asked, new), atol=TOLERANCE)
