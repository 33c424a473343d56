"""The config files of the papers hold the presets of their systems."""

from __future__ import annotations

import runpy
from typing import Any

import pytest

from jax_ragrl.cli.main import CONFIGS
from jax_ragrl.config.schema import build
from jax_ragrl.systems.registry import system_module


def settings_of(name: str, file: str, *preset: str) -> Any:
    config = runpy.run_path(str(CONFIGS / file))["get_config"](*preset)
    assert config.system == name
    if "expert_pool" in config.recipe:
        config.recipe.expert_pool = "" if not file.startswith("tiny") else "world"
    return build(system_module(name).Settings, config.recipe.to_dict())


@pytest.mark.parametrize("name", ["coda", "mao_arag", "mmoa_rag", "opera"])
def test_the_configs_contain_the_presets(name):
    module = system_module(name)
    paper, code = settings_of(name, f"{name}.py"), settings_of(name, f"{name}.py", "code")
    assert paper == module.paper() == module.Settings() != code == module.code()
    tiny = settings_of(name, f"tiny/{name}.py")
    assert tiny != paper and module.recipe(tiny).system == tiny.system
