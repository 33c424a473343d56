"""One of two processes that join, exchange objects, and sample separately.

`python -m tests.telling FOLDER`, in an environment that `multihost.join` reads.
"""

import functools
import pathlib
import sys

import jax
import numpy as np
import pytest

from jax_ragrl.errors import UserError
from jax_ragrl.models.config import logical_axes
from jax_ragrl.models.decoder import Decoder
from jax_ragrl.runtime import multihost as hosts
from jax_ragrl.runtime.sharding import (
    local_mesh,
    make_mesh,
    mesh_of,
    replicate,
    shard_batch,
    to_host,
    tree_shardings,
)
from jax_ragrl.sampling.sampler import SamplingJob, Shapes, sample_jobs
from jax_ragrl.sampling.weights import for_sampling
from tests.tiny import split_policy, tokenizer

MESHES = ((4, 1, 1), (1, 4, 1), (1, 2, 2))  # replicated, divided, and the tensor axis, too


def fail(number: int) -> int:
    if jax.process_index() == number:
        raise ValueError("oops")
    return number


def exchange(folder: pathlib.Path) -> None:
    me = jax.process_index()
    # Of different sizes, one of them empty.
    assert hosts.all_gather_object(lambda: "x" * 1000 * me) == ["", "x" * 1000]
    assert hosts.on_process_zero(lambda: 10 + me) == 10
    assert hosts.is_process_zero() == (me == 0)
    for number in range(2):
        error = ValueError if number == me else UserError
        message = "oops" if number == me else f"process {number} of 2 stopped: ValueError: oops"
        with pytest.raises(error, match=message):
            hosts.all_gather_object(functools.partial(fail, number))

    def make() -> str:
        if me == 0:
            (folder / "made").write_text("by the first")
        return (folder / "made").read_text() + str(me)

    assert hosts.process_zero_first(make) == f"by the first{me}"


def see(folder: pathlib.Path) -> None:
    hosts.check_shared_folder(folder / "new")
    assert hosts.on_process_zero(lambda: [*(folder / "new").iterdir()]) == []
    hosts.FILE_TIMEOUT = 0
    with pytest.raises(UserError, match="all hosts share|process 1 of 2 stopped"):
        hosts.check_shared_folder(folder / str(jax.process_index()))


def place() -> None:
    """Places batches, numbers and keys, equal and unequal ones."""
    mesh = make_mesh((2, 2, 1))
    x = np.arange(24, dtype=np.float32).reshape(8, 3)
    for placed in (shard_batch({"x": x}, mesh), replicate({"x": x}, mesh)):
        np.testing.assert_array_equal(to_host(placed)["x"], x)
    again = replicate(shard_batch(x, mesh), mesh)
    assert again.is_fully_replicated and not again.is_fully_addressable
    key = replicate(jax.random.key(3), mesh)
    drawn = jax.jit(lambda k: jax.random.normal(k, (4,)))(key)
    np.testing.assert_allclose(
        to_host(drawn), jax.random.normal(jax.random.key(3), (4,)), rtol=1e-6
    )
    for put in (shard_batch, replicate):
        with pytest.raises(AssertionError, match="different numbers"):
            put(x + jax.process_index(), mesh)


def sample() -> None:
    """Samples on each process with a different prompt and number of calls."""
    model = split_policy()
    whole, axes = model.merge(), logical_axes(model.merge().config)
    shapes = Shapes((16,), (4,), 4)
    jobs = [[SamplingJob((5, 6, 7 + i), i, 1.0, 1.0, 4)] for i in range(2)]
    expected = [sample_jobs(model, tokenizer(), job, 3, shapes) for job in jobs]
    for shape in MESHES:
        mesh = make_mesh(shape)
        assert local_mesh(mesh).shape == {"data": 1, "fsdp": 2 // shape[2], "tensor": shape[2]}
        host = jax.device_get(whole.params())
        spread = jax.device_put(host, tree_shardings(axes, host, mesh))
        acting = for_sampling({"policy": Decoder.from_params(whole.config, spread)})["policy"]
        assert mesh_of(acting) == local_mesh(mesh)
        for _ in range(1 + jax.process_index()):
            found = sample_jobs(acting, tokenizer(), jobs[jax.process_index()], 3, shapes)
            for (ids, logps, _), (wanted, near, _) in zip(
                found[0], expected[jax.process_index()][0], strict=True
            ):
                assert ids == wanted
                np.testing.assert_allclose(logps, near, atol=1e-4)
        jax.tree.map(np.testing.assert_array_equal, to_host(spread), host)


if __name__ == "__main__":
    hosts.join(60)
    exchange(pathlib.Path(sys.argv[1]))
    see(pathlib.Path(sys.argv[1]))
    place()
    sample()
    print("as it should")
