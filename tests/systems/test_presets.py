"""The registry of systems, and the config files of the papers: a preset has their defaults."""

import dataclasses
import re
import runpy
import sys
import types
from typing import Any

import pytest

from jax_ragrl.cli.main import CONFIGS
from jax_ragrl.config.schema import build
from jax_ragrl.errors import UserError
from jax_ragrl.evaluation.registry import SYSTEMS
from jax_ragrl.rollout.roles import TOO_LONG, UNCLOSED_THOUGHT
from jax_ragrl.rollout.tree import LIMITS
from jax_ragrl.systems.base import Recipe
from jax_ragrl.systems.registry import PAPERS, explain, known_faults, system_module
from jax_ragrl.warmstart.teacher_examples import TEACHERS, teacher_of


def settings_of(name: str, file: str, *preset: str) -> Any:
    config = runpy.run_path(str(CONFIGS / file))["get_config"](*preset)
    assert config.system == name
    if "expert_pool" in config.recipe:
        config.recipe.expert_pool = "" if not file.startswith("tiny") else "world"
    return build(system_module(name).Settings, config.recipe.to_dict())


def code(name: str) -> Any:
    return settings_of(name, f"{name}.py", "code")


@pytest.mark.parametrize("name", ["coda", "mao_arag", "mmoa_rag", "opera"])
def test_the_default_of_a_system_is_the_preset_of_its_paper(name):
    module = system_module(name)
    assert settings_of(name, f"{name}.py") == module.Settings() != code(name)
    tiny = settings_of(name, f"tiny/{name}.py")
    assert tiny != module.Settings() and module.recipe(tiny).system == tiny.system


@pytest.mark.parametrize("name", PAPERS)
def test_a_registered_system_is_complete(name):
    module = system_module(name)
    assert dataclasses.is_dataclass(module.Settings) and system_module(module.__name__) is module
    assert isinstance(module.recipe(module.Settings()), Recipe)
    assert module.table_system(name, 3, tiny=False).top_k == 3 and name in SYSTEMS
    assert name in TEACHERS and teacher_of(name).__module__.endswith(f"teachers.{name}")


def test_a_system_may_name_another_ones_teacher(monkeypatch):
    assert teacher_of("jax_ragrl.systems.baselines.executor") is teacher_of("coda")
    module = types.ModuleType("sixth_system")
    monkeypatch.setitem(sys.modules, "sixth_system", module)
    with pytest.raises(UserError, match="sixth_system.* has no teacher"):
        teacher_of("sixth_system")
    module.TEACHER = "opera"
    assert teacher_of("sixth_system") is teacher_of("opera")


def test_a_system_declares_a_sentence_for_each_of_its_faults(monkeypatch):
    module = types.ModuleType("seventh_system")
    module.Own = type("Own", (), {"FAULTS": {"Lost Thread": "The answer is to another question."}})
    monkeypatch.setitem(sys.modules, "seventh_system", module)
    faults = known_faults("seventh_system")
    assert faults.keys() - known_faults("not.installed") == {"Lost Thread"}
    assert {TOO_LONG, UNCLOSED_THOUGHT, *LIMITS, "No Query"} < faults.keys()
    assert all(re.fullmatch(r"[A-Z][^.]+\.", text) for text in faults.values())
    assert explain("answered, Out Of Turns", faults) == faults["Out Of Turns"]
    assert explain("answered", faults) == explain("The server said no", faults) == ""
