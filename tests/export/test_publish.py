"""Exports on the Hub: a server on this machine that speaks the Hub's protocol receives them."""

import json
import os
import pathlib
import shutil
from collections.abc import Mapping
from unittest.mock import Mock

import jax
import pytest
from huggingface_hub import constants

from jax_ragrl.cli.main import main
from jax_ragrl.config.snapshot import save_config
from jax_ragrl.errors import UserError
from jax_ragrl.export import run
from jax_ragrl.export.publish import reserve, upload
from jax_ragrl.export.run import adapter_base
from jax_ragrl.export.weights import export
from jax_ragrl.learner.checkpoint import Checkpoints
from jax_ragrl.run.load import load_job
from jax_ragrl.run.models import load_policies
from jax_ragrl.training.setup import prepare_policies, trained_state
from tests.hub_server import TOKEN, USER, Hub, serving
from tests.jobs import NOTHING, config_values
from tests.tiny import saved_policy

NAME = f"{USER}/policy"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A Hub with one model of another user, and the token of a user without models."""
    seed = tmp_path / "seed"
    seed.mkdir()
    with serving({"other/model": seed, f"datasets/{USER}/set": seed}) as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield server


@pytest.fixture
def folder(tmp_path) -> pathlib.Path:
    folder = tmp_path / "export"
    folder.mkdir()
    (folder / "README.md").write_text("---\nlicense: mit\n---\n")
    (folder / "model.safetensors").write_bytes(b"weights" * 100)
    return folder


def files(folder: pathlib.Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_an_upload_has_the_files_of_the_folder_and_is_written_again(hub: Hub, folder):
    """A name without an owner is of the user."""
    target = reserve("policy")
    assert target == reserve(NAME) and target.name == NAME
    upload(folder, target)
    assert files(hub.folders[NAME]) == files(folder)
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    upload(folder, target)
    assert files(hub.folders[NAME]) == files(folder)


def test_a_repository_is_private_unless_asked_otherwise(hub: Hub):
    assert reserve(NAME).is_private and NAME not in hub.public
    name = f"{USER}/open"
    assert not reserve(name, public=True).is_private and name in hub.public
    with pytest.raises(UserError, match="is public already: give --public to upload there"):
        reserve(name)


@pytest.mark.parametrize("token", ["", "hf_wrong"])
def test_a_missing_or_wrong_token_is_reported_with_the_remedy(hub: Hub, token, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", token)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", "nowhere")
    with pytest.raises(UserError, match="without a valid token: set HF_TOKEN .* 'hf auth login'"):
        reserve(NAME)


def test_a_repository_of_others_and_a_hub_that_does_not_answer_are_refused(hub, monkeypatch):
    with pytest.raises(UserError, match="the token may not write to someone/policy: use a token"):
        reserve("someone/policy")
    hub.reserved.add(NAME)
    with pytest.raises(UserError, match="exists but is not a model, or was renamed: give another"):
        reserve(NAME)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UserError, match=r"on http://127.0.0.1:9 failed \(ConnectError.*network"):
        reserve(NAME)


@pytest.mark.parametrize("name", ["a/b/c", "owner/", "", "-x", "owner/na me"])
def test_a_malformed_name_is_refused_before_a_request(hub: Hub, name):
    with pytest.raises(UserError, match="give OWNER/NAME"):
        reserve(name)
    assert hub.requests == []


def test_a_failed_upload_names_the_command_that_repeats_it(hub: Hub, folder, monkeypatch):
    target = reserve(NAME)
    monkeypatch.setenv("HF_TOKEN", "hf_expired")
    with pytest.raises(UserError, match=f"is complete, and 'hf upload {NAME} .*/export' uploads"):
        upload(folder, target)


def write_run(workdir: pathlib.Path, changes: Mapping[str, object] = NOTHING) -> None:
    """A run of C-3PO with a checkpoint after step 1, from a policy without training."""
    start = saved_policy(workdir)
    (start / "README.md").write_text("---\nlicense: mit\nbase_model: someone/base\n---\n")
    values = config_values("tiny/c3po", {"policy": start, **changes})
    job = load_job(values)
    # An export needs the folder of the run only, and one device.
    files = dict.fromkeys(("corpus", "train", "dev", "test"), str(workdir / "missing"))
    save_config(
        workdir / "run" / "config.json", values | {"mesh": (64, 4, 1), "data": {"files": files}}
    )
    policies, chat = load_policies(job, None)
    checkpoints = Checkpoints(workdir / "run")
    state = jax.tree.map(lambda x: x * 2, trained_state(prepare_policies(job, policies, chat)))
    checkpoints.save(1, state, {"data": {}})
    checkpoints.close()


def test_the_command_exports_with_a_card_and_uploads(hub: Hub, tmp_path, capsys):
    pytest.importorskip("gguf")
    write_run(tmp_path)
    out = tmp_path / "out"
    arguments = ["export", str(tmp_path / "run"), "--out", str(out), "--dtype", "float32"]
    assert main([*arguments, "--push-to", "someone/policy"]) == 2
    assert "the token may not write" in capsys.readouterr().err and not out.exists()
    assert main([*arguments, "--push-to", NAME, "--gguf"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (out / "model.gguf").stat().st_size < result["num_bytes"]
    assert result["private"] and result["url"] == f"{hub.url}/{NAME}"
    assert files(hub.folders[NAME]) == files(out)
    card = (out / "README.md").read_text()
    lines = (
        "license: mit",
        "base_model: someone/base",
        "- c3po",
        f'from_pretrained("{NAME}")',
        "| steps | 1, each with 14 questions |",
        "This run was not evaluated.",
    )
    assert [line for line in lines if line not in card] == []
    assert str(tmp_path) not in card


def test_an_uploaded_adapter_names_no_path_of_this_machine(hub: Hub, tmp_path):
    write_run(tmp_path, {"lora.rank": 2})
    arguments = ["export", str(tmp_path / "run"), "--adapter", "--out"]
    assert main([*arguments, str(tmp_path / "out"), "--push-to", NAME]) == 0
    uploaded = files(hub.folders[NAME])
    assert json.loads(uploaded["adapter_config.json"])["base_model_name_or_path"] is None
    assert not [name for name, data in uploaded.items() if str(tmp_path).encode() in data]
    # On this machine the folder is the base.
    assert main([*arguments, str(tmp_path / "own")]) == 0
    config = json.loads((tmp_path / "own" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tmp_path / "policy")


def test_the_base_of_an_adapter_has_a_name_and_a_revision_that_peft_loads(tmp_path):
    pairs = {"Qwen/X": ("Qwen/X", None), "Qwen/X@main": ("Qwen/X", "main")}
    for model, base in pairs.items():
        assert all(adapter_base(model, tmp_path, is_published=x) == base for x in (True, False))


def test_the_card_of_a_checkpoint_has_the_score_of_its_step(tmp_path, monkeypatch):
    write_run(tmp_path)
    rows = [{"step": 1, "eval/accuracy": 0.25}, {"step": 2, "eval/accuracy": 0.5}]
    metrics = "".join(f"{json.dumps(row)}\n" for row in rows)
    (tmp_path / "run" / "metrics.jsonl").write_text(metrics)
    out = tmp_path / "out"
    assert main(["export", f"{tmp_path}/run@1", "--out", str(out), "--dtype", "float32"]) == 0
    assert "25.0 % on development questions after step 1" in (out / "README.md").read_text()

    def later(*args, **options):
        shutil.copytree(tmp_path / "run/checkpoints/1", tmp_path / "run/checkpoints/2")
        return export(*args, **options)

    monkeypatch.setattr(run, "export", later)  # a run in training has a newer checkpoint soon
    assert main(["export", f"{tmp_path}/run", "--out", f"{out}2", "--dtype", "float32"]) == 0
    assert "| steps | 1, each" in (tmp_path / "out2" / "README.md").read_text()


def test_an_interrupted_export_leaves_nothing_and_is_made_again(tmp_path, monkeypatch, capsys):
    write_run(tmp_path)
    disk, out = tmp_path / "disk", tmp_path / "out"
    disk.mkdir()
    out.symlink_to(disk)
    before, command = {*tmp_path.iterdir()}, ["export", f"{tmp_path}/run", "--out", str(out)]
    with monkeypatch.context() as patch:
        patch.setattr(run, "card_text", Mock(side_effect=KeyboardInterrupt))
        assert main(command) == 130 and not files(out) and {*tmp_path.iterdir()} == before
        patch.setattr(os.path, "ismount", lambda path: True)
        assert main(command) == 2 and "is a mounted disk" in capsys.readouterr().err
    assert main(command) == 0 and "README.md" in files(disk) and {*tmp_path.iterdir()} == before
