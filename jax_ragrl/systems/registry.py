"""Registry of the systems by their short names; any other module is found by its dotted name.

A system is one module or package with
  Settings          a frozen dataclass, the config section `recipe`;
  recipe(settings)  returns a `Recipe`;
  table_system(style, top_k, *, tiny)
                    optional: the system that `ragrl evaluate` runs under this name, in a prompt
                    style; `tiny` for the model that ships with the package;
  TEACHER           optional: the name of the system whose warm-up teacher and labels it uses.
Its warm-up teacher is the class `Teacher` of `warmstart/teachers/NAME.py`; its labels come from the
class `Labeler` of `warmstart/labels/NAME.py`.
"""

from __future__ import annotations

import contextlib
import pkgutil
from collections.abc import Mapping
from typing import Any

from jax_ragrl.config.functions import own_module
from jax_ragrl.errors import UserError
from jax_ragrl.rollout.roles import FAULTS
from jax_ragrl.systems import baselines

# The modules of this package that have a short name, with the names of their papers. They are
# imported on demand, so that one broken system does not stop the others.
PAPERS: Mapping[str, str] = {
    "c3po": "C-3PO",
    "mmoa_rag": "MMOA-RAG",
    "coda": "CoDA",
    "mao_arag": "MAO-ARAG",
    "opera": "OPERA",
}


def system_module(name: str) -> Any:
    """Returns the module of a system; raises `UserError` if there is none or importing it fails."""
    try:
        return own_module(f"jax_ragrl.systems.{name}" if name in PAPERS else name)
    except ImportError as error:
        raise UserError(
            f"config.system is {name!r}: use {', '.join(PAPERS)}, or the dotted name of a module "
            f"({error})"
        ) from error


def known_faults(system: str = "") -> dict[str, str]:
    """Returns the kinds of malformed actions and early ends, each with a sentence, by the alphabet.

    `system` is one besides those of the package; it is left out if it cannot be imported.
    """
    found = dict(FAULTS)
    names = [m.name for m in pkgutil.iter_modules(baselines.__path__, f"{baselines.__name__}.")]
    with contextlib.suppress(UserError):
        for name in (*PAPERS, *names, system):
            for value in vars(system_module(name)).values():
                found |= getattr(value, "FAULTS", {}) if isinstance(value, type) else {}
    return dict(sorted(found.items()))


def explain(kind: str, faults: Mapping[str, str]) -> str:
    """Returns the sentence of an error or finish reason, such as `No Plan`; may be empty."""
    return faults.get(kind.removeprefix("answered, "), "")
