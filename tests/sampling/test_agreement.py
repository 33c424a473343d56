"""The scorer reproduces the sampler's log-probabilities, after observations and at stop tokens."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

from jax_ragrl.learner.gradients import score
from jax_ragrl.learner.packing import Batch, Layout, Minibatches, group_turns, lay_out, turns_of
from jax_ragrl.learner.update import token_weights
from jax_ragrl.models.decoder import Decoder
from jax_ragrl.models.split import SplitModel
from jax_ragrl.rollout.collect import ActionRequest, Environment, collect
from jax_ragrl.rollout.expand import Branching
from jax_ragrl.rollout.policy import PolicySampler
from jax_ragrl.rollout.roles import ParsedAction, Role
from jax_ragrl.rollout.tree import Forest, Record, build_forest
from jax_ragrl.sampling.sampler import Shapes
from jax_ragrl.systems.coda import CoDA
from jax_ragrl.types import Message, Sampling
from tests.learner.bigram import GRPO
from tests.rollout.tape import ANN, BOB, Tape
from tests.tiny import split_policy, tokenizer

WIDTH = 8  # maximum of tokens per action
LAYOUT = Layout(row_lengths=(64, 256), tokens_per_device=512)


def sampler() -> PolicySampler:
    shapes = Shapes(prompt_lengths=(32, 128, 256), batch_sizes=(4,), max_new_tokens=WIDTH)
    return PolicySampler({"policy": split_policy()}, tokenizer(), shapes)


def pack(forest: Forest, roles: list[str]) -> Minibatches:
    turns = turns_of(forest, *np.ones((2, len(forest.records)), np.float32))
    return Minibatches([lay_out(group_turns(turns, LAYOUT), roles, LAYOUT)])


def scores(minibatches, heat, allowed_ZV=None, model=None) -> np.ndarray:
    args = jax.device_put((np.float32(heat), allowed_ZV))

    def score_rows(batch: Batch) -> np.ndarray:
        outputs = score(model or split_policy(), jax.device_put(batch.rows), *args)
        return jax.device_get(outputs.logp_RM)

    return minibatches.by_action([score_rows(batch) for batch in minibatches.batches])


def assert_agree(forest: Forest, minibatches: Minibatches, logp_AT: np.ndarray) -> None:
    for node, logp_T in zip(minibatches.actions.node_A.tolist(), logp_AT, strict=True):
        logps = forest.records[node].action.logps
        np.testing.assert_allclose(logp_T[: len(logps)], logps, atol=1e-4)


@pytest.mark.parametrize(("heat", "as_chat_turns"), [(1.0, True), (0.7, False)])
def test_scorer_and_sampler_agree_after_an_observation(heat, as_chat_turns):
    """Each of two CoDA planners acts again after an observation, the (random) outputs of its
    siblings: a fork, an observation and another fork."""
    system = CoDA(
        "coda_tiny", max_turns=2, max_tokens=WIDTH, temperature=heat, as_chat_turns=as_chat_turns
    )
    tape, two = Tape({}), lambda effect, question: Branching(2)
    forest = collect(system, two, [ANN, BOB], Environment(sampler(), tape, tape))
    minibatches = pack(forest, list(system.roles))
    previous_A = minibatches.actions.previous_A
    assert (previous_A >= 0).sum() == 8 and (previous_A < 0).sum() == 4
    pairs = zip(minibatches.actions.node_A.tolist(), previous_A.tolist(), strict=True)
    for node, previous in pairs:
        if previous >= 0:
            first, second = (forest.records[n].action for n in (previous, node))
            observation = second.prompt_ids[len(first.prompt_ids + first.ids) :]
            assert "again" in tokenizer().decode(observation)
    assert_agree(forest, minibatches, scores(minibatches, heat))


@pytest.mark.parametrize("regex", ["", "[0-9]"])
def test_padding_of_a_vocabulary_is_neither_sampled_nor_scored(regex):
    """The model has 512 rows, of which the tokenizer uses 300: without a mask, many of the sampled
    ids would be padding."""
    config = dataclasses.replace(split_policy().merge().config, vocab_size=512)
    padded = dataclasses.replace(config, num_tokens=len(tokenizer()))
    model = SplitModel.from_model(Decoder(padded, rngs=nnx.Rngs(0)))
    shapes = Shapes((32,), batch_sizes=(4,), max_new_tokens=WIDTH)
    role = Role("planner", ParsedAction, Sampling(1.0, 1.0, WIDTH), allowed_token_regex=regex)
    requests = [ActionRequest(role, (Message("user", "go"),), Branching(8), s) for s in range(4)]
    samples = PolicySampler({"policy": model}, tokenizer(), shapes).sample(requests)
    actions = [action for row in samples for action in row]
    assert max(max(action.ids) for action in actions) < len(tokenizer())
    records = [Record(-1, 0, "planner", 1, (k,), action) for k, action in enumerate(actions)]
    forest = build_forest((ANN,), records)
    minibatches = pack(forest, ["planner"])
    allowed_V = tokenizer().allowed_tokens(regex)
    allowed_ZV = None if allowed_V is None else allowed_V[None]
    assert_agree(forest, minibatches, scores(minibatches, 1.0, allowed_ZV, model))


def test_a_stop_id_equal_to_the_pad_id_is_trained():
    """The allowed tokens are the digit 7 and the two stop ids, one of which is the padding id. It
    is sampled, ends its row and has a weight."""
    pad, heat = tokenizer().pad_id, 0.7
    assert pad == 0 and pad in tokenizer().stop_ids
    role = Role("planner", ParsedAction, Sampling(heat, 1.0, WIDTH), allowed_token_regex="7")
    prompts = [(Message("user", word),) for word in ("go", "who")]
    requests = [ActionRequest(role, m, Branching(12), seed) for m in prompts for seed in range(8)]
    actions = [action for samples in sampler().sample(requests) for action in samples]
    ending = [action for action in actions if action.ids[-1] == pad]
    alone = [action for action in ending if action.ids == (pad,)]
    assert alone and len(ending) > len(alone)  # some have digits before it
    for action in ending:
        assert len(action.ids) == len(action.logps) <= WIDTH and pad not in action.ids[:-1]
        assert action.text == "7" * (len(action.ids) - 1) and action.logps[-1] < -0.1
    records = [Record(-1, 0, "planner", 1, (k,), action) for k, action in enumerate(actions)]
    forest = build_forest((ANN,), records)
    minibatches = pack(forest, ["planner"])
    allowed_ZV = tokenizer().allowed_tokens("7")[None]
    assert_agree(forest, minibatches, scores(minibatches, heat, allowed_ZV))
    role_A = minibatches.actions.role_A
    weight_AT, _ = token_weights(GRPO, minibatches.mask(), role_A)
    weights, batches = minibatches.by_row(weight_AT), minibatches.batches
    at_pad = [(x > 0) & (b.rows.target_RM == pad) for x, b in zip(weights, batches, strict=True)]
    assert sum(int(x.sum()) for x in at_pad) == len(ending)
    assert sum(int((x > 0).sum()) for x in weights) == sum(len(a.ids) for a in actions)
