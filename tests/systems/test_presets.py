"""The config files of the papers: the preset `paper` has the defaults of a system."""

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


def code(name: str) -> Any:
    """The choices of the code of a paper."""
    return settings_of(name, f"{name}.py", "code")


@pytest.mark.parametrize("name", ["coda", "mao_arag", "mmoa_rag", "opera"])
def test_the_default_of_a_system_is_the_preset_of_its_paper(name):
    module = system_module(name)
    assert settings_of(name, f"{name}.py") == module.Settings() != code(name)
    tiny = settings_of(name, f"tiny/{name}.py")
    assert tiny != module.Settings() and module.recipe(tiny).system == tiny.system
