"""The config files that ship with the package."""

from __future__ import annotations

import pathlib

_PACKAGE = pathlib.Path(__file__).parents[1]
_PACKAGED = _PACKAGE / "configs"
# A wheel has the configs in the package, a checkout next to it.
CONFIGS = _PACKAGED if _PACKAGED.is_dir() else _PACKAGE.parent / "configs"


def config_path(name: str) -> pathlib.Path:
    """Returns the path of a config file.

    A file of the working directory comes first; `configs/...` is otherwise a shipped file, so that
    the commands of the documentation work in any folder.

    Args:
      name: the path.
    """
    path = pathlib.Path(name)
    is_shipped = not path.exists() and path.parts[:1] == ("configs",)
    return CONFIGS.joinpath(*path.parts[1:]) if is_shipped else path
