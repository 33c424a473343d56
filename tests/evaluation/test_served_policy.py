"""Models of a table: a policy on a server plays all roles, and a world in files has a reader."""

import json

import pytest

from jax_ragrl.cli.main import main
from jax_ragrl.corpus.mixture import load_answered
from jax_ragrl.corpus.world import generate
from jax_ragrl.errors import UserError
from jax_ragrl.evaluation.served_policy import few_shots, served_policy
from jax_ragrl.evaluation.table import (
    TableModels,
    TableSettings,
    load_frozen,
    load_models,
    system_result,
)
from jax_ragrl.llm.base import NoLLM
from jax_ragrl.llm.cache import FILE
from jax_ragrl.rollout.llm_policy import LLMActionSampler
from jax_ragrl.run.world_folder import load_reader
from jax_ragrl.sampling.sampler import Shapes
from jax_ragrl.types import Message
from jax_ragrl.warmstart.demos import Demo
from tests.evaluation.test_table import context, settings
from tests.llm.server import serving
from tests.rollout.tape import ANN, BOB


def demo(role: str, question: str, reply: str, *before: Message) -> Demo:
    return Demo("", role, (*before, Message("user", question)), reply)


SHOTS = (
    demo("router", "Who is A?", "[No Retrieval]", Message("system", "Be brief.")),
    demo("filter", "Which?", "Action: [1]"),
    demo("router", "Later?", "no", Message("user", "Who?"), Message("assistant", "yes")),
    demo("router", "Who is B?", "[Planning]"),
    demo("router", "Who is C?", "[Planning]"),
)


def play(reply, examples=None, shots=2, cache=None):
    """The result of C-3PO whose roles a server plays, and the requests to it."""
    with serving(reply) as (address, seen):
        policy = served_policy(f"openai:m@{address}", examples, shots, cache)
        models = TableModels(NoLLM(), None, *policy)
        result = system_result("c3po", context(), models, [ANN, BOB])
    return result, seen


def act(body):
    """A search for Ann alone, and the first passage."""
    text = body["messages"][-1]["content"]
    if "Thought" in text or "title" in text:
        return "Thought: t\nAction: [1]"
    return "[Retrieval] Ann" if "Ann" in text else "[No Retrieval]"


def test_a_server_plays_every_role_greedily_and_is_paid_once(tmp_path):
    (result, seen), (again, nothing) = (play(act, cache=tmp_path / FILE) for _ in range(2))
    assert result.strategies == {"Retrieval": 1, "No Retrieval": 1}
    assert set(result.finish_reasons) == {"answered"} and len(seen) == 3
    assert {body["temperature"] for body in seen} == {0.0}
    assert result.costs["policy_calls"].tolist() == [2, 1] and result.costs["policy_tokens"].all()
    assert nothing == [] and again.strategies == result.strategies
    assert again.costs["policy_tokens"].tolist() == result.costs["policy_tokens"].tolist()


def test_a_table_gives_its_cache_to_a_policy_on_a_server_which_examples_need(tmp_path):
    file, address = tmp_path / FILE, "openai:m@http://127.0.0.1:9/v1"
    settings = TableSettings(None, None, None, (), address, address, "tiny", 3, 0, cache=file)
    policy = load_models(settings).policy
    assert isinstance(policy, LLMActionSampler) and policy._llm._cache._file == file
    with pytest.raises(UserError, match=r"--policy is tiny: give openai:MODEL@URL"):
        served_policy("tiny", tmp_path / "demos.jsonl", 2)
    assert main(("evaluate", "--systems=direct", "--questions=x", "--examples=")) == 2


def test_a_server_that_refuses_gives_no_score():
    """The question failed, which is different from a wrong answer."""
    result, _ = play(lambda body: 400 if "Ann" in body["messages"][-1]["content"] else act(body))
    assert result.finish_reasons == {"failed": 1, "answered": 1}
    assert "failed on router" in result.failures[0]


def test_the_first_examples_of_single_turns_precede_each_prompt_of_their_role(tmp_path):
    file = tmp_path / "demos.jsonl"
    file.write_text("".join(json.dumps(d.row()) + "\n" for d in SHOTS))
    _, seen = play(act, file, shots=1)
    by_size = sorted({len(body["messages"]) for body in seen})
    assert by_size == [3], "an example is two messages"
    routes = [body["messages"] for body in seen if body["messages"][1]["content"][0] == "["]
    assert [m["content"] for m in routes[0][:2]] == ["Who is A?", "[No Retrieval]"]
    shots = few_shots(SHOTS, 2)
    assert [m.content for m in shots["router"][::2]] == ["Who is A?", "Who is B?"]
    assert [m.role for m in shots["router"]] == ["user", "assistant"] * 2
    assert few_shots(SHOTS, 0) == {}


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


def test_a_world_replaces_no_file_but_those_of_the_same_world(folder, capsys):
    command = ["data", "world", "--size=40", "--seed=3", "--hops=1", f"--out={folder}"]
    (folder / "test.jsonl").unlink()  # as if killed before it
    folder.chmod(0o750)
    assert main([*command, "--famous=0.9"]) == 0  # the same bytes again
    assert (folder / "test.jsonl").is_file() and folder.stat().st_mode & 0o777 == 0o750
    capsys.readouterr()
    assert main([*command, "--famous=0.8"]) == 2
    assert "world.json exists, and is not what" in capsys.readouterr().err
    (folder / "train.jsonl").write_text("the user's own")
    assert main([*command, "--famous=0.9"]) == 2
    assert "train.jsonl exists, and is not what" in capsys.readouterr().err
    assert (folder / "train.jsonl").read_text() == "the user's own"


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--famous=2", "famous_fraction is 2.0: use a finite number, at least 0, at most 1"),
        ("--famous=nan", "famous_fraction is nan: use a finite number"),
        ("--hops=0", "hops[0] is 0: use a finite number, at least 1"),
        ("--size=0", "size is 0"),
    ],
)
def test_settings_of_a_world_are_checked_as_those_of_a_config(option, said, tmp_path, capsys):
    assert main(["data", "world", option, f"--out={tmp_path / 'w'}"]) == 2
    assert said in capsys.readouterr().err and not (tmp_path / "w").exists()


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
