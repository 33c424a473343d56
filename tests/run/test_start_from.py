"""Adapters of another run are put only on the weights that they were trained on."""

import contextlib
import pathlib
import shutil
from typing import Any

import pytest

from jax_ragrl.cli.main import CONFIGS, load_config
from jax_ragrl.config.snapshot import save_config
from jax_ragrl.errors import UserError
from jax_ragrl.experiments import experiment
from jax_ragrl.experiments.experiment import quickstart
from jax_ragrl.run.build import build_components
from jax_ragrl.run.checkpoint_name import RunCheckpoint
from jax_ragrl.run.claims import BASES, FROZEN, TOKENIZERS, claim_models
from jax_ragrl.run.inference import trained_policies
from jax_ragrl.run.load import load_job
from jax_ragrl.run.start_from import check_adapters, start_policies
from jax_ragrl.text import prompts
from jax_ragrl.training import loop
from tests.tiny import saved_policy
from tests.training.test_outage import ROLL_OUT, roll_out_nothing, small_run, small_values

OPERA = CONFIGS / "tiny" / "opera.py"
LORA = {"rank": 2, "alpha": 4.0, "targets": ("q_proj", "v_proj")}


def values(folder: pathlib.Path, **changes: Any) -> dict[str, Any]:
    return small_values(folder, steps=1) | {"lora": LORA} | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"policy": "tiny"}, "config.policy is tiny, but RUN was trained with FOLDER/policy"),
        ({"lora": LORA | {"alpha": 8.0}}, "config.lora.alpha is 8.0, but RUN .* with 4.0"),
        ({"lora": None}, "config.lora is None, but RUN was trained with LoRAConfig"),
    ],
)
def test_adapters_of_another_base_or_size_are_refused(changes, message, tmp_path):
    _, parts = small_run(tmp_path, steps=1)
    run = tmp_path / "run"
    save_config(run / "config.json", values(tmp_path))
    job = load_job(values(tmp_path, start_from=str(run)) | changes)
    expected = message.replace("RUN", str(run)).replace("FOLDER", str(tmp_path))
    with pytest.raises(UserError, match=f"{expected}.*ragrl export"):
        start_policies(job, parts.policies)


def test_another_name_of_the_base_or_another_base_without_adapters_is_accepted(
    tmp_path: pathlib.Path,
):
    small_run(tmp_path, steps=1)
    (tmp_path / "link").symlink_to(tmp_path / "policy")
    origin = load_job(values(tmp_path))
    targets = {"lora": LORA | {"targets": ("v_proj", "q_proj")}}
    check_adapters(load_job(values(tmp_path, policy=str(tmp_path / "link"), **targets)), origin)
    with pytest.raises(UserError, match="config.policy is tiny"):
        check_adapters(load_job(values(tmp_path, policy="tiny", **targets)), origin)
    whole = values(tmp_path, lora=None)
    check_adapters(load_job(whole | {"policy": "tiny"}), load_job(whole))
    with pytest.raises(UserError, match="config.policy is tiny"):
        check_adapters(load_job(values(tmp_path, policy="tiny")), load_job(values(tmp_path)))


def test_adapters_are_put_only_on_the_weights_that_they_were_trained_on(tmp_path, monkeypatch):
    """The folder of their base may be written again, as by another warm start."""
    small_run(tmp_path, steps=1)
    job, run = load_job(values(tmp_path)), RunCheckpoint(tmp_path / "run")
    monkeypatch.setattr(ROLL_OUT, roll_out_nothing)
    monkeypatch.setattr(loop, "dev_metrics", lambda *_: {})
    parts = build_components(job, run.folder)
    loop.train(job, parts, run.folder)
    trained_policies(job, parts.policies, run)
    (weights,) = (tmp_path / "policy").glob("*.safetensors")
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    for use in (
        lambda: trained_policies(job, parts.policies, run),
        lambda: loop.train(job, parts, run.folder),
    ):
        with pytest.raises(UserError, match=r"begun with the weights below .*: restore them"):
            use()
    (run.folder / BASES).unlink()
    trained_policies(job, parts.policies, run)
    assert not (run.folder / BASES).exists()


@pytest.mark.parametrize(
    ("file", "record", "said"),
    [("chat_template.jinja", TOKENIZERS, "tokenizers"), ("model.safetensors", FROZEN, "frozen")],
)
def test_a_run_keeps_its_tokenizers_and_frozen_models(tmp_path, monkeypatch, file, record, said):
    """Under an unchanged config; a checkpoint of all weights needs no base, but its tokenizer."""
    small_run(tmp_path, steps=1)
    config = values(tmp_path, lora=None, llm={"kind": "local", "model": str(tmp_path / "policy")})
    job, run = load_job(config), RunCheckpoint(tmp_path / "run")
    monkeypatch.setattr(ROLL_OUT, roll_out_nothing)
    monkeypatch.setattr(loop, "dev_metrics", lambda *_: {})
    parts = build_components(job, run.folder)
    loop.train(job, parts, run.folder)
    content = (tmp_path / "policy" / file).read_bytes()
    (tmp_path / "policy" / file).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(UserError, match=f"begun with the {said}.*{record}.*: restore them"):
        loop.train(job, parts, run.folder)
    reads_it = pytest.raises(UserError) if record == TOKENIZERS else contextlib.nullcontext()
    with reads_it:
        trained_policies(job, parts.policies, run)


def test_a_run_keeps_the_files_of_its_recipe_and_its_prompts(tmp_path):
    """A pool of experts, which each step imitates, may be written again under its name."""
    pool, style = tmp_path / "pool.jsonl", tmp_path / "mine"
    pool.touch()
    shutil.copytree(pathlib.Path(prompts.__file__).parent / "prompts" / "opera_tiny", style)
    config, off = (
        load_config(
            OPERA,
            [
                f"--config.recipe.expert_pool={pool}",
                f"--config.recipe.expert.when={when}",
                f"--config.recipe.system.style={style}",
            ],
        )
        for when in ("always", "off")
    )
    (tmp_path / "baselines.json").touch()
    claim_models(load_job(config), tmp_path)
    pool.write_text("{}")
    claim_models(load_job(off), tmp_path)
    with pytest.raises(UserError, match=r"begun with the files .*config\.recipe"):
        claim_models(load_job(config), tmp_path)
    (style / "plan.txt").write_text("Plan: $question")
    prompts.template.cache_clear()  # as in another process
    with pytest.raises(UserError, match=r"begun with the prompts \S+mine \w+ \(prompts\.json\)"):
        claim_models(load_job(off), tmp_path)


def test_an_interrupted_quickstart_keeps_the_weights_of_its_baselines(tmp_path, monkeypatch):
    """The gain of a training would be over the scores of another warm start."""

    def interrupted(job, parts, questions, file):
        file.touch()
        raise RuntimeError

    saved_policy(tmp_path)
    job = load_job(values(tmp_path, lora=None))
    monkeypatch.setattr(experiment, "evaluate_baselines", interrupted)
    with pytest.raises(RuntimeError):
        quickstart(job, tmp_path)
    (weights,) = (tmp_path / "policy").glob("*.safetensors")
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(UserError, match="begun with the weights"):
        quickstart(job, tmp_path)
