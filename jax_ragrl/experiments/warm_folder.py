"""The folder of a warm start, which several trainings may share: it belongs to one config."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from jax_ragrl.config.snapshot import LOCATION_KEYS, check_saved_config, save_config
from jax_ragrl.run.lock import lock_folder

SETTINGS = "settings.json"  # `config.json` is that of the supervised training alone
# Sections of a run on which demonstrations on its questions depend.
DEMO_KEYS = (
    *("system", "recipe", "data", "index", "llm", "policy", "policies", "thinking", "grammar"),
)


class WarmFolder(NamedTuple):
    """A folder and the settings of the warm start in it.

    Fields:
      folder: the output folder.
      settings: nested values of all that determines the result.
      results: files or folders of which each that has content is a part of a result.
      option: the option that names another folder, for errors.
    """

    folder: pathlib.Path
    settings: Mapping[str, Any]
    results: tuple[pathlib.Path, ...]
    option: str = "--out"

    def check(self) -> None:
        """Raises `UserError` if the folder has results of other settings."""
        if self._has_results():
            check_saved_config(self.folder / SETTINGS, self.settings, LOCATION_KEYS, self.option)

    def claim(self) -> None:
        """Saves the settings before the first result, and checks them after it.

        Raises:
          UserError: the folder has results of other settings, or another process begins there.
        """
        self.check()
        if not self._has_results():
            # Until there are results, another process could save its own settings.
            lock_folder(self.folder, self.option)
            save_config(self.folder / SETTINGS, self.settings, renew=True)

    def _has_results(self) -> bool:
        # A first attempt that failed leaves empty files.
        return any(path.is_dir() or path.exists() and path.stat().st_size for path in self.results)


def warm_settings(
    warm: Mapping[str, Any], values: Mapping[str, Any], **more: Any
) -> dict[str, Any]:
    """Returns the settings of a warm start on demonstrations.

    Args:
      warm: the config of the supervised training; the file of demonstrations does not count.
      values: the config of the run whose questions are demonstrated.
      more: further settings, such as the number of questions.
    """
    return {**warm, **{key: values[key] for key in DEMO_KEYS if key in values}, **more}
