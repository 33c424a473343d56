"""The programs of a sampler are listed before it samples: afterwards it compiles none of them."""

from __future__ import annotations

import jax
import pytest
from flax import nnx

from jax_ragrl.models.decoder import init_sharded
from jax_ragrl.runtime.compile_ahead import compile_programs
from jax_ragrl.runtime.compile_cache import compiled_programs
from jax_ragrl.runtime.sharding import make_mesh
from jax_ragrl.sampling import jobs as jobs_module
from jax_ragrl.sampling.sampler import JobSampler, Shapes, sample_jobs
from jax_ragrl.sampling.weights import for_sampling
from tests.sampling.test_batches import jobs_of
from tests.tiny import split_policy, tokenizer

# Prompts of another length than in other tests, which share compiled programs.
SHAPES = Shapes(prompt_lengths=(28,), batch_sizes=(1, 4), max_new_tokens=40)


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((), {}),
        pytest.param(
            (), {"top_p": 0.9, "regex": "[a-z ]+", "stops": ("ab",)}, marks=pytest.mark.slow
        ),
        pytest.param((2, 2, 1), {}, marks=pytest.mark.slow),
    ],
)
def test_a_sampler_compiles_none_of_the_listed_programs(shape, options, caplog, monkeypatch):
    """Batches that grow and shrink, rows of equal prompts, and a limit below the first cache."""
    monkeypatch.setattr(jobs_module, "FIRST_CACHE", 16)
    model = split_policy()
    if shape:
        mesh = make_mesh(shape, jax.devices()[:4])
        decoder = init_sharded(model.merge().config, mesh, nnx.Rngs(0))
        model = for_sampling({"policy": decoder})["policy"]
    long, short = (jobs_of([limit], **options)[0] for limit in (40, 12))
    programs = JobSampler(model, tokenizer(), SHAPES).programs([long, short], (2, 1), draws=2)
    before = compiled_programs()
    compile_programs(programs, threads=2)
    assert compiled_programs() > before, "compiled by an earlier test: this one shows nothing"
    with jax.log_compiles():
        caplog.clear()
        jobs = [job._replace(ids=(5, *job.ids)) for job in jobs_of([40, 3, 18, 40, 2], **options)]
        for width in (1, 2):
            sample_jobs(model, tokenizer(), jobs, width, SHAPES)
        equal = [jobs[0]._replace(seed=seed) for seed in (1, 2)]
        sample_jobs(model, tokenizer(), equal, 1, SHAPES)
        sample_jobs(model, tokenizer(), [jobs[1]._replace(limit=12)], 1, SHAPES)
    names = ("start_decode", "decode")
    assert not [n for n in names if f"Finished XLA compilation of jit({n})" in caplog.text]
