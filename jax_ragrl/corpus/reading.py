"""The way in which a file becomes passages: names of fields, and division into chunks."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from jax_ragrl.corpus.chunks import WORDS, Chunks, Units, divide_all
from jax_ragrl.corpus.formats import iter_passages
from jax_ragrl.corpus.formats.own import NO_FIELDS
from jax_ragrl.types import Passage


class Reading(NamedTuple):
    """How the passages of a file are read.

    Fields:
      fields: the names of fields in the file, see `formats.own`.
      chunks: the division of long passages; None leaves all whole.
      units: the units of the division.
    """

    fields: Mapping[str, str] = NO_FIELDS
    chunks: Chunks | None = None
    units: Units = WORDS

    def describe(self) -> dict[str, Any]:
        """Returns an identity for JSON; empty if the file is read as it is."""
        parts: dict[str, Any] = {"fields": dict(self.fields)} if self.fields else {}
        if self.chunks:
            parts["chunk"] = dataclasses.asdict(self.chunks) | {"units": self.units.name}
        return parts

    def passages(self, path: pathlib.Path | str, format: str | None = None) -> Iterator[Passage]:
        """Yields the passages of a file lazily; arguments and errors as `iter_passages`."""
        passages = iter_passages(path, format, self.fields)
        return divide_all(passages, self.chunks, self.units) if self.chunks else passages


AS_IS = Reading()  # the file as it is
