"""The config files that ship with the package."""

from __future__ import annotations

import ast
import difflib
import pathlib

_PACKAGE = pathlib.Path(__file__).parents[1]
_PACKAGED = _PACKAGE / "configs"
# A wheel has the configs in the package, a checkout next to it.
CONFIGS = _PACKAGED if _PACKAGED.is_dir() else _PACKAGE.parent / "configs"


def shipped_configs() -> dict[str, str]:
    """Returns the first line of the docstring of each shipped config, by its name `configs/...`."""
    # A name with an underscore is a part of the configs beside it.
    files = sorted(path for path in CONFIGS.rglob("[!_]*.py") if "__pycache__" not in path.parts)
    # Parsed, because importing a config loads its libraries.
    modules = {name_of(path): ast.parse(path.read_text(encoding="utf-8")) for path in files}
    return {n: (ast.get_docstring(m) or "").partition("\n")[0] for n, m in modules.items()}


def name_of(path: pathlib.Path) -> str:
    """Returns the name `configs/...` of a shipped config, which works in any folder."""
    return str(pathlib.PurePosixPath("configs", *path.relative_to(CONFIGS).parts))


def nearest_config(name: str) -> str:
    """Returns the shipped config whose name is nearest to a wrong one; empty if none is near."""
    names = list(shipped_configs())
    # What one remembers is often the end alone, such as real/c3po.py.
    ends = [
        full for full in names if full.removesuffix(".py").endswith(f"/{name.removesuffix('.py')}")
    ]
    return next(iter(ends or difflib.get_close_matches(name, names, 1, 0.8)), "")


def config_path(name: str) -> pathlib.Path:
    """Returns the path of a config file.

    A file of the working directory comes first; `configs/...` is otherwise a shipped file, so that
    the commands of the documentation work in any folder.
    """
    path = pathlib.Path(name)
    is_shipped = not path.exists() and path.parts[:1] == ("configs",)
    return CONFIGS.joinpath(*path.parts[1:]) if is_shipped else path
