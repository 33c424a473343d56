"""A section with a `kind` has exactly the keys that its kind reads."""

from typing import Any

import pytest

from jax_ragrl.cli.main import CONFIGS
from jax_ragrl.config.schema import convert, kinds_of
from jax_ragrl.errors import UserError
from jax_ragrl.llm.kinds import LLM, LocalLLMConfig, NoLLMConfig, WorldReaderConfig
from jax_ragrl.retrieval.kinds import DTYPES, KINDS, Index, RemoteIndex, VectorIndex
from jax_ragrl.retrieval.web import ENGINES
from jax_ragrl.run.config import REMOTE
from jax_ragrl.run.load import load_job
from jax_ragrl.run.overrides import load_config, override

FULL = [
    *("--config.policy=p", "--config.index.encoder=e", "--config.data.files.corpus=c"),
    *(f"--config.data.files.{split}=f" for split in ("train", "dev", "test")),
]


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
    local = ["--config.llm.kind=local", "--config.llm.model=folder", "--config.judge.kind=none"]
    job = load_job(load_config(CONFIGS / "c3po.py", [*FULL, *local]))
    assert (job.llm, job.judge) == (LocalLLMConfig("folder"), NoLLMConfig())
    server = ["--config.index.kind=remote", "--config.index.url=http://h:1"]
    rest = [text for text in FULL if "encoder" not in text]
    job = load_job(load_config(CONFIGS / "c3po.py", [*rest, *server]))
    assert job.index == RemoteIndex("http://h:1")
    values: dict[str, Any] = {"llm": {"kind": "openai", "model": "m", "base_url": "http://u"}}
    override(values, ["--config.llm.kind=world_reader", "--config.llm.noise=0.5"])
    assert convert(LLM, values["llm"], "config.llm") == WorldReaderConfig(noise=0.5)
