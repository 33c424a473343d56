"""Reads the text of an optimized HLO module: computations, instructions, shapes in memory.

The text is the output of `Compiled.as_text()`. Source of the format: the HLO parser of OpenXLA
(`xla/hlo/parser`).
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple

HEADER = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(.*\{$")
INSTRUCTION = re.compile(r"^\s+(?P<root>ROOT )?%?(?P<name>[\w.\-]+) = (?P<rest>.*)$")
OPERATION = re.compile(r" ([a-z][\w\-]*)\(")
ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\](\{[^}]*\})?")
CALLEES = re.compile(r"\b(?:calls|to_apply|body|true_computation|false_computation)=%?([\w.\-]+)")
BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
CONDITION = re.compile(r"\bcondition=%?([\w.\-]+)")
TARGET = re.compile(r'\bcustom_call_target="([^"]*)"')
DIRECTION = re.compile(r"\bdirection=(\w+)")
TRIP_COUNT = re.compile(r'known_trip_count"?:\{"n":"(\d+)"')
# Memory spaces other than 0 (device memory) and 5 (of the host) are on the chip, in a TPU's VMEM.
ON_CHIP = re.compile(r"S\([1-46-9]\)")
# Targets of custom calls whose last result may be scratch memory.
LIBRARIES = ("__cublas", "__cudnn")


class Instruction(NamedTuple):
    """One instruction of a computation.

    Fields:
      shape: the text of its shape, with layouts.
      operation: the opcode, such as `fusion`.
      callees: names of the computations that it executes, without the condition of a loop.
      number: the number of a parameter; -1 for all others.
      trips: iterations of a loop, if it says them; None otherwise, see `Module.trips`.
      condition: name of the computation that ends a loop.
      literal: the value of a constant, the direction of a comparison, or the target of a call to a
        library.
    """

    name: str
    shape: str
    operation: str
    operands: tuple[str, ...]
    callees: tuple[str, ...]
    number: int = -1
    trips: int | None = None
    condition: str = ""
    literal: str = ""


class Computation(NamedTuple):
    """A list of instructions; `root` is the name of the one whose value it returns."""

    instructions: dict[str, Instruction]
    root: str

    def users(self, name: str) -> list[Instruction]:
        return [x for x in self.instructions.values() if name in x.operands]

    def parameter(self, number: int) -> Instruction:
        return next(x for x in self.instructions.values() if x.number == number)


class Module(NamedTuple):
    """The computations of a module by name; `entry` names the first one."""

    computations: dict[str, Computation]
    entry: str

    def trips(self, loop: Instruction) -> int | None:
        """Returns the iterations of a loop; None if they are unknown.

        A TPU's compiler does not write them down. A scan of JAX counts from 0 by 1 and ends at a
        constant, `number < constant`.
        """
        condition = self.computations.get(loop.condition)
        if loop.trips is not None or condition is None:
            return loop.trips
        test = condition.instructions[condition.root]
        if (test.operation, test.literal) != ("compare", "LT"):
            return None
        limit = condition.instructions[test.operands[1]]
        return int(limit.literal) if limit.operation == "constant" else None


def parse(text: str) -> Module:
    """Returns the computations of the text of a module."""
    computations, entry, name = dict[str, Computation](), "", ""
    for line in text.splitlines():
        if header := HEADER.match(line):
            name = header["name"]
            computations[name] = Computation({}, "")
            entry = name if header["entry"] else entry
        elif name and (match := INSTRUCTION.match(line)):
            instruction = _instruction(match["name"], match["rest"])
            computations[name].instructions[instruction.name] = instruction
            if match["root"]:
                computations[name] = computations[name]._replace(root=instruction.name)
    return Module(computations, entry)


def _instruction(name: str, rest: str) -> Instruction:
    operation = OPERATION.search(f" {rest}")
    if operation is None:
        return Instruction(name, rest, "unknown", (), ())
    shape, arguments = rest[: max(operation.start() - 1, 0)], rest[operation.end() - 1 :]
    inner, attributes = _split_at_close(arguments)
    is_parameter = operation[1] == "parameter"
    operands = () if is_parameter else tuple(re.findall(r"%([\w.\-]+)", inner))
    callees = CALLEES.findall(attributes)
    for branches in BRANCHES.findall(attributes):
        callees += re.findall(r"[\w.\-]+", branches)
    # Other instructions may quote the attributes of a loop in their metadata.
    trips = TRIP_COUNT.search(attributes) if operation[1] == "while" else None
    number = int(inner) if is_parameter else -1
    count = int(trips[1]) if trips else None
    condition = CONDITION.search(attributes) if operation[1] == "while" else None
    return Instruction(
        *(name, shape, operation[1], operands, tuple(callees), number, count),
        condition=condition[1] if condition else "",
        literal=_literal(operation[1], inner, attributes),
    )


def _literal(operation: str, inner: str, attributes: str) -> str:
    if operation == "compare" and (direction := DIRECTION.search(attributes)):
        return direction[1]
    if operation == "custom-call" and (target := TARGET.search(attributes)):
        return target[1]
    return inner if operation == "constant" else ""


def _split_at_close(text: str) -> tuple[str, str]:
    """Splits a text at the parenthesis that closes one opened before it."""
    depth = 1
    for at, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if not depth:
            return text[:at], text[at + 1 :]
    return text, ""


def shape_bytes(shape: str) -> int:
    """Returns the bytes that a shape takes in device memory; arrays on the chip need nothing."""
    return sum(_array_bytes(*array) for array in ARRAY.findall(shape))


def total_bytes(shape: str) -> int:
    """Returns the bytes of the arrays of a shape, in device memory and on the chip."""
    return shape_bytes(ON_CHIP.sub("", shape))


def workspace_bytes(x: Instruction) -> int:
    """Returns the bytes of the scratch memory of a call to cuBLAS or cuDNN, its last result.

    The library may use a part of it, or nothing; the data that it keeps there stay in the cache.
    """
    if x.operation != "custom-call" or not x.literal.startswith(LIBRARIES):
        return 0
    *results, (dtype, sizes, layout) = ARRAY.findall(x.shape)
    return _array_bytes(dtype, sizes, layout) if results and dtype in ("s8", "u8") else 0


def slice_bytes(shape: str) -> int:
    """Returns the bytes that a `slice-start` reads and writes in device memory.

    Its shape is a tuple of the operand, the slice and a context; the operand is not read in full.
    """
    _, (dtype, sizes, layout), *_ = ARRAY.findall(shape)
    return _array_bytes(dtype, sizes, "") + _array_bytes(dtype, sizes, layout)


def _array_bytes(dtype: str, sizes: str, layout: str) -> int:
    if ON_CHIP.search(layout):
        return 0
    count = math.prod(int(size) for size in sizes.split(",") if size)
    return -(-count * _bits(dtype) // 8)


def _bits(dtype: str) -> int:
    if dtype == "pred":
        return 8
    width = re.match(r"[a-z]+(\d+)", dtype)
    return int(width[1]) if width else 0  # a token or an opaque value
