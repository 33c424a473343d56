"""Programs are compiled before they are called, and a later call finds them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ragrl.runtime import compile_ahead
from jax_ragrl.runtime.compile_ahead import Program, abstract_results, compile_programs
from jax_ragrl.runtime.compile_cache import compiled_programs
from jax_ragrl.runtime.sharding import commit_like, sharding_of_results


def program(factor: int, name: str = "", **kw) -> tuple[Program, jax.Array]:
    """A separate program that multiplies by a factor, and its argument."""
    x = jnp.arange(5.0)
    return Program(name, jax.jit(lambda x: factor * x), (x,), **kw), x


def test_a_program_is_compiled_once_ahead_and_never_when_it_is_called(capsys):
    (first, x), (second, _) = program(2), program(3)
    before = compiled_programs()
    assert compile_programs([first, second, first], threads=2) == 2
    assert compiled_programs() == before + 2
    results = [np.asarray(each.function(x))[2] for each in (first, second)]
    assert results == [4, 6]
    assert compiled_programs() == before + 2
    assert "compiled 2 of 2 programs ahead, 2 at a time" in capsys.readouterr().err


def test_a_program_that_takes_the_results_of_another_is_compiled_for_their_layout():
    after = jax.jit(lambda y: y + 1)
    for x in (jnp.arange(6.0), jax.device_put(jnp.arange(7.0), jax.devices()[0])):
        before = jax.jit(lambda x: 2 * x)
        chain = Program(
            "", before, (x,), follow=lambda y, after=after: after.lower(y).compile() and None
        )
        compile_programs([chain], threads=1)
        count = compiled_programs()
        after(before(x))
        assert compiled_programs() == count


def test_a_program_that_cannot_be_compiled_is_named_and_the_others_are_compiled(capsys):
    def refuse(x: jax.Array) -> jax.Array:
        raise ValueError("no memory\nand more")

    good, _ = program(5)
    bad = Program("sampler 16 x 512", jax.jit(refuse), good.args)
    assert compile_programs([bad, good], threads=1) == 1
    lines = capsys.readouterr().err
    assert "compiled 1 of 2" in lines and "not compiled ahead: sampler 16 x 512: no memory" in lines


def test_close_to_the_limit_of_mappings_nothing_more_is_compiled(monkeypatch):
    monkeypatch.setattr(compile_ahead, "mappings_in_use", lambda: (75, 100))
    assert compile_programs([program(7)[0]], threads=1) == 0


@pytest.mark.parametrize("is_committed", [False, True])
def test_results_have_a_sharding_if_an_argument_is_committed(is_committed):
    x = jnp.arange(3.0)
    x = jax.device_put(x, jax.devices()[0]) if is_committed else x
    executable = jax.jit(lambda x: x + 1).lower(x).compile()
    result = abstract_results(executable, (x,))
    assert (result.sharding is not None) == is_committed and result.shape == (3,)


@pytest.mark.parametrize("is_committed", [False, True])
def test_arrays_are_committed_as_the_results_of_a_program_would_be(is_committed):
    x, weights = jnp.arange(4.0), jnp.ones(4)
    arguments = (x, jax.device_put(weights, jax.devices()[0]) if is_committed else weights)
    result, placed = jax.jit(jnp.multiply)(*arguments), commit_like(x, arguments)
    assert placed.committed == result.committed == is_committed
    assert (sharding_of_results(arguments) == result.sharding) == is_committed
    assert placed.unsafe_buffer_pointer() == x.unsafe_buffer_pointer(), "a copy"
