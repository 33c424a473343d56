"""Every config of the project loads as the command line loads it, and its sections are read."""

import pathlib

import pytest

from jax_ragrl.cli import CONFIGS, PAPERS, load_config, main
from jax_ragrl.errors import UserError
from jax_ragrl.sampling.sampler import Shapes
from jax_ragrl.train.assemble import FileData, load_job
from jax_ragrl.train.finetune import load_finetune
from jax_ragrl.train.warmup import load_warmup

FILES = sorted(CONFIGS.glob("**/*.py"))
FULL = (*PAPERS, "mao_arag:code", "mmoa_rag:code")
GIVEN = {
    "policy": "models/policy",
    "index.encoder": "models/encoder",
    "data.files.corpus": "corpus.jsonl",
    "data.files.train": "train.jsonl",
    "data.files.dev": "dev.jsonl",
    "data.files.test": "test.jsonl",
}
POOL = {"recipe.pool": "pool.jsonl"}


def given_to(name: str) -> dict[str, str]:
    """What a user has to name in a config of full size."""
    return GIVEN | (POOL if name == "opera" else {})


def load(name: str, given: dict[str, str]) -> dict:
    file, _, preset = name.partition(":")
    config = f"--config={CONFIGS / file}.py" + (f":{preset}" if preset else "")
    return load_config(None, [config, *(f"--config.{k}={v}" for k, v in given.items())])


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(CONFIGS)))
def test_a_config_loads(file: pathlib.Path):
    name = str(file.relative_to(CONFIGS).with_suffix(""))
    values = load(name, given_to(name) if name in PAPERS else {})
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


@pytest.mark.parametrize("name", FULL)
def test_what_a_user_names_lands_under_its_own_key(name):
    values = load(name, given_to(name))
    job = load_job(values)
    assert (job.policy, job.index.encoder) == ("models/policy", "models/encoder")
    assert job.data.files == FileData("corpus.jsonl", "train.jsonl", "dev.jsonl", "test.jsonl")
    assert values["recipe"].get("pool") == ("pool.jsonl" if name == "opera" else None)


@pytest.mark.parametrize("name", FULL)
def test_what_a_user_leaves_out_is_named(name):
    for key in given_to(name):
        rest = {k: v for k, v in given_to(name).items() if k != key}
        with pytest.raises(UserError, match=rf"config\.{key} is None.*--config\.{key}=VALUE"):
            load_job(load(name, rest))


def test_shapes_that_would_cut_an_action_are_refused():
    values = load("tiny/coda", {"shapes.steps": "55"})
    with pytest.raises(UserError, match=r"role planner may write 56 tokens.*steps is 55.*raise"):
        load_job(values)


def test_a_missing_path_is_one_line_and_exit_code_2(tmp_path, capsys):
    given = [f"--config.{k}={v}" for k, v in GIVEN.items() if k != "policy"]
    workdir = f"--workdir={tmp_path / 'w'}"
    assert main(["train", f"--config={CONFIGS / 'c3po.py'}", workdir, *given]) == 2
    line = capsys.readouterr().err.strip()
    assert line.startswith("ragrl: config key config.policy is None") and "\n" not in line
    assert not (tmp_path / "w").exists()


def test_a_pool_is_made_before_there_is_one(tmp_path, capsys):
    """The command gets as far as the questions, which are not there."""
    given = [f"--config.{k}={tmp_path / v}" for k, v in GIVEN.items()]
    out = f"--out={tmp_path / 'pool.jsonl'}"
    assert main(["pool", f"--config={CONFIGS / 'opera.py'}", out, *given]) == 2
    line = capsys.readouterr().err.strip()
    assert str(tmp_path / "train.jsonl") in line and "recipe.pool" not in line


@pytest.mark.parametrize("name", ["c3po", "coda", "mao_arag", "mmoa_rag", "opera"])
def test_a_papers_config_has_no_batch_size_that_is_never_used(name: str):
    values = load_config(CONFIGS / f"{name}.py", [])["shapes"]
    shapes = Shapes(**values)
    used = {shapes.most(length) for length in shapes.lengths}
    assert max(shapes.batches) in used
