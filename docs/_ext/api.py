"""The Python API: the public face, and one page per package."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator

import jax_ragrl


def packages() -> list[str]:
    """The packages and modules directly below `jax_ragrl`."""
    return sorted(m.name for m in pkgutil.iter_modules(jax_ragrl.__path__))


def modules(package: str) -> Iterator[str]:
    """The modules of a package, the package itself first."""
    name = f"jax_ragrl.{package}"
    yield name
    module = importlib.import_module(name)
    for found in pkgutil.iter_modules(getattr(module, "__path__", [])):
        yield from modules(f"{package}.{found.name}")


def documented(name: str) -> bool:
    """Whether a module has public definitions of its own."""
    module = importlib.import_module(name)
    own = [v for n, v in vars(module).items() if not n.startswith("_")]
    kinds = (inspect.isfunction, inspect.isclass)
    return any(any(kind(v) for kind in kinds) and v.__module__ == name for v in own)


def markdown(package: str) -> str:
    """The text of the page of one package."""
    parts = []
    for name in modules(package):
        head = "" if name == f"jax_ragrl.{package}" else f"## `{name}`\n"
        # What a package only imports from its modules is documented with these.
        text = automodule(name) if documented(name) else f"{docstring(name)}\n"
        parts += [head, text]
    return "\n".join(parts)


def docstring(name: str) -> str:
    """The first paragraph of a module's docstring."""
    return (inspect.getdoc(importlib.import_module(name)) or "").partition("\n\n")[0]


def automodule(name: str) -> str:
    """The directive that documents a module."""
    return f"```{{eval-rst}}\n.. automodule:: {name}\n   :members:\n```\n"


def public() -> str:
    """The names of `import jax_ragrl`, if it has any."""
    names = sorted(getattr(jax_ragrl, "__all__", ()), key=lambda name: (name[0].isupper(), name))
    lines = []
    for name in names:
        value = getattr(jax_ragrl, name)
        kind = "autoclass" if inspect.isclass(value) else "autofunction"
        if not (inspect.isclass(value) or callable(value)):
            kind = "autodata"
        members = "   :members:\n" if kind == "autoclass" else ""
        lines.append(f"```{{eval-rst}}\n.. {kind}:: jax_ragrl.{name}\n{members}```\n")
    return "\n".join(lines)
