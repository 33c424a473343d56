"""Shapes that save an accelerator no time are no programs, and change no result."""

import pytest

from jax_ragrl.learner.packing import Layout
from jax_ragrl.learner.state import prepare
from jax_ragrl.models import text_batches
from jax_ragrl.runtime import free_work
from jax_ragrl.runtime.free_work import free_tokens
from jax_ragrl.sampling.grouping import batch_jobs
from jax_ragrl.sampling.sampler import Shapes, sample_jobs
from tests.learner.bigram import GRPO, GRPO_ADAM, bigram
from tests.sampling.test_sampler import SHAPES, jobs_of
from tests.tiny import split_policy, tokenizer

REAL = Shapes(prompt_lengths=(256, 384, 512, 640, 1024), batch_sizes=(4, 16), max_new_tokens=16)


@pytest.fixture
def like_an_accelerator(monkeypatch):
    monkeypatch.setitem(free_work.FREE_FLOPS, "cpu", free_work.FREE_FLOPS_ACCELERATOR)


def test_no_work_of_a_cpu_is_negligible(monkeypatch):
    assert free_tokens(1) == 0
    monkeypatch.setattr(free_work, "target_platform", lambda: "gpu")
    # 20 ms of 2 operations per parameter and token, or a third of it for a gradient.
    assert free_tokens(1000, is_trained=True) == int(8e12 / 6000)
    assert free_tokens(8_000_000_000) == 500


@pytest.mark.parametrize(
    ("shapes", "free", "lengths", "sizes"),
    [
        (REAL, 0, REAL.prompt_lengths, (4, 16)),
        (REAL, 10_000, (512, 640, 1024), (4, 16)),  # 16 prompts of 640 are more, of 512 are not
        (REAL, 29_600, (1024,), (16,)),
        # A shorter length stays if it allows larger batches.
        (Shapes(), 10**9, (256, 1024, 4096), (4, 16, 64)),
        # 16 prompts with 256 new tokens are more.
        (Shapes((64, 128), (4, 16), max_new_tokens=256), 2048, (128,), (4, 16)),
    ],
)
def test_shapes_stay_if_they_save_time(shapes, free, lengths, sizes):
    coarse = shapes.coarse(free)
    assert (coarse.prompt_lengths, coarse.batch_sizes) == (lengths, sizes)
    assert coarse.longest == shapes.longest


@pytest.mark.parametrize(("free", "expected"), [(1000, (256, 640)), (2048, (640,))])
def test_a_layout_has_one_shape_if_the_time_of_its_batches_is_negligible(free, expected):
    layout = Layout((256, 640), tokens_per_device=2048, max_batch_halvings=1).coarse(free)
    assert layout.row_lengths == expected
    assert len(layout.counts(640)) == (2 if len(expected) == 2 else 1)


def test_a_sampler_with_fewer_programs_samples_the_same_tokens(like_an_accelerator):
    jobs = jobs_of([5, 16] * 4 + [17, 31] + [60] * 2)
    chunks = batch_jobs(jobs, 2, SHAPES)
    assert {chunk.length for chunk in chunks} == {16, 32, 64}
    model = split_policy()
    coarse = sample_jobs(model, tokenizer(), jobs, 2, SHAPES)
    free_work.FREE_FLOPS["cpu"] = 0.0
    fine = sample_jobs(model, tokenizer(), jobs, 2, SHAPES)
    assert [[row.ids for row in rows] for rows in coarse] == [
        [row.ids for row in rows] for rows in fine
    ]


def test_a_policy_has_one_shape_of_update(like_an_accelerator):
    layout = Layout((16, 32), tokens_per_device=64, max_batch_halvings=1)
    options = {"layout": layout, "roles": ("planner",), "temperature": 1.0, "updates": 1}
    spec, _ = prepare(bigram(), objective=GRPO, optimizer=GRPO_ADAM, **options)
    assert spec.layout == Layout((32,), tokens_per_device=64)


def test_texts_have_few_shapes(like_an_accelerator):
    shapes = {
        text_batches.pad_rows([[1] * length] * rows, 0, 256, free=1000).ids.shape
        for length in range(1, 257)
        for rows in (1, 3, 16, 64)
    }
    lengths = (64, 80, 96, 112, 128, 160, 192, 224, 256)
    assert text_batches.length_buckets(free=64 * 256)[:5] == [64, 128, 256, 320, 384]
    # As many rows as have 1,000 tokens, or as many as there are.
    assert {length for _, length in shapes} == set(lengths)
    assert {rows for rows, length in shapes if length == 256} == {1, 4, 16, 64}
    assert {rows for rows, length in shapes if length == 64} == {4, 16, 64}
