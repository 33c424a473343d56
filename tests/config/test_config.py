"""Keys are named by their path, belong to the kind of their section and are within their range."""

import dataclasses
import math
import pkgutil
import typing
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, NamedTuple

import pytest
from annotated_types import Gt, Interval, Lt

from jax_ragrl.cli.main import CONFIGS
from jax_ragrl.config.keys import config_keys
from jax_ragrl.config.ranges import Bound, Count, Lengths, MeshSizes, NotNegative, Share
from jax_ragrl.config.schema import build, convert, fields_of, is_section, kinds_of, problems
from jax_ragrl.config.snapshot import save_config
from jax_ragrl.errors import UserError
from jax_ragrl.llm.kinds import LLM, LocalLLMConfig, NoLLMConfig, WorldReaderConfig
from jax_ragrl.retrieval.kinds import DTYPES, KINDS, Index, RemoteIndex, VectorIndex
from jax_ragrl.retrieval.web import ENGINES
from jax_ragrl.run import config as run_config
from jax_ragrl.run.config import REMOTE
from jax_ragrl.run.overrides import load_config, override
from jax_ragrl.systems import baselines
from jax_ragrl.systems.registry import PAPERS, system_module
from jax_ragrl.warmstart.demos import WarmStart
from jax_ragrl.warmstart.finetune import Finetune
from jax_ragrl.warmstart.warmup import Warmup
from tests.jobs import config_job


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
    named: Mapping[str, Optimizer] = dataclasses.field(default_factory=dict)
    data: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def test_a_nested_mapping_becomes_nested_dataclasses():
    values = {
        "optimizer": {"rate": 1, "nesterov": True},
        "lengths": [4, 5],
        "stages": [{"rate": 0.5}, {"rate": 2, "steps": 7}],
        "pair": [2, 3],
        "extra": {"rate": 9.0},
        "named": {"a": {"rate": 8}},
        "data": {"any": 1},
    }
    job = build(Job, values)
    lists = ((4, 5), (Optimizer(0.5), Optimizer(2.0, 7)), (2, 3.0))
    one, named = Optimizer(9.0), {"a": Optimizer(8.0)}
    assert job == Job(Optimizer(1.0, nesterov=True), *lists, None, one, named, {"any": 1})
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
        ({"optimizer": {"rate": 1.0}, "named": {"a": {"rat": 1}}}, r"config\.named\.a\.rat:"),
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
    values = load_config(CONFIGS / "tiny" / "c3po.py", arguments)
    assert tuple(values["packing"]["row_lengths"]) == (256,)


def test_a_section_and_an_unknown_key_of_it_show_the_other_kinds():
    with pytest.raises(UserError, match="url: valid keys are model.*of kind openai: base_url"):
        convert(LLM, {"kind": "local", "url": "http://host"}, "config.llm")
    (text,) = problems(LLM, {"kind": "local", "url": "http://host"}, "config.llm")
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
    with pytest.raises(
        UserError, match=rf"another config \(config\.{name}\S* differs: .*, and was not set\)"
    ):
        save_config(file, {"seed": 1, "data": {"files": {}}} | section)
    save_config(file, {"seed": 1, "data": {"files": {}}})


# --- Kinds of a section -------------------------------------------------------------------------

FULL = {"policy": "p", "index.encoder": "e"}
FULL |= {f"data.files.{name}": "f" for name in ("corpus", "train", "dev", "test")}


def test_the_kind_selects_the_dataclass():
    values: dict[str, Any] = {"kind": "local", "model": "folder", "int8": True}
    assert convert(LLM, values, "config.llm") == LocalLLMConfig("folder", int8=True)
    assert convert(LLM, {"kind": "none"}, "config.judge") == NoLLMConfig()
    assert convert(LLM, {"noise": 1}, "config.llm") == WorldReaderConfig(noise=1.0)
    assert convert(Index, {}, "config.index") == VectorIndex()
    assert convert(Index, RemoteIndex("http://h:1"), "config.index") == RemoteIndex("http://h:1")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kind": "x"}, r"llm\.kind is 'x': use one of world_reader, local, openai, none"),
        ({"kind": "none", "model": "m"}, r"llm\.model is 'm', but .*only kind local or openai"),
        ({"kind": "local", "noise": 0.5}, r"llm\.noise is 0\.5, .*only kind world_reader reads"),
        ({"kind": "openai"}, r"missing config key config\.llm\.model: set it with --config\.llm"),
        ({"kind": "local", "modle": "m"}, r"config\.llm\.modle: did you mean model"),
        ({"kind": "local", "dtype": "int8"}, r"llm\.dtype is 'int8': use one of float32, bfloat16"),
        (
            {"kind": "openai", "model": "m", "base_url": "localhost:8000/v1"},
            "without http:// or https://: .*http://localhost:8000/v1",
        ),
        (3, r"config\.llm is 3: it must be a section of keys"),
    ],
)
def test_a_key_that_the_kind_cannot_read_is_refused(values, message):
    with pytest.raises(UserError, match=message):
        convert(LLM, values, "config.llm")


def test_the_kinds_are_those_of_the_retrievers():
    assert set(kinds_of(Index)) == {*KINDS, "bm25", REMOTE, *ENGINES, "pipeline", "own"}
    for dtype in DTYPES:
        section = {"kind": "exact", "dtype": dtype}
        assert convert(Index, section, "config.index") == VectorIndex(kind="exact", dtype=dtype)
    home = {kind for kind, engine in ENGINES.items() if engine.url}
    assert home == {"serper"}, "only this kind may leave out its url"


def test_another_kind_drops_the_keys_of_the_file_also_of_a_saved_one():
    """The file sets the model and the address of a server for both language models."""
    local = {"llm.kind": "local", "llm.model": "folder", "judge.kind": "none"}
    job = config_job("c3po", FULL | local)
    assert (job.llm, job.judge) == (LocalLLMConfig("folder"), NoLLMConfig())
    rest = {key: value for key, value in FULL.items() if key != "index.encoder"}
    job = config_job("c3po", rest | {"index.kind": "remote", "index.url": "http://h:1"})
    assert job.index == RemoteIndex("http://h:1")
    values: dict[str, Any] = {"llm": {"kind": "openai", "model": "m", "base_url": "http://u"}}
    override(values, ["--config.llm.kind=world_reader", "--config.llm.noise=0.5"])
    assert convert(LLM, values["llm"], "config.llm") == WorldReaderConfig(noise=0.5)


# --- Ranges of numbers --------------------------------------------------------------------------

BASELINES = [m.name for m in pkgutil.iter_modules(baselines.__path__, f"{baselines.__name__}.")]
SETTINGS = [
    module.Settings
    for module in map(system_module, [*PAPERS, *BASELINES])
    if hasattr(module, "Settings")
]


def types_in(hint: Any, cls: type = object) -> Iterator[tuple[Any, type]]:
    """The types in a type, sections first to last, each with the class of its field."""
    yield hint, cls
    if is_section(hint):
        for field in fields_of(hint).values():
            yield from types_in(field.hint, hint)
    elif typing.get_origin(hint) not in (Annotated, typing.Literal):
        for inner in typing.get_args(hint):
            yield from types_in(inner, cls)


def test_every_number_of_a_section_has_a_range():
    """Otherwise a new key would only be checked for being finite."""
    found = [
        pair
        for cls in (run_config.Job, WarmStart, Finetune, Warmup, *SETTINGS)
        for pair in types_in(cls)
    ]
    assert len({hint for hint, _ in found if is_section(hint)}) > 45
    # A recipe is built by its system, with the branches of its expander.
    assert {cls.__name__ for hint, cls in found if hint in (int, float)} == {
        "Branching",
        "Growth",
        "Recipe",
    }


@pytest.mark.parametrize(
    ("hint", "inside", "outside", "words"),
    [
        (float, (-1e9, 0), (math.inf, -math.inf, math.nan), "a finite number"),
        (Count, (1, 2), (0, -1), "a finite number, at least 1"),
        (Share, (0, 1), (-0.1, 1.1, math.nan), "a finite number, at least 0, at most 1"),
        (NotNegative, (0.0, 3), (-1, math.inf), "a finite number, at least 0"),
        (Annotated[float, Gt(0), Lt(1)], (0.5,), (0, 1), "a finite number, above 0, below 1"),
        (Annotated[int, Interval(ge=1, lt=3)], (1, 2), (0, 3), "a finite number, .*1, below 3"),
        (Bound, (-math.inf, 3, math.inf), (math.nan,), "a finite number, or -inf, or inf"),
        (Count | None, (None, 1), (0,), "a finite number, at least 1"),
    ],
)
def test_a_range_is_its_bounds(hint, inside, outside, words):
    assert [convert(hint, value, "config.x") for value in inside] == list(inside)
    for value in outside:
        with pytest.raises(UserError, match=rf"^config\.x is \S+: use {words}$"):
            convert(hint, value, "config.x")


def test_an_entry_of_a_list_is_named():
    assert convert(MeshSizes, [-1, 2], "mesh") == (-1, 2)
    with pytest.raises(UserError, match=r"mesh\[1\] is 0: use a finite number, at least 1, or -1"):
        convert(MeshSizes, (1, 0), "mesh")
    for value in ((2, 1), (1, 1), ()):
        with pytest.raises(UserError, match=r"rows is .*: list the numbers in ascending order"):
            convert(Lengths, value, "rows")


class Weights(NamedTuple):
    alpha: float = 0  # a field of another class has this name, and must be positive
    steps: int = -1


@dataclasses.dataclass(frozen=True)
class Weighted:
    weights: Weights = Weights()
    alpha: float = 0


def test_a_field_of_another_class_limits_no_number():
    values = {"alpha": 0, "weights": {"alpha": -2, "steps": -5}}
    assert build(Weighted, values) == Weighted(Weights(-2.0, -5), 0.0)
    with pytest.raises(UserError, match=r"config\.weights\.alpha is nan: use a finite number"):
        build(Weighted, {"weights": {"alpha": math.nan}})
