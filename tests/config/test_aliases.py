"""Former names of config keys load as the current ones.

`former_configs.json` holds the values of every config file before the keys were renamed, one config
per line.
"""

from __future__ import annotations

import json
import pathlib
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from jax_ragrl.cli.main import CONFIGS
from jax_ragrl.config.aliases import (
    ADDED,
    ALIASES,
    RECIPES,
    aliases_of,
    current_config,
    current_key,
)
from jax_ragrl.config.kinds import VectorIndex
from jax_ragrl.config.overrides import load_config, override
from jax_ragrl.config.snapshot import (
    LOCATION_KEYS,
    check_saved_config,
    load_saved_config,
    save_config,
)
from jax_ragrl.errors import UserError
from jax_ragrl.run.config import load_job

FORMER: dict[str, Any] = json.loads(
    pathlib.Path(__file__).with_name("former_configs.json").read_text()
)
OVERRIDES = [
    ("coda", "recipe.top_k=30", "recipe.system.top_k=30"),
    ("coda", "recipe.refining=False", "recipe.system.refinement=False"),
    ("coda", "recipe.refine=0", "recipe.refinement_weight=0"),
    ("coda:alone", "recipe.kind=search_r1", "recipe.system.kind=search_r1"),
    ("opera", "recipe.max_steps=0", "recipe.system.max_plan_steps=0"),
    ("opera", "recipe.expert.carried=expert", "recipe.expert.continue_with=expert"),
    ("opera", "recipe.pool=a.jsonl", "recipe.expert_pool=a.jsonl"),
    ("c3po", "recipe.tree.retrieval=sampled", "recipe.tree.router_forcing=sampled"),
    ("c3po", "llm.extra.a.b=False", "llm.extra_body.a.b=False"),
    ("c3po", "compute=float32", "compute_dtype=float32"),
    ("mmoa_rag", "recipe.penalties.words=9", "recipe.penalties.max_answer_words=9"),
    ("mao_arag", "layout.tokens=512", "packing.tokens_per_device=512"),
    ("tiny/tree_grpo", "recipe.agent.rollouts=2", "recipe.rollouts=2"),
    ("tiny/c3po", "shapes.slots=64", "shapes.initial_cache_size=64"),
    ("tiny/c3po", "objective.kl.floor=0.1", "objective.kl.min_coefficient=0.1"),
    ("tiny/sft_c3po", "batch=8", "batch_size=8"),
]


def leaves(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Every dotted key and value of a config; an element of a list has its number as its key."""
    items = value.items() if isinstance(value, Mapping) else enumerate(value)
    for name, part in items:
        nested = isinstance(part, Mapping | list) and part
        yield from leaves(part, f"{key}.{name}") if nested else [(f"{key}.{name}", repr(part))]


def file_values(name: str) -> dict[str, Any]:
    """The values of a config file as JSON holds them."""
    file, _, preset = name.partition(":")
    config = f"--config={CONFIGS / file}.py" + (f":{preset}" if preset else "")
    return json.loads(json.dumps(load_config(None, [config]), default=list))


@pytest.mark.parametrize("name", FORMER)
def test_a_former_config_has_the_keys_of_the_current_one(name):
    config = current_config(FORMER[name])
    added = {f".{key}" for key in ADDED}
    keys = {key for key, _ in leaves(config)} - {".index.url"}
    assert keys - added == {key for key, _ in leaves(file_values(name))} - added


@pytest.mark.parametrize("name", FORMER)
def test_renaming_keys_keeps_every_value(name):
    before, after = leaves(FORMER[name]), leaves(current_config(FORMER[name]))
    # The only value that has another name.
    before = [(key, "'hashed'" if value == "'lexical'" else value) for key, value in before]
    assert sorted(value for _, value in before) == sorted(value for _, value in after)


@pytest.mark.parametrize("name", FORMER)
def test_renaming_a_current_config_changes_nothing(name):
    config = current_config(FORMER[name])
    assert current_config(config) == config


def test_a_former_name_is_never_a_current_one():
    for aliases in (ALIASES, *(ALIASES | names for names in RECIPES.values())):
        assert not set(aliases) & set(aliases.values())


@pytest.mark.parametrize(("name", "former", "current"), OVERRIDES)
def test_a_former_override_acts_as_the_current_one(name, former, current):
    file, _, preset = name.partition(":")
    config = f"--config={CONFIGS / file}.py" + (f":{preset}" if preset else "")
    before, after = former.partition("=")[0], current.partition("=")[0]
    with pytest.warns(UserWarning, match=rf"{before}.* is now {after}"):
        renamed = load_config(None, [config, f"--config.{former}"])
    assert renamed == load_config(None, [config, f"--config.{current}"])
    assert renamed != load_config(None, [config])


def test_a_former_file_takes_former_and_current_overrides(tmp_path):
    values = {"system": "coda", "recipe": {"top_k": 3, "chat": True}, "layout": {"tokens": 8}}
    file = tmp_path / "config.py"
    text = f"from ml_collections import ConfigDict\ndef get_config(): return ConfigDict({values})\n"
    file.write_text(text)
    expected = {
        "system": "coda",
        "recipe": {"system": {"top_k": 5, "as_chat_turns": True}},
        "packing": {"tokens_per_device": 16},
    }
    for change in ("recipe.top_k=5", "recipe.system.top_k=5"):
        for size in ("layout.tokens=16", "packing.tokens_per_device=16"):
            arguments = [f"--config={file}", f"--config.{change}", f"--config.{size}"]
            with pytest.warns(UserWarning, match="layout.tokens is now packing.tokens_per_device"):
                assert load_config(None, arguments) == expected


def test_a_recipe_of_an_unknown_system_keeps_its_keys():
    config = {"system": "mine", "recipe": {"top_k": 3, "group": 2}, "layout": {"tokens": 8}}
    assert current_config(config)["recipe"] == {"top_k": 3, "group": 2}
    assert current_key("recipe.group", aliases_of(config)) == "recipe.group"


@pytest.mark.parametrize("name", ["tiny/c3po", "tiny/coda", "tiny/opera", "tiny/search_r1"])
def test_a_former_run_resumes_with_the_current_config(tmp_path, name):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(FORMER[name]))
    values = file_values(name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the user cannot change the file of a run
        save_config(file, values)
    assert load_job(load_saved_config(file)).shapes == load_job(values).shapes
    file.write_text(json.dumps(FORMER[name]))
    # A key that the file lacks has its value of then, not any value.
    added = json.loads(json.dumps(values)) | {"prices": {}}
    added["optimizer"]["epochs"] = 2
    with pytest.raises(UserError, match=r"config\.optimizer\.epochs differs"):
        check_saved_config(file, added, LOCATION_KEYS)
    changed = values | {"shapes": values["shapes"] | {"max_new_tokens": 99}}
    with pytest.raises(UserError, match=r"config\.shapes\.max_new_tokens differs"):
        check_saved_config(file, changed, LOCATION_KEYS)


def test_a_saved_former_config_takes_overrides(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(FORMER["tiny/coda"]))
    values = load_saved_config(tmp_path / "config.json")
    with pytest.warns(UserWarning, match="recipe.top_k is now recipe.system.top_k"):
        override(values, ["--config.recipe.top_k=9"])
    assert values["recipe"]["system"]["top_k"] == 9 and "top_k" not in values["recipe"]


def test_a_former_value_gets_its_current_name():
    former = {"index": {"encoder": "lexical", "retrievers": ["bm25", {"encoder": "lexical"}]}}
    with pytest.warns(UserWarning, match="index.encoder=lexical is now index.encoder=hashed"):
        config = current_config(former, warn=True)
    # A list may hold words and sections.
    assert config["index"] == {"encoder": "hashed", "retrievers": ["bm25", {"encoder": "hashed"}]}
    assert VectorIndex("lexical") == VectorIndex("hashed")
