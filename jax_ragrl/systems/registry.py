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

import importlib
from collections.abc import Mapping
from typing import Any

from jax_ragrl.errors import UserError

# A new system needs one line here. Modules are imported on demand, so that one broken system does
# not stop the others.
MODULES: Mapping[str, str] = {
    "c3po": "jax_ragrl.systems.c3po",
    "mmoa_rag": "jax_ragrl.systems.mmoa_rag",
    "coda": "jax_ragrl.systems.coda",
    "mao_arag": "jax_ragrl.systems.mao_arag",
    "opera": "jax_ragrl.systems.opera",
}


def system_module(name: str) -> Any:
    """Returns the module of a system: a key of `MODULES`, or any dotted name.

    Raises:
      UserError: there is no such module, or importing it fails.
    """
    try:
        return importlib.import_module(MODULES.get(name, name))
    except (ImportError, ValueError) as error:
        raise UserError(
            f"config.system is {name!r}: use {', '.join(MODULES)}, or the dotted name of a module "
            f"({error})"
        ) from error
