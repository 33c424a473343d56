"""Traffic of a compiled program: memory, collectives and kernels, from its optimized HLO.

XLA's own cost analysis has the same rules, with three differences: here the body of a loop counts
as often as it runs, and an array in a TPU's VMEM and the scratch memory of a library cost nothing.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

from jax_ragrl.plan.hlo import (
    Computation,
    Instruction,
    Module,
    parse,
    shape_bytes,
    slice_bytes,
    total_bytes,
    workspace_bytes,
)

# Operations that name, group or alias arrays, and move none.
FREE = frozenset(
    "parameter constant tuple get-tuple-element bitcast after-all partition-id replica-id "
    "opt-barrier domain add-dependency".split()
)
ALIASES = frozenset(("bitcast", "reshape"))
SLICES = frozenset(("slice", "dynamic-slice", "gather"))
UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # the operand with the new values
# Parts of a collective that a TPU began earlier: fusions that also compute, and the last one.
LATER_PARTS = ("async_collective_fusion", "AsyncCollectiveDone")
COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")


@dataclasses.dataclass
class Traffic:
    """The work of one execution on one device.

    Fields:
      hbm_bytes: bytes that are read from and written to device memory.
      kernels: instructions that run: kernels on a GPU, program steps on a TPU.
      collective_bytes: per kind, the larger of operands and results, which may lie on the chip.
      collectives: per kind, how many.
      unknown_loops: loops whose number of iterations the compiler does not know; one is counted.
    """

    hbm_bytes: int = 0
    kernels: int = 0
    collective_bytes: dict[str, int] = dataclasses.field(default_factory=dict)
    collectives: dict[str, int] = dataclasses.field(default_factory=dict)
    unknown_loops: int = 0

    def add(self, other: Traffic, times: int = 1) -> None:
        self.hbm_bytes += times * other.hbm_bytes
        self.kernels += times * other.kernels
        self.unknown_loops += other.unknown_loops
        for mine, more in (
            (self.collective_bytes, other.collective_bytes),
            (self.collectives, other.collectives),
        ):
            for kind, number in more.items():
                mine[kind] = mine.get(kind, 0) + times * number

    def facts(self) -> dict[str, object]:
        """Returns the numbers for a report, without the empty ones."""
        kinds = {
            kind: {"count": self.collectives[kind], "bytes": self.collective_bytes[kind]}
            for kind in sorted(self.collectives)
        }
        return {"hbm_bytes": self.hbm_bytes, "kernels": self.kernels, "collectives": kinds}


def program_traffic(text: str) -> Traffic:
    """Returns the work of a whole program, given its optimized HLO."""
    module = parse(text)
    return _Counter(module).computation(module.entry)


def loop_traffic(text: str) -> Traffic | None:
    """Returns the work of one iteration of the loop that decodes tokens; None without one.

    It is the outermost loop of unknown length with the most traffic: a row may end at any token.
    """
    module = parse(text)
    counter = _Counter(module)
    bodies = [counter.computation(name) for name in _unknown_bodies(module, module.entry)]
    return max(bodies, key=lambda x: x.hbm_bytes, default=None)


def _unknown_bodies(module: Module, name: str) -> Iterator[str]:
    for x in module.computations[name].instructions.values():
        if x.operation == "while" and module.trips(x) is None:
            yield from x.callees
        elif x.operation in ("while", "call", "conditional", "async-start"):
            for name in x.callees:
                yield from _unknown_bodies(module, name)


class _Counter:
    """Counts the computations of a module, each of them once."""

    def __init__(self, module: Module) -> None:
        self._module, self._computations = module, module.computations
        self.computation = functools.cache(self._computation)

    def _computation(self, name: str) -> Traffic:
        computation, total = self._computations[name], Traffic()
        for x in computation.instructions.values():
            total.add(self._instruction(computation, x))
        return total

    def _instruction(self, computation: Computation, x: Instruction) -> Traffic:
        if x.operation in FREE or x.operation.endswith("-done"):
            return Traffic()
        if x.operation in ("while", "call", "conditional", "async-start"):
            return self._nested(x)
        traffic = Traffic(self._moved(computation, x), kernels=1)
        if collective := self._collective(computation, x):
            kind, size = collective
            traffic.collectives, traffic.collective_bytes = {kind: 1}, {kind: size}
        return traffic

    def _nested(self, x: Instruction) -> Traffic:
        trips = self._module.trips(x)
        total = Traffic(unknown_loops=int(x.operation == "while" and trips is None))
        bodies = [self.computation(name) for name in x.callees]
        if x.operation == "conditional":
            # Which branch runs is unknown before the run; the costlier one is the safe guess.
            bodies = [max(bodies, key=lambda traffic: traffic.hbm_bytes)]
        for body in bodies:
            total.add(body, 1 if trips is None else trips)
        return total

    def _collective(self, computation: Computation, x: Instruction) -> tuple[str, int] | None:
        """The kind and the bytes of a collective, alone or inside of a fusion."""
        if x.operation == "fusion":
            return self._fused_collective(computation, x)
        kind = next((kind for kind in COLLECTIVES if x.operation.startswith(kind)), None)
        return (kind, _exchanged(computation, x)) if kind else None

    def _fused_collective(self, computation: Computation, x: Instruction) -> tuple[str, int] | None:
        # A TPU scatters a sum by a fusion of an all-reduce and a slice.
        if any(name.startswith("all-reduce-scatter") for name in x.callees):
            return "reduce-scatter", _exchanged(computation, x)
        bodies = [self._computations[name] for name in x.callees]
        parts = [y.literal for body in bodies for y in body.instructions.values()]
        if any(part.startswith(LATER_PARTS) for part in (*x.callees, *parts)):
            return None
        inside = (self._collective(body, y) for body in bodies for y in body.instructions.values())
        return min(filter(None, inside), key=lambda x: COLLECTIVES.index(x[0]), default=None)

    def _moved(self, computation: Computation, x: Instruction) -> int:
        """Bytes that one instruction reads and writes."""
        if x.operation == "fusion":
            return self._fusion(computation, x)
        if x.operation in SLICES:
            return 2 * shape_bytes(x.shape)
        if x.operation in UPDATES:
            return 2 * shape_bytes(_operand(computation, x, UPDATES[x.operation]).shape)
        if x.operation == "slice-start":
            return slice_bytes(x.shape)
        if x.operation.endswith("-start"):  # its shape is a tuple that has the operands too
            return shape_bytes(x.shape)
        operands = (computation.instructions[name].shape for name in x.operands)
        return sum(map(shape_bytes, (*operands, x.shape))) - workspace_bytes(x)

    def _fusion(self, computation: Computation, x: Instruction) -> int:
        # Arrays between the instructions of a fusion stay in registers: only its ends move bytes.
        inside = self._computations[x.callees[0]]
        total = self._written(inside, inside.root, shape_bytes(x.shape))
        for number, name in enumerate(x.operands):
            if size := shape_bytes(computation.instructions[name].shape):
                total += self._read(x.callees[0], inside.parameter(number).name, size)
        return total

    def _read(self, name: str, array: str, size: int) -> int:
        """Bytes of an array of a `size` that the computation `name` reads: its slices, or all."""
        computation, total = self._computations[name], 0
        for user in computation.users(array):
            at = user.operands.index(array)
            if user.operation in SLICES and at == 0:
                total += shape_bytes(user.shape)
            elif user.operation == "fusion":
                inside = self._computations[user.callees[0]]
                inner = inside.parameter(at).name
                total += self._read(user.callees[0], inner, size)
                # A fusion may only rename an array, which is then read by the users of the fusion.
                if _source(inside, inside.root) == inner:
                    total += self._read(name, user.name, size)
            elif user.operation in ALIASES:
                total += self._read(name, user.name, size)
            elif not (user.operation in UPDATES and at == 0) and user.operation != "tuple":
                return size
        return min(total, size)

    def _written(self, inside: Computation, name: str, size: int) -> int:
        """Bytes that a fusion with a result of a `size` writes: an update, or all of it."""
        x = inside.instructions[name]
        if x.operation in ALIASES:
            return self._written(inside, x.operands[0], size)
        if x.operation in UPDATES:
            return min(size, shape_bytes(_operand(inside, x, UPDATES[x.operation]).shape))
        if x.operation == "fusion":
            inner = self._computations[x.callees[0]]
            return self._written(inner, inner.root, size)
        if x.operation == "tuple":
            parts = [inside.instructions[name].shape for name in x.operands]
            pairs = zip(x.operands, map(shape_bytes, parts), strict=True)
            return min(size, sum(self._written(inside, part, n) for part, n in pairs))
        return size


def _source(computation: Computation, name: str) -> str:
    """The array that an instruction renames; its own name if it is not an alias."""
    x = computation.instructions[name]
    return _source(computation, x.operands[0]) if x.operation in ALIASES else name


def _operand(computation: Computation, x: Instruction, number: int) -> Instruction:
    return computation.instructions[x.operands[number]]


def _exchanged(computation: Computation, x: Instruction) -> int:
    """The larger of the operands and the results of a collective, in bytes."""
    operands = sum(total_bytes(computation.instructions[name].shape) for name in x.operands)
    # The shape of a start may be a tuple that has the operands too.
    results = total_bytes(x.shape) - (operands if x.operation.endswith("-start") else 0)
    return max(operands, results)
