import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest

from jax_ragrl.config.keys import config_keys
from jax_ragrl.config.schema import build, convert, problems
from jax_ragrl.config.snapshot import save_config
from jax_ragrl.errors import UserError
from jax_ragrl.run import config as run_config
from jax_ragrl.run.overrides import load_config
from jax_ragrl.warmstart.demos import WarmStart


@dataclasses.dataclass(frozen=True)
class Optimizer:
    rate: float
    steps: int = 3
    name: str = "adam"
    nesterov: bool = False


@dataclasses.dataclass(frozen=True)
class Job:
    optimizer: Optimizer
    lengths: tuple[int, ...] = (1,)
    stages: tuple[Optimizer, ...] = ()
    pair: tuple[int, float] = (1, 1.0)
    url: str | None = None
    extra: Optimizer | None = None
    data: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def test_a_nested_mapping_becomes_nested_dataclasses():
    values = {
        "optimizer": {"rate": 1, "nesterov": True},
        "lengths": [4, 5],
        "stages": [{"rate": 0.5}, {"rate": 2, "steps": 7}],
        "pair": [2, 3],
        "extra": {"rate": 9.0},
        "data": {"any": 1},
    }
    job = build(Job, values)
    lists = ((4, 5), (Optimizer(0.5), Optimizer(2.0, 7)), (2, 3.0))
    assert job == Job(Optimizer(1.0, nesterov=True), *lists, None, Optimizer(9.0), {"any": 1})
    assert isinstance(job.optimizer.rate, float) and isinstance(job.pair[1], float)
    assert hash(job.optimizer) and build(Job, {"optimizer": {"rate": 1.0}, "url": None}).url is None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"optimizer": {"rate": 1.0, "stpes": 1}}, r"config\.optimizer\.stpes: did you mean steps"),
        ({"optimizer": {"rate": 1.0}, "zzz": 1}, r"config\.zzz: valid keys are optimizer, lengths"),
        ({"optimizer": {}}, r"missing config key config\.optimizer\.rate"),
        ({}, r"missing config key config\.optimizer"),
        ({"optimizer": {"rate": "fast"}}, r"config\.optimizer\.rate is 'fast'.*type float"),
        ({"optimizer": {"rate": True}}, r"config\.optimizer\.rate is True.*type float"),
        ({"optimizer": {"rate": 1.0, "steps": 2.0}}, r"optimizer\.steps is 2\.0.*type int"),
        ({"optimizer": {"rate": 1.0, "steps": True}}, r"optimizer\.steps is True.*type int"),
        ({"optimizer": {"rate": 1.0, "nesterov": 1}}, r"optimizer\.nesterov is 1.*type bool"),
        ({"optimizer": {"rate": 1.0, "name": 3}}, r"optimizer\.name is 3.*type str"),
        ({"optimizer": {"rate": 1.0}, "lengths": ["1"]}, r"config\.lengths\[0\] is '1'.*type int"),
        ({"optimizer": {"rate": 1.0}, "stages": [{"rat": 1}]}, r"config\.stages\[0\]\.rat"),
        ({"optimizer": {"rate": 1.0}, "url": 5}, r"config\.url is 5.*type str"),
        ({"optimizer": {"rate": None}}, r"config\.optimizer\.rate is None.*type float"),
        ({"optimizer": {"rate": 1.0}, "lengths": 5}, r"config\.lengths"),
        ({"optimizer": {"rate": 1.0}, "lengths": "abc"}, r"config\.lengths"),
        ({"optimizer": {"rate": 1.0}, "lengths": None}, r"config\.lengths"),
        ({"optimizer": None}, r"config\.optimizer"),
        ({"optimizer": [1]}, r"config\.optimizer"),
        ({"optimizer": {"rate": 1.0}, "pair": [1, 2.0, 3]}, r"config\.pair"),
    ],
)
def test_an_invalid_key_is_named_by_its_path(values, message):
    with pytest.raises(UserError, match=message):
        build(Job, values)


def test_all_problems_are_named_at_once():
    values = {"optimizer": {"rate": "fast", "stpes": 1}, "lengths": [1, "2"], "zzz": 1}
    with pytest.raises(UserError) as error:
        build(Job, values)
    assert list(error.value.args) == problems(Job, values)
    assert [text.split(" is ")[0].split(": ")[0] for text in error.value.args] == [
        "unknown config key config.zzz",
        "unknown config key config.optimizer.stpes",
        "config key config.optimizer.rate",
        "config key config.lengths[1]",
    ]
    assert "; config key config.lengths[1] is '2': it must be of type int" in str(error.value)


class Pair(NamedTuple):
    left: float
    right: float = 2.0


@dataclasses.dataclass(frozen=True)
class Holder:
    pair: Pair = Pair(0.0)


def test_a_named_tuple_is_a_section_of_keys():
    assert build(Holder, {"pair": {"left": 1}}).pair == Pair(1.0, 2.0)
    for wrong in ({"pair": {"lfet": 1}}, {"pair": {"right": 1}}, {"pair": [1, 2]}):
        with pytest.raises(UserError, match=r"config\.pair"):
            build(Holder, wrong)


def test_the_last_override_of_a_list_counts():
    """Absl joins the items of repeated lists."""
    arguments = [f"--config.packing.row_lengths=({n},)" for n in (128, 256)]
    file = pathlib.Path(__file__).parents[2] / "configs" / "tiny" / "c3po.py"
    assert tuple(load_config(file, arguments)["packing"]["row_lengths"]) == (256,)


def test_a_section_and_an_unknown_key_of_it_show_the_other_kinds():
    with pytest.raises(UserError, match="url: valid keys are model.*of kind openai: base_url"):
        convert(run_config.LLM, {"kind": "local", "url": "http://host"}, "config.llm")
    (text,) = problems(run_config.LLM, {"kind": "local", "url": "http://host"}, "config.llm")
    assert "of kind openai: base_url" in text
    keys = {key.name: key for key in config_keys(run_config.Job, {"index": {"kind": "bm25"}})}
    assert "'scann' or 'exact' or 'bm25' or 'remote'" in keys["index.kind"].type
    assert "--config.index.kind=KIND" in keys["index.kind"].meaning and "index.k1" in keys


def test_every_key_of_a_warm_start_on_demonstrations_has_a_description():
    keys = list(config_keys(WarmStart, {"data": {"demos": "d"}, "optimizer": {}}))
    assert [key.name for key in keys if not key.meaning] == []


@pytest.mark.parametrize("section", [{"preference": {}}, {"data": {"chunk": {}}}])
def test_a_run_does_not_resume_with_a_section_that_is_on_and_has_no_keys(tmp_path, section):
    file = tmp_path / "config.json"
    save_config(file, {"seed": 1, "data": {"files": {}}})
    name = next(iter(section))
    with pytest.raises(UserError, match=rf"another config \(config\.{name}\S* differs\)"):
        save_config(file, {"seed": 1, "data": {"files": {}}} | section)
    save_config(file, {"seed": 1, "data": {"files": {}}})
