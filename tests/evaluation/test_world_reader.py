"""A generated corpus in files: its settings travel with it, so that its reader can answer."""

from __future__ import annotations

import json

import pytest

from jax_ragrl.cli.main import main
from jax_ragrl.corpus.mixture import load_answered
from jax_ragrl.corpus.world import generate
from jax_ragrl.errors import UserError
from jax_ragrl.evaluation.table import load_frozen
from jax_ragrl.run.world_folder import load_reader
from jax_ragrl.sampling.sampler import Shapes
from tests.evaluation.test_table import settings


@pytest.fixture
def folder(tmp_path):
    out = tmp_path / "world"
    args = ("--size=40", "--seed=3", "--hops=1", "--famous=0.9", f"--out={out}")
    assert main(("data", "world", *args)) == 0
    return out


def test_a_world_is_written_with_its_hops_and_famous_facts(folder):
    questions = load_answered(folder / "test.jsonl")
    assert {question.hops for question in questions} <= {1, 2}, "a comparison has two"
    assert {q.hops for q in questions if q.kind == "chain"} == {1}
    expected = generate(3, 40, famous=0.9, hops=(1,))
    assert [q.id for q in questions] == [q.id for q in expected.questions["test"]]


def test_the_reader_of_a_folder_knows_its_world(folder, capsys, tmp_path):
    """Of 90 % famous facts it answers most questions without a document."""
    table = tmp_path / "table"
    capsys.readouterr()
    data = f"w={folder / 'test.jsonl'}@{folder / 'passages.jsonl'}"
    args = ("evaluate", "--systems", "direct,mao_arag,workflow_qdp_r_ag", "--limit", "12")
    args += ("--data", data, "--llm", f"world:{folder}", "--workdir", str(table))
    assert main(args) == 0
    rows = [json.loads(line) for line in (table / "rows.jsonl").read_text().splitlines()]
    scores = {row["system"]: row["cover_em"] for row in rows}
    assert scores["direct"] > 50 and scores["workflow_qdp_r_ag"] > 50


def test_the_settings_of_a_reader_may_change(folder):
    sharp = load_reader(f'world:{folder}#{{"noise": 0, "confusion": 0}}')
    assert (sharp._noise, sharp._confusion) == (0, 0)
    with pytest.raises(UserError, match=r"unknown config key llm\.nose"):
        load_reader(f'world:{folder}#{{"nose": 0}}')


@pytest.mark.parametrize(
    ("llm", "changes", "said"),
    [
        ("world:nowhere", {}, r"nowhere/world.json does not exist: give the --out"),
        ("world:nowhere", {"style": "full"}, "leave --style full and --int8 out"),
        ("world:nowhere", {"int8": True}, "leave --style full and --int8 out"),
    ],
)
def test_a_reader_without_a_world_is_refused(llm, changes, said):
    with pytest.raises(UserError, match=said):
        load_frozen(settings("direct", llm=llm, **changes), Shapes(), None)
