"""Strict grammars in the sampler, and their agreement with the scorer."""

import functools
import re

import jax
import numpy as np
import pytest

from jax_ragrl.learner.gradients import gradient, score
from jax_ragrl.learner.grammars import RoleGrammars, role_grammars
from jax_ragrl.learner.packing import Layout, Minibatches, Turn, group_turns, lay_out
from jax_ragrl.learner.targets import Targets
from jax_ragrl.rollout.roles import ParsedAction, Role
from jax_ragrl.sampling.grammar import removed_mass
from jax_ragrl.sampling.sampler import JobSamples, SamplingJob, Shapes, sample_jobs
from jax_ragrl.types import Sampling
from tests.learner.bigram import GRPO
from tests.tiny import split_policy, tokenizer

pytest.importorskip("outlines_core")

LIMIT, HEAT = 40, 0.7
REGEXES = {
    "plan": "QDS|QDP|(?:QR,)?(?:R,)?AG",
    "text": r"\*\*[^\s\x00-\x1f*][^\x00-\x1f*]*\*\*",
    "accent": "(?:é|ü|[α-ω]){2,9}",
    "select": "(?:Document[0-9](?:,Document[0-9]){0,2})?",
}
ROLES = [
    Role(name, ParsedAction, Sampling(HEAT, 1.0, LIMIT), action_regex=regex, strict=True)
    for name, regex in REGEXES.items()
]
SHAPES = Shapes((16,), (2, 8), max_new_tokens=LIMIT)
LAYOUT = Layout(row_lengths=(64, 256), tokens_per_device=512)


def job(regex: str, seed: int, **changes: object) -> SamplingJob:
    ids = tuple(np.random.default_rng(seed).integers(3, 250, 5 + seed % 10).tolist())
    return SamplingJob(ids, seed, HEAT, 1.0, LIMIT, action_regex=regex)._replace(**changes)


def sample(jobs: list[SamplingJob], width: int = 2) -> JobSamples:
    return sample_jobs(split_policy(), tokenizer(), jobs, width, SHAPES)


@functools.cache
def jobs_and_samples() -> tuple[list[SamplingJob], JobSamples]:
    jobs = [job(regex, 8 * z + i) for z, regex in enumerate(REGEXES.values()) for i in range(7)]
    return jobs, sample(jobs)


def grammars() -> RoleGrammars:
    found = role_grammars(ROLES, tokenizer())
    assert found is not None
    return found


def pack(turns: list[Turn]) -> Minibatches:
    return Minibatches([lay_out(group_turns(turns, LAYOUT), list(REGEXES), LAYOUT, 1, grammars())])


@functools.cache
def packed() -> tuple[Minibatches, dict[int, tuple[float, ...]]]:
    turns = [
        Turn(2 * i + k, role.name, job.ids, row.ids, behaviour_logps=row.logps)
        for i, (job, rows) in enumerate(zip(*jobs_and_samples(), strict=True))
        for k, row in enumerate(rows)
        for role in ROLES
        if role.action_regex == job.action_regex
    ]
    return pack(turns), {turn.node: turn.behaviour_logps for turn in turns}


def test_a_sampled_text_matches_its_grammar_whatever_the_limit_cuts():
    texts: list[str] = []
    for job_, rows in zip(*jobs_and_samples(), strict=True):
        for row in rows:
            text = tokenizer().decode(row.ids)
            assert re.fullmatch(job_.action_regex, text), (job_.action_regex, text)
            assert 0 < row.removed < 1 and np.isfinite(row.logps).all()
            texts.append(text)
    assert max(len(row.ids) for rows in jobs_and_samples()[1] for row in rows) == LIMIT
    assert len(set(texts)) > len(texts) / 2


@pytest.mark.parametrize("limit", [4, 5, 7])
def test_a_short_limit_shortens_an_action_and_never_cuts_it(limit: int):
    (rows,) = sample([job(REGEXES["accent"], 3, limit=limit)], 8)
    assert all(re.fullmatch(REGEXES["accent"], tokenizer().decode(row.ids)) for row in rows)


def test_siblings_and_batches_do_not_change_a_row():
    jobs, samples = jobs_and_samples()
    for i in (0, 16):
        (alone,) = sample([jobs[i]])
        assert [row.ids for row in alone] == [row.ids for row in samples[i]]


def test_scoring_reproduces_the_samplers_log_probabilities_of_strict_grammars():
    minibatches, expected = packed()
    args = jax.device_put((np.float32(HEAT), grammars().automaton))
    scores = [
        jax.device_get(score(split_policy(), jax.device_put(b.rows), *args).logp_RM)
        for b in minibatches.batches
    ]
    actual_AT = minibatches.by_action(scores)
    for node, logp_T in zip(minibatches.actions.node_A.tolist(), actual_AT, strict=True):
        np.testing.assert_allclose(logp_T[: len(expected[node])], expected[node], atol=1e-5)
    # A text outside of the grammar has finite scores.
    turn = Turn(0, "plan", (5, 6, 7), tuple(tokenizer().encode("QR,then nothing")))
    minibatches = pack([turn])
    args = jax.device_put((minibatches.batches[0].rows, np.float32(HEAT), grammars().automaton))
    logp_RM = jax.device_get(score(split_policy(), *args).logp_RM)
    assert np.isfinite(logp_RM).all() and (logp_RM < 0).any()


def test_the_gradient_of_strict_grammars_is_finite():
    (batch, *_) = packed()[0].batches
    mask_RM = batch.rows.mask_RM.astype(np.float32)
    # Advantage 1 and weight 1 at every token; no old log-probabilities.
    fields = {"advantage": mask_RM, "weight": mask_RM, "ref_logp": -mask_RM}
    targets = Targets(**dict.fromkeys(Targets._fields) | fields)
    args = jax.device_put((batch.rows, targets, np.float32(HEAT), np.float32(0.0)))
    automaton = jax.device_put(grammars().automaton)
    result = gradient(split_policy(), *args, automaton, objective=GRPO)
    leaves = [x for x in jax.tree.leaves(jax.device_get(result.grads)) if x.size]
    assert all(np.isfinite(x).all() for x in leaves) and any(np.abs(x).max() > 0 for x in leaves)


def test_a_forced_prefix_is_continued_within_the_grammar():
    prefix = tuple(tokenizer().encode("Document4,"))
    base = job(REGEXES["select"], 5)
    forced = base._replace(ids=(*base.ids[:5], *prefix), prefix_length=len(prefix))
    for row in sample([forced], 6)[0]:
        text = tokenizer().decode(prefix + row.ids)
        assert re.fullmatch(REGEXES["select"], text) and text != "Document4,"


def test_removed_mass_is_the_probability_of_the_forbidden_tokens():
    probs = np.array([[0.5, 0.25, 0.125, 0.125], [0.1, 0.2, 0.3, 0.4]], np.float32)
    forbidden = np.array([[True, False, True, False], [False] * 4])
    logits = np.log(probs)
    masked = np.where(forbidden, -np.inf, logits).astype(np.float32)
    args = jax.device_put((logits, masked))
    np.testing.assert_allclose(jax.jit(removed_mass)(*args), [0.625, 0.0], atol=1e-6)
