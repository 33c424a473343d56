"""A wrong set-up has a line per mistake, with its remedy; all lines of a right one say ok."""

import json
import pathlib
import re
import shutil
import socket
import warnings

import pytest

from jax_ragrl.cli.main import CONFIGS, main
from jax_ragrl.corpus.reading import load_corpus
from jax_ragrl.errors import UserError
from jax_ragrl.models.encoder import load_encoder
from jax_ragrl.retrieval.bm25 import build_bm25
from jax_ragrl.retrieval.index import build_index
from jax_ragrl.retrieval.kinds import BM25Index
from jax_ragrl.rollout.tree import Action, Record
from jax_ragrl.run.load import load_job
from jax_ragrl.runtime.jsonl import write_rows
from jax_ragrl.types import LLMRequest, Message, Passage, Question
from jax_ragrl.validation import checks, models, roles
from jax_ragrl.validation.config import config_problems
from jax_ragrl.validation.data import DataSample
from jax_ragrl.validation.findings import Finding
from tests.jobs import config_job, config_values

QUESTIONS = [{"id": f"q{n}", "question": f"{n}?", "answer": "a", "gold": ["p1"]} for n in range(20)]
PASSAGES = [{"id": f"p{n}", "title": f"T{n}", "text": f"Text {n}."} for n in range(4)]

TINY_BERT = pathlib.Path(__file__).parents[1] / "models" / "tiny_bert"


@pytest.fixture
def files(tmp_path):
    """The keys of a config that reads a folder of valid files."""
    for split in ("train", "dev", "test"):
        rows = [{**row, "question": f"{split} {row['question']}"} for row in QUESTIONS]
        write_rows(tmp_path / f"{split}.jsonl", rows)
    write_rows(tmp_path / "corpus.jsonl", PASSAGES)
    names = {name: tmp_path / f"{name}.jsonl" for name in ("corpus", "train", "dev", "test")}
    data = {f"data.files.{name}": str(path) for name, path in names.items()}
    return data | {"llm.kind": "none", "index.kind": "bm25"}


def findings(keys, config="tiny/c3po", **options):
    return list(checks.validate(config_values(config, keys), quick=True, **options))


def errors(found):
    return [finding.line() for finding in found if finding.level != "ok"]


def test_a_right_set_up_has_no_error_and_nothing_is_written(files, tmp_path):
    before = sorted(path.name for path in tmp_path.iterdir())
    assert not errors(findings(files)) and not errors(findings({}))
    assert sorted(path.name for path in tmp_path.iterdir()) == before


@pytest.mark.parametrize("rule", ["group_normalised", "group_centred", "leave_one_out"])
@pytest.mark.parametrize("alpha", [0.0, 0.02])
def test_a_price_with_normalised_groups_is_a_warning(rule, alpha):
    keys = {"credit": "rollouts", "rollouts": 4, "objective.critic": "none"}
    keys |= {"objective.advantage": rule, "objective.kl.where": "none"}
    found = errors(findings(keys | {"recipe.costs.alpha": alpha}, "tiny/mao_arag"))
    assert len(found) == (alpha > 0 and rule == "group_normalised")
    assert all(re.match("warning  config: objective.advantage .*group_centred", f) for f in found)


CONFIG_ERRORS = [
    ({"optimizer.policy_lr": -1}, r"optimizer\.policy_lr is -1"),
    ({"optimizer.b1": 1.0}, r"optimizer\.b1 is 1.0: use .*below 1"),
    ({"recipe.tree.wide": 2}, r"recipe\.tree\.wide"),
    ({"recipe.system.temperature": 0.0}, r"recipe\.system\.temperature is 0.0: use .*above 0"),
    ({"objective.value_loss": 3}, r"objective\.value_loss is 3: it must be of type str"),
    ({"objective.gamma": "nan"}, r"objective\.gamma is nan"),
    ({"objective.loss": "clop"}, r"objective\.loss is 'clop': use one of"),
    ({"system": "c4po"}, r"c4po"),
    ({"shapes.prompt_lengths": "(128,64)"}, r"shapes\.prompt_lengths .*ascending"),
    ({"shapes.max_new_tokens": 4}, r"role \w+ may write .* shapes\.max_new_tokens is 4"),
    ({"mesh": "(0,1,1)"}, r"mesh\[0\] is 0"),
    ({"seed": 2**32}, r"seed is 4294967296: use .*, at most 4294967295"),
    ({"data.world.seed": 2**32}, r"data\.world\.seed is 4294967296"),
    ({"compute_dtype": "float8"}, r"compute_dtype is 'float8': use one of"),
    ({"index.kind": "remote"}, r"missing config key config\.index\.url"),
    ({"llm.kind": "opnai"}, r"llm\.kind is 'opnai': use one of"),
    ({"data.world.hopes": "(1,)"}, r"data\.world\.hopes: did you mean hops\?"),
    ({"credit": "none"}, r"credit"),
]


@pytest.mark.parametrize(("keys", "why"), CONFIG_ERRORS, ids=lambda x: str(x)[:40])
def test_a_wrong_key_has_a_line_with_its_name(keys, why):
    found = findings(keys)
    lines = [finding.line() for finding in found if finding.level == "error"]
    assert len([line for line in lines if re.search(why, line)]) == 1, lines
    assert not any("\n" in line for line in lines)


def test_all_wrong_keys_are_named_at_once():
    keys = {"run.stepz": 3, "optimizer.policy_lr": -1, "recipe.tree.width": 0, "shapes.slot": 1}
    keys |= {"objective.kl.coefficient": -0.1, "index.kind": "bm26"}
    found = findings(keys)
    text = "\n".join(line for line in errors(found) if line.startswith("error"))
    assert text.count("\n") == 5, text
    for key in ("stepz", "policy_lr", "width", "slot", "kl.coefficient", "bm26"):
        assert key in text
    assert any(finding == found[-1] and finding.level == "ok" for finding in found)


def rows(name, content):
    def change(folder):
        write_rows(folder / f"{name}.jsonl", content)
        return {}

    return change


def keys(**given):
    def change(folder):
        return {key.replace("__", "."): value.format(folder) for key, value in given.items()}

    return change


DATA_ERRORS = [
    (rows("train", [{"question": "q?"}]), r"error .*train.jsonl, line 1: .*--fields answer=NAME"),
    (rows("dev", [{"ask": "q?", "reply": "a"}]), r"error .*dev.jsonl: no known format"),
    (rows("dev", []), r"error .*dev.jsonl is empty"),
    (rows("test", [{"question": "q?", "answer": ""}]), r"error .*1 of 1 questions have no answer"),
    (rows("train", QUESTIONS * 2), r"warning .*20 ids occur more than once"),
    (rows("dev", [QUESTIONS[0], {**QUESTIONS[0], "question": "x?"}]), r"error .*have the id"),
    (
        keys(data__files__test="{}/train.jsonl"),
        r"warning data: 20 of 20 test questions are also training questions: divide the file",
    ),
    (rows("corpus", PASSAGES * 2), r"error .*passage id 'p0' occurs 2 times"),
    (rows("corpus", PASSAGES[2:]), r"error gold: 1 of 1 gold passages of train .*'p1'"),
    (
        rows("dev", [{**QUESTIONS[0], "gold": ["p1", "p9"]}]),
        r"warning gold: 1 of 2 gold passages of dev .*'p9'",
    ),
    (
        rows("corpus", [*PASSAGES, {"id": "p", "title": "", "text": "long " * 600}]),
        r"warning corpus: 1 of 5 passages are longer than 512 words .*--chunk",
    ),
    (keys(data__files__train="{}/absent.jsonl"), r"error .*absent.jsonl does not exist"),
    (keys(data__files__train="{0}/train.jsonl,{0}/train.jsonl"), r"error .*two of .* are named"),
    (keys(data__files__corpus=""), r"error .*data.files.corpus is empty"),
    (keys(data__files__fields__question="Q"), r"error .*field 'Q' is missing \(fields: id"),
    (keys(index__kind="exact", index__encoder="{}/no"), r"error .*no"),
    (keys(index__kind="own", index__retriever="no:R"), r"error +index: index.retriever is 'no:R'"),
    (keys(policy="{}/no"), r"error +policy: .*no"),
]


@pytest.mark.parametrize(("change", "why"), DATA_ERRORS)
def test_wrong_data_have_a_line_with_the_remedy(files, tmp_path, change, why):
    lines = [" ".join(line.split()) for line in errors(findings(files | change(tmp_path)))]
    assert any(re.search(why, line) for line in lines), lines


def test_an_index_is_compared_with_the_corpus_the_settings_and_the_encoder(files, tmp_path):
    folder = tmp_path / "index"
    corpus = load_corpus(tmp_path / "corpus.jsonl")
    build_bm25(corpus, BM25Index(), folder)
    named = files | {"index.folder": str(folder)}
    assert not errors(findings(named))
    (line,) = errors(findings(named | {"index.k1": 0.9}))
    assert line.startswith("error") and "index.k1 is 0.9" in line
    write_rows(tmp_path / "corpus.jsonl", PASSAGES[:3])
    (line,) = errors(findings(named))
    assert line.startswith("warning") and "has the index of another corpus" in line
    write_rows(tmp_path / "corpus.jsonl", PASSAGES)
    (tmp_path / "run").mkdir()
    build_bm25(corpus, BM25Index(k1=0.9), tmp_path / "run" / "index")
    (line,) = errors(findings(files, workdir=tmp_path / "run"))
    assert "has the k1 0.9" in line
    copy = shutil.copytree(TINY_BERT, tmp_path / "copy")
    build_index(corpus, load_encoder(copy), "exact", tmp_path / "vectors")
    keys = {"index.kind": "exact", "index.folder": str(tmp_path / "vectors")}
    assert not errors(findings(files | keys | {"index.encoder": str(copy)}))
    (line,) = errors(findings(files | keys | {"index.encoder": str(TINY_BERT)}))
    assert line.startswith("warning") and f"built with the encoder {copy}, but" in line


def test_each_endpoint_is_asked_once(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"  # closed below
    values = {"llm": {"kind": "openai", "model": "m", "base_url": f"{address}/v1"}}
    values |= {"index": {"kind": "remote", "url": address}}
    job = load_job(config_values("tiny/c3po") | values)
    lines = [finding.line() for finding in models.check_endpoints(job)]
    assert [line.split()[:2] for line in lines] == [["error", "llm:"], ["error", "retriever:"]]
    assert "start the server, or correct llm.base_url" in lines[0] and "index.url" in lines[1]


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"llm.kind": "world_reader"}, "the data are not generated"),
        ({"llm": "{'kind': 'local', 'model': 'nowhere/at/all'}"}, "nowhere/at/all"),
    ],
)
def test_a_quick_check_knows_models_that_need_no_server(files, keys, why):
    (line,) = errors(findings({key: x for key, x in files.items() if key != "llm.kind"} | keys))
    assert line.startswith("error    llm: ") and why in line


def test_a_system_that_calls_a_language_model_needs_one(files):
    """A fixed reply would hide an error that ends a run in its first step."""
    job = config_job("tiny/c3po", files)
    request = LLMRequest("answer", (Message("user", "?"),))
    with pytest.raises(UserError, match=r"'answer' needs a language model, but llm\.kind is none"):
        roles._llm(job, DataSample({})).complete([request])


class FakeForest:
    def __init__(self, actions):
        self.records = [Record(-1, 0, "r", 0, (), action=action) for action in actions]


@pytest.mark.parametrize(
    ("sizes", "level"), [((10, 20), "ok"), ((10, 20, 300), "warning"), ((10, 300, 400), "error")]
)
def test_prompts_that_would_be_cut_are_counted(sizes, level):
    job = config_job("tiny/c3po")
    forest = FakeForest([Action((0,) * size, (), "") for size in sizes])
    finding = roles._describe_prompts(job, [forest])
    assert finding.level == level and finding.text.startswith(f"{sum(s > 256 for s in sizes)} of")


@pytest.mark.parametrize(("share", "level"), [(0.9, "ok"), (0.3, "warning"), (0.0, "error")])
def test_roles_that_the_policy_does_not_know_are_named(monkeypatch, share, level):
    job = config_job("tiny/c3po")
    monkeypatch.setattr(roles, "valid_samples", lambda forest: {"router": (share, 20)})
    found = {finding.text.split()[-3]: finding for finding in roles._describe_roles(job, [None])}
    by_text = [finding for finding in found.values() if "router" in finding.text]
    assert by_text[0].level == level and f"{share:.0%} of 20" in by_text[0].text
    unreached = [f for f in roles._describe_roles(job, [None]) if "did not act" in f.text]
    assert len(unreached) == len(job.policy_of) - 1


@pytest.mark.slow
def test_the_shipped_policy_knows_its_roles():
    questions = {"train": [Question(f"q{n}", f"Who is {n}?", ("a",)) for n in range(8)]}
    passages = [Passage(f"p{n}", f"Title {n}", "A text.") for n in range(9)]
    job = config_job("tiny/c3po", {"llm.kind": "local", "llm.model": "tiny"})
    found = list(roles.check_roles(job, DataSample(questions, passages)))
    assert {finding.level for finding in found} <= {"ok", "warning"}
    assert any("of router are valid" in finding.text for finding in found)


def test_the_command_ends_with_2_and_prints_json(capsys, tmp_path):
    config = f"{CONFIGS / 'tiny' / 'c3po.py'}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert main(["config", "validate", "--config", config, "--quick", "--json"]) == 0
        good = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        wrong = ["--config.run.steps=-1", "--config.seed=-1"]
        assert main(["config", "validate", "--config", config, "--quick", *wrong]) == 2
    printed = capsys.readouterr()
    assert {row["level"] for row in good} == {"ok"} and good[0].keys() == set(Finding._fields)
    assert printed.out.count("error ") == 2 and "2 errors" in printed.err


@pytest.mark.parametrize("name", ["warmup_c3po", "tiny/warmup_coda", "tiny/vanilla_sft"])
def test_configs_of_other_commands_are_checked_too(name):
    given = {"data.demos": "d.jsonl", "policy": "p"} if name == "warmup_c3po" else {}
    values = config_values(name, given)
    assert config_problems(values) == []
    assert "sed: did you mean seed?" in config_problems(values | {"sed": 1})[0]
