"""Bad input is one clear line and exit code 2."""

from __future__ import annotations

import json
import pathlib
import warnings

import pytest
from flax import nnx

from jax_ragrl.cli.main import _load_job, load_config, main
from jax_ragrl.errors import UserError
from jax_ragrl.models.hf import save_decoder
from jax_ragrl.train import loop
from tests.tiny import policy, tokenizer

CONFIG = pathlib.Path(__file__).parents[2] / "configs" / "tiny" / "c3po.py"


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 2
    line = capsys.readouterr().err.strip()
    assert line.startswith("ragrl: ") and "\n" not in line
    return line


def write(path: pathlib.Path, *rows: object) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def small_policy(tmp_path: pathlib.Path) -> str:
    tokenizer().save(tmp_path / "tokenizer")
    model = nnx.merge(*policy())
    return str(save_decoder(model, tmp_path / "policy", tmp_path / "tokenizer"))


def test_an_empty_corpus_names_its_file(tmp_path, capsys):
    line = refused(
        capsys, "index", "--corpus", write(tmp_path / "c.jsonl"), "--out", str(tmp_path / "i")
    )
    assert "c.jsonl" in line


def test_a_missing_field_names_file_line_and_field(tmp_path, capsys):
    corpus = write(tmp_path / "c.jsonl", {"id": "1", "title": "a", "text": "b"})
    rows = [{"id": "1", "question": "q", "golden_answers": ["a"]}, {"id": "2", "question": "r"}]
    questions = write(tmp_path / "q.jsonl", *rows)
    out = str(tmp_path / "i")
    line = refused(capsys, "index", "--corpus", corpus, "--out", out, "--questions", questions)
    assert "q.jsonl" in line and "2" in line and "golden_answers" in line


def test_an_index_of_another_corpus_names_both_fingerprints(tmp_path, capsys):
    from jax_ragrl.corpus.passages import load_corpus

    one = write(tmp_path / "a.jsonl", {"id": "1", "title": "a", "text": "b"})
    other = write(tmp_path / "b.jsonl", {"id": "1", "title": "a", "text": "c"})
    index = str(tmp_path / "i")
    assert main(["index", "--corpus", one, "--out", index, "--kind", "exact"]) == 0
    asked = write(tmp_path / "q.jsonl", {"id": "1", "question": "q", "golden_answers": ["a"]})
    given = ("--corpus", other, "--index", index, "--questions", asked)
    line = refused(capsys, "evaluate", *given)
    assert load_corpus(one).fingerprint in line and load_corpus(other).fingerprint in line


def test_an_unknown_config_key_is_named(tmp_path, capsys):
    given = ("train", f"--config={CONFIG}", f"--workdir={tmp_path / 'w'}")
    assert "polcy_lr" in refused(capsys, *given, "--config.optimizer.polcy_lr=1.0")


def test_a_config_that_nothing_reads_is_an_error(tmp_path, capsys):
    file = tmp_path / "c.py"
    source = "from ml_collections import ConfigDict\ndef get_config():\n"
    file.write_text(source + "    return ConfigDict({'run': {'steps': 1, 'stepz': 2}})\n")
    line = refused(capsys, "train", f"--config={file}", f"--workdir={tmp_path / 'w'}")
    assert "stepz" in line or "system" in line


def test_a_workdir_belongs_to_one_config(tmp_path, capsys, small_policy):
    given = ("train", f"--config={CONFIG}", f"--workdir={tmp_path}", "--config.run.steps=0")
    assert "nowhere" in refused(capsys, *given, "--config.policy=nowhere")  # put right by the next
    assert main([*given, f"--config.policy={small_policy}"]) == 0
    capsys.readouterr()
    (tmp_path / "checkpoints" / "1").mkdir()
    line = refused(capsys, *given, f"--config.policy={small_policy}", "--config.seed=5")
    assert "seed" in line and str(tmp_path) in line
    asked = ("ask", "Who?", f"--workdir={tmp_path}")
    assert "--config=FILE" in refused(capsys, *asked, f"--config={CONFIG}")
    assert "elsewhere" in refused(capsys, *asked, "--config.policy=elsewhere")


def test_an_index_alone_holds_no_work_folder_to_its_config(tmp_path):
    (tmp_path / "index").mkdir()
    (tmp_path / "index" / "index.json").touch()
    for name in ("mistake", "tiny"):
        given = [f"--config={CONFIG}", f"--config.policy={name}"]
        assert _load_job(load_config(None, given), tmp_path).policy == name
    (tmp_path / "checkpoints" / "1").mkdir(parents=True)
    with pytest.raises(UserError, match=r"config\.policy differs"):
        _load_job(load_config(None, [f"--config={CONFIG}", "--config.policy=other"]), tmp_path)


def test_a_run_is_made_longer_where_its_rate_does_not_depend_on_its_length(tmp_path):
    (tmp_path / "baselines.json").touch()  # it has begun
    for schedule in ("constant", "cosine"):
        given = (f"--config={CONFIG}", f"--config.optimizer.schedule={schedule}")
        (tmp_path / "config.json").unlink(missing_ok=True)
        _load_job(load_config(None, [*given, "--config.run.steps=3"]), tmp_path)
        longer = load_config(None, [*given, "--config.run.steps=9"])
        if schedule == "constant":
            assert _load_job(longer, tmp_path).run.steps == 9
    with pytest.raises(UserError, match=r"config\.run\.steps differs"):
        _load_job(longer, tmp_path)


def test_a_run_goes_on_with_a_server_that_has_moved(tmp_path):
    from jax_ragrl.config.snapshot import settle, settled

    file, here = tmp_path / "config.json", {"kind": "openai", "base_url": "http://a/v1"}
    there = here | {"base_url": "http://b/v1"}
    settle(file, {"llm": here, "judge": here, "seed": 0})
    settle(file, {"llm": there, "judge": there, "seed": 0})
    assert settled(file)["llm"] == settled(file)["judge"] == there
    with pytest.raises(UserError, match="config.seed differs"):
        settle(file, {"llm": there, "judge": there, "seed": 1})


def test_a_checkpoint_of_another_shape_is_refused(tmp_path):
    import jax
    import numpy as np

    from jax_ragrl.errors import UserError
    from jax_ragrl.learner.checkpoint import Checkpoints

    small, large = ({"w": jax.device_put(np.zeros((2, n), np.float32))} for n in (3, 4))
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, small, {"data": {}})
    checkpoints.close()
    with pytest.raises(UserError, match=r"\[2, 3\].*\[2, 4\]"):
        Checkpoints(tmp_path).restore(1, large)
    restored, meta = Checkpoints(tmp_path).restore(1, small)
    assert meta["step"] == 1 and restored["w"].shape == (2, 3)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("--config.recipe.tree.widht=1", "ragrl: c3po: unknown config key config.recipe.tree.wid"),
        ("--config.seed=4", "--config.seed is not for trials: give --systems and --seeds"),
        (f"--config={CONFIG}", "give --systems"),
        ("--against=nowhere", "nowhere/c3po-0 holds no finished trial"),
    ],
)
def test_trials_that_cannot_be_are_refused_before_a_warm_up(given, told, tmp_path, capsys):
    out = tmp_path / "out"
    assert told in refused(capsys, "trials", "--systems=c3po", f"--out={out}", given)
    assert not list(out.glob("*-warm"))


def test_a_trial_is_not_gone_on_with_under_other_overrides(tmp_path, capsys):
    begun, given = tmp_path / "c3po-0", ("trials", "--systems=c3po", f"--out={tmp_path}")
    begun.mkdir()
    assert "nowhere" in refused(capsys, *given, "--against=nowhere", "--config.run.steps=1")
    (begun / "baselines.json").touch()
    assert "config.run.steps differs" in refused(capsys, *given, "--config.run.steps=2")


BUCKET = "gs://bucket/run"


@pytest.mark.parametrize(
    "given",
    [
        ("train", f"--config={CONFIG}", f"--workdir={BUCKET}"),
        ("train", f"--config={CONFIG}", "--workdir=w", f"--config.index.folder={BUCKET}"),
        ("train", f"--config={CONFIG}", "--workdir=w", f"--config.policy={BUCKET}"),
        ("quickstart", "--workdir", BUCKET),
        ("trials", "--out", BUCKET),
        ("world", "--out", BUCKET),
        ("index", "--corpus", BUCKET, "--out", "i"),
        ("export", BUCKET, "--out", "o"),
        ("evaluate", "--data", f"x={BUCKET}"),
        ("evaluate", "--data", f"q.json@{BUCKET}"),
        ("report", BUCKET),
    ],
)
def test_a_bucket_is_no_folder_and_none_is_made_of_it(given, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "mount the bucket" in refused(capsys, *given)
    assert not (tmp_path / "gs:").exists()


def test_an_empty_path_is_not_the_folder_one_is_in(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "empty" in refused(capsys, "world", "--out", "")
    assert not list(tmp_path.iterdir())


def test_a_path_that_cannot_be_written_is_named(tmp_path, capsys):
    file = tmp_path / "file"
    file.write_text("")
    assert str(file) in refused(capsys, "world", "--out", str(file / "below"))


def test_a_full_disk_is_said_and_another_error_is_not_hidden(monkeypatch, capsys):
    from jax_ragrl.cli import main as cli

    def fail(arguments):
        raise error

    monkeypatch.setattr(cli, "_world", fail)
    monkeypatch.setattr(fail, "__name__", "_world")
    error = ValueError("RESOURCE_EXHAUSTED: cannot write /x: No space left on device")
    assert "disk is full" in refused(capsys, "world", "--out", "w")
    for error in (ValueError("bad"), TimeoutError("late")):
        with pytest.raises(type(error)):
            main(["world", "--out", "w"])


def test_an_index_may_lie_above(tmp_path, capsys, monkeypatch):
    corpus = write(tmp_path / "c.jsonl", {"id": "1", "title": "a", "text": "b"})
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    assert main(["index", "--corpus", corpus, "--out", "../i", "--kind", "exact"]) == 0


def test_a_limit_is_no_negative_number(capsys):
    with pytest.raises(SystemExit):
        main(["evaluate", "--questions", "q", "--limit", "-1"])
    assert "--limit" in capsys.readouterr().err


def test_a_key_that_a_config_leaves_out_can_be_given(tmp_path, capsys):
    from jax_ragrl.cli.main import load_config
    from jax_ragrl.run.config import load_job

    bounds = (("kl/mean", -1.0, 1.0),)
    url = {"index.kind": "remote", "index.url": "http://localhost:8000"}
    given = url | {"guard.bounds": bounds, "objective.entropy": 0.1, "run.steps": 3}
    job = load_job(load_config(CONFIG, [f"--config.{k}={v}" for k, v in given.items()]))
    assert (job.index.url, job.guard.bounds) == ("http://localhost:8000", bounds)
    assert job.run.steps == 3 and job.run.questions == 14 and job.objective.entropy == 0.1
    given = ("train", f"--config={CONFIG}", f"--workdir={tmp_path}")
    assert "did you mean guard?" in refused(capsys, *given, "--config.gard.patience=2")
    assert "no section" in refused(capsys, *given, "--config.run.trees.x=2")


@pytest.mark.parametrize(
    "given, said",
    [
        ("--config=nowhere.py", "nowhere.py does not exist"),
        ("--config=pyproject.toml", "pyproject.toml"),
        (f"--config={CONFIG}:preset", "preset"),
    ],
)
def test_a_config_that_cannot_be_read_is_named(given, said, tmp_path, capsys):
    assert said in refused(capsys, "train", given, f"--workdir={tmp_path}")


def test_a_retrieval_server_that_stays_away_is_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("jax_ragrl.retrieval.http.time.sleep", lambda seconds: None)
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    row = {"id": "1", "question": "q", "golden_answers": ["a"], "metadata": {"gold": ["t"]}}
    asked = write(tmp_path / "q.jsonl", row)
    given = ("--retriever", "http://127.0.0.1:1", "--llm", "openai:m@http://127.0.0.1:1/v1")
    assert "127.0.0.1:1" in refused(capsys, "evaluate", "--questions", asked, *given)


def test_a_measurement_of_nothing_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["bench", "train", "--shape", "tiny", "--prompts", "0"])
    assert "--prompts" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["train", "ask", "serve", "warmup", "demos", "plan"])
def test_the_help_of_a_command_with_a_config_says_how_it_is_given(command, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    assert "--config=FILE" in capsys.readouterr().out.split("options:")[1]


def test_a_warning_of_the_package_is_told_without_its_place_in_the_code(capsys):
    refused(capsys, "report", "nowhere")  # any command
    told = UserWarning("mind the gap")
    assert warnings.formatwarning(told, UserWarning, loop.__file__, 3) == "ragrl: mind the gap\n"
    assert "other.py:3" in warnings.formatwarning(told, UserWarning, "other.py", 3)
    assert "loop.py:3" in warnings.formatwarning(told, DeprecationWarning, loop.__file__, 3)
