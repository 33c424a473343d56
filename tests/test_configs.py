"""Every config of the project loads, and its sections are read."""

import importlib.util
import pathlib

import pytest
from ml_collections import ConfigDict, config_dict

from jax_ragrl.cli import CONFIGS
from jax_ragrl.train.assemble import load_job
from jax_ragrl.train.finetune import load_finetune
from jax_ragrl.train.warmup import load_warmup

FILES = sorted(CONFIGS.glob("**/*.py"))


def values_of(file: pathlib.Path, *args: str) -> dict:
    """The config's values, with what a user has to name filled in."""
    spec = importlib.util.spec_from_file_location("config", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = module.get_config(*args)

    def fill(values: ConfigDict) -> None:
        for key in list(values):
            reference = values.get_ref(key) if isinstance(values, ConfigDict) else None
            if isinstance(reference, config_dict.FieldReference) and reference._value is None:
                values[key] = "given"
            elif isinstance(values[key], ConfigDict):
                fill(values[key])

    fill(config)
    return config.to_dict()


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(CONFIGS)))
def test_a_config_loads(file):
    values = values_of(file)
    if file.stem.startswith("warmup"):
        config, lesson = load_warmup(values)
        assert all(lesson.teacher(stage.teacher) for stage in config.stages)
        return
    if "rows" in values:
        assert load_finetune(values).steps > 0
        return
    job = load_job(values)
    roles = job.recipe.system.roles
    assert job.temperature > 0 and job.schedule.roles(0, tuple(roles))
    assert file.read_text(encoding="utf-8").count("ragrl ") >= 1, "a config says how it is run"
