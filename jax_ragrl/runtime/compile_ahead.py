"""Compiles programs before they are called, several at a time.

A jitted function compiles within its first call, so a run meets its programs one after another, and
the devices wait. Here threads compile a list of them first: `f.lower(...).compile()` keeps the
program for a later call, if its arguments have the same shapes, dtypes and shardings.
(Tracing holds Python's lock; the compiler of XLA, which takes most of the time, does not.)
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import tqdm
from jax.sharding import Mesh

from jax_ragrl.runtime.mappings import is_near_limit, mappings_in_use
from jax_ragrl.runtime.multihost import is_process_zero
from jax_ragrl.runtime.progress import progress
from jax_ragrl.runtime.sharding import mesh_context


@dataclasses.dataclass(frozen=True)
class Program:
    """A jitted function with the arguments of a later call, whose arrays are not read.

    Fields:
      name: its kind and shape, as a run reports them.
      function: the jitted function.
      args, kwargs: the arguments, with arrays or abstract arrays.
      mesh: the mesh that is set when the function is called; None: none is.
      follow: compiles programs that take the results, which are passed to it without data.
    """

    name: str
    function: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    mesh: Mesh | None = None
    follow: Callable[[Any], None] | None = None

    def key(self) -> Hashable:
        """Returns a value that is equal for calls of one compiled program."""
        leaves, tree = jax.tree.flatten((self.args, dict(self.kwargs)))
        return self.function.__wrapped__, tree, tuple(map(_leaf_key, leaves))

    def compile(self) -> None:
        """Compiles the program, and those that follow."""
        # The mesh is a setting of the thread.
        with mesh_context(self.mesh):
            program = self.function.lower(*self.args, **self.kwargs).compile()
            if self.follow is not None:
                self.follow(abstract_results(program, (self.args, self.kwargs)))


def compile_programs(programs: Sequence[Program], threads: int) -> int:
    """Compiles programs in threads, with a bar in the terminal.

    A program that cannot be compiled is named and left out: a run may never call it. On a CPU the
    rest is left out close to the limit of memory mappings, beyond which a process dies.

    Args:
      programs: the programs; of equal ones the first is compiled. All processes of a run give the
        same list, and each begins them in order: a compiler that waits for other processes finds
        them at the same programs.
      threads: the number of threads.

    Returns:
      The number of distinct programs of the list that are compiled.
    """
    start, failures = time.perf_counter(), list[str]()
    distinct = list({program.key(): program for program in reversed(programs)}.values())[::-1]
    is_shown = is_process_zero()

    def compile_one(program: Program) -> bool:
        if is_near_limit(*mappings_in_use()):
            return False
        try:
            program.compile()
        except Exception as error:
            first, *_ = str(error).splitlines() or [type(error).__name__]
            failures.append(f"not compiled ahead: {program.name}: {first}")
            return False
        finally:
            bar.update(1)
        return True

    with progress("compile", "program", len(distinct)) as bar, ThreadPoolExecutor(threads) as pool:
        count = sum(pool.map(compile_one, distinct))
    if is_shown:
        message = f"compiled {count} of {len(distinct)} programs ahead, {threads} at a time: "
        lines = [f"{message}{time.perf_counter() - start:.1f} s", *failures]
        tqdm.tqdm.write("\n".join(lines), file=sys.stderr)
    return count


def abstract_results(program: Any, arguments: Any) -> Any:
    """Returns the results of a compiled program as a later call sees them, without data.

    Args:
      program: the result of `lower(...).compile()`.
      arguments: a tree with the arrays that the program was lowered for.
    """
    # Results of uncommitted arguments are uncommitted: to a call they have no sharding.
    is_committed = any(_sharding(x) is not None for x in jax.tree.leaves(arguments))

    def abstract(x: Any, sharding: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding if is_committed else None)

    return jax.tree.map(abstract, program.out_info, program.output_shardings)


def _leaf_key(x: Any) -> Hashable:
    return (x.shape, x.dtype, _sharding(x)) if hasattr(x, "shape") else x


def _sharding(x: Any) -> Any:
    """The sharding of an array that is committed to its devices, or of an abstract array."""
    return getattr(x, "sharding", None) if getattr(x, "committed", True) else None
