"""A run folder belongs to one version of JAX, and its questions belong to its corpus."""

import json
import pathlib
import re
from typing import Any

import jax
import pytest

from jax_ragrl.cli.main import CONFIGS, load_config
from jax_ragrl.errors import UserError
from jax_ragrl.run import claims
from jax_ragrl.run.claims import version_changes
from jax_ragrl.run.config import Data, FileData
from jax_ragrl.run.data import load_data
from jax_ragrl.run.workdir import claim_workdir
from jax_ragrl.runtime.revision import versions


def claim(folder: pathlib.Path, *overrides: str) -> None:
    claim_workdir(load_config(CONFIGS / "tiny" / "c3po.py", overrides), folder)


def entries(folder: pathlib.Path) -> list[dict[str, Any]]:
    return json.loads((folder / "versions.json").read_text())


@pytest.fixture
def trained(tmp_path: pathlib.Path) -> pathlib.Path:
    """A run with steps, which the versions of this process took."""
    claim(tmp_path)
    (tmp_path / "checkpoints" / "7").mkdir(parents=True)
    return tmp_path


def use(monkeypatch: pytest.MonkeyPatch, **changes: str) -> None:
    monkeypatch.setattr(claims, "versions", lambda: versions() | changes)


def test_a_run_records_its_versions_and_its_device(trained, monkeypatch):
    (entry,) = entries(trained)
    assert entry["jax"] == jax.__version__ and entry["device"] == "cpu" and entry["step"] == 0
    assert {"jax_ragrl", "jaxlib", "flax", "optax", "numpy"} < entry.keys()
    claim(trained)
    assert entries(trained) == [entry] and version_changes(trained) == {}
    use(monkeypatch, numpy="3.0", device="TPU v9")
    claim(trained)
    assert [x["numpy"] == "3.0" for x in entries(trained)] == [False, True]


@pytest.mark.parametrize("package", ["jax", "jaxlib"])
def test_another_version_of_jax_is_refused_unless_it_is_asked_for(trained, monkeypatch, package):
    use(monkeypatch, **{package: "0.9.9"})
    with pytest.raises(UserError, match=rf"{package} 0\.9\.9.* --config.run.other_versions=True"):
        claim(trained)
    assert len(entries(trained)) == 1
    claim(trained, "--config.run.other_versions=True")
    assert [(x["step"], x[package] == "0.9.9") for x in entries(trained)] == [(0, False), (7, True)]
    assert version_changes(trained) == {"version_changes": 1.0}
    claim(trained)  # the newest entry counts
    use(monkeypatch)
    with pytest.raises(UserError, match=r"the last steps of .* are of jax"):
        claim(trained)


def test_before_its_first_checkpoint_a_run_may_change_its_version(tmp_path, monkeypatch):
    claim(tmp_path)
    use(monkeypatch, jax="0.9.9")
    claim(tmp_path)
    assert [x["jax"] for x in entries(tmp_path)] == ["0.9.9"] and version_changes(tmp_path) == {}


def test_a_damaged_record_is_named(trained: pathlib.Path):
    (trained / "versions.json").write_text("[1]")
    with pytest.raises(UserError, match=r"versions.json is damaged .* delete it"):
        claim(trained)


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize(
    ("gold", "said"),
    [
        (["p0", "T1"], ""),
        (["p0", "gone"], "1 of 2 gold passages of data.files.dev are not in .*'gone': no search"),
        (["gone", "away"], "2 of 2 gold passages of data.files.dev are not .*give dev questions"),
        ([], ""),
    ],
)
def test_a_split_of_another_corpus_is_refused_and_a_missing_part_named(
    tmp_path, capsys, gold, said
):
    passages = [{"id": f"p{n}", "title": f"T{n}", "text": "x"} for n in range(3)]
    corpus = write(tmp_path / "corpus.jsonl", passages)
    question = {"id": "1", "question": "q?", "answer": "a", "gold": ["p1"]}
    own = write(tmp_path / "own.jsonl", [question])
    dev = write(
        tmp_path / "other.jsonl",
        [{**question, "gold": [name] if name else []} for name in gold or [""]],
    )
    data = Data(files=FileData(corpus=corpus, train=own, dev=dev, test=own))
    if "give" in said:
        with pytest.raises(UserError, match=said):
            load_data(data)
        return
    assert len(load_data(data).corpus) == 3
    errors = capsys.readouterr().err
    assert bool(errors) == bool(said)
    if said:
        assert re.search(said, errors)
