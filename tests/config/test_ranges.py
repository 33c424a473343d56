"""Every numeric key of every shipped config refuses values that cannot be meant, by its name."""

import copy
import functools
import math

import pytest

from jax_ragrl.config.ranges import RANGES, Range, check_range
from jax_ragrl.config.schema import build
from jax_ragrl.errors import UserError
from jax_ragrl.systems.c3po import TreeShape
from jax_ragrl.validation.config import keys_of, kind_of
from tests.test_configs import FULL, PRESETS, REAL, TINY, given_to, load

CONFIGS = sorted({*FULL, *TINY, *REAL, *PRESETS, "warmup_c3po"})
# The meaning of a key below 0 and at 0, written here again: the table of ranges is under test.
NEGATIVE_IS_MEANT = {"mesh", "bounds", "rewriter", "selector", "generator"}
ZERO_IS_MEANT = NEGATIVE_IS_MEANT - {"mesh"} | set(
    "run.token_budget run.role_gradients_every "
    "run.patience Run.steps dev_questions test_questions trees_per_save seed known_world_seed "
    "decode_rows slot_tokens kept_contexts first_world_seed staleness num_tokens "
    "max_train_per_file known_facts_per_world max_batch_halvings joint_steps "
    "importance_weight_cap value_coefficient entropy_coefficient gamma lam role_weights "
    "coefficient target "
    "min_coefficient max_coefficient policy_lr value_lr warmup_fraction final_lr_fraction b1 b2 "
    "weight_decay "
    "kl_coefficient margin famous_fraction recall k1 b noise confusion retries overlap "
    "llm.max_tokens judge.max_tokens writer.max_tokens branching_depth router_samples rollouts "
    "min_plan_steps max_plan_steps max_rewrites ndcg_power branching_probability format_weight "
    "refinement_weight alpha token_weight retrieval_weight turn_weight steps save_every "
    "dollars_per_1k_prompt_tokens dollars_per_1k_completion_tokens prompt_loss_weight "
    "sliding_layers evaluation_depth train_per_file dollars_per_million_prompt_tokens "
    "dollars_per_million_completion_tokens dollars_per_search".split()
)
# Zero is refused in these although another section allows it under the same name.
ZERO_IS_REFUSED = {"lora.alpha", "run.save_every", "schedule.phases.steps"}


@functools.cache
def config(name):
    """The values of a config and its numeric keys: dotted name and whether it is a list."""
    values = load(name, given_to(name))
    numeric = [
        (key.name, "tuple" in key.type or key.type.startswith("("))
        for key in keys_of(values)
        if "int" in key.type.replace("(", " ").replace(",", " ").split()
        or "float" in key.type.replace("(", " ").replace(",", " ").split()
    ]
    return values, [(key, is_list) for key, is_list in numeric if "(str" not in key]


def with_value(values, key, value):
    changed = copy.deepcopy(values)
    section = changed
    *outer, last = key.split(".")
    for name in outer:
        if section.get(name) is None:
            section[name] = {}
        section = section[name]
    section[last] = value
    return changed


def senseless(key):
    """Values that the key cannot mean."""
    last = key.rpartition(".")[2]
    yield from (math.nan,) if last == "bounds" else (math.nan, math.inf, -math.inf)
    if last not in NEGATIVE_IS_MEANT:
        yield -1
    if key in ZERO_IS_REFUSED or not {key, last} & ZERO_IS_MEANT:
        yield 0


def new_keys(name):
    """The numeric keys of a config that no config before it has, with the same dataclass."""
    before = set()
    for other in CONFIGS[: CONFIGS.index(name)]:
        values, keys = config(other)
        before |= {(kind_of(values).cls, _owner(values, key), key) for key, _ in keys}
    values, keys = config(name)
    own = [(kind_of(values).cls, _owner(values, key), key) for key, _ in keys]
    return [pair for pair, place in zip(keys, own, strict=True) if place not in before]


def _owner(values, key):
    """The system whose settings hold a key; empty for the keys that all systems share."""
    return values.get("system", "") if key.startswith("recipe.") else ""


@pytest.mark.parametrize("name", CONFIGS)
def test_a_value_that_cannot_be_meant_is_refused_by_name(name):
    values, keys = config(name)
    read = kind_of(values).load
    read(values)
    assert len(keys) > 5
    for key, is_list in new_keys(name):
        if key.rpartition(".")[2] in ("role_weights", "role_periods", "bounds"):
            continue  # pairs, below
        for value in senseless(key):
            wrong = (value,) * (3 if key.endswith("system.max_tokens") else 1) if is_list else value
            with pytest.raises(UserError) as error:
                read(with_value(values, key, wrong))
            assert key.rpartition(".")[2] in str(error.value), (key, value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("guard.bounds", (("reward/mean", math.nan, 1.0),)),
        ("objective.role_weights", (("router", -1.0),)),
        ("objective.role_weights", (("router", math.inf),)),
        ("shapes.prompt_lengths", (128, 64)),
        ("shapes.batch_sizes", (4, 4)),
        ("packing.row_lengths", ()),
        ("mesh", (0, 1, 1)),
    ],
)
def test_a_list_with_a_wrong_entry_is_refused_by_name(key, value):
    values, _ = config("tiny/c3po")
    with pytest.raises(UserError, match=key.rpartition(".")[2]):
        kind_of(values).load(with_value(values, key, value))


def test_every_numeric_key_has_a_range_of_its_own():
    """Otherwise a new key would only be checked for being finite."""
    missing = set()
    for name in CONFIGS:
        for key, _ in config(name)[1]:
            last = key.rpartition(".")[2]
            if not any(known.rpartition(".")[2] == last for known in RANGES):
                missing.add(key)
    assert not missing


@pytest.mark.parametrize(
    ("allowed", "inside", "outside", "words"),
    [
        (Range(), (-1e9, 0), (math.inf, math.nan), "a finite number"),
        (Range(1), (1, 2.5), (0.99, math.inf), "a finite number, at least 1"),
        (Range(0, 1, above=True), (0.1, 1), (0, 1.1), "a finite number, above 0, at most 1"),
        (Range(1, others=(-1,)), (-1, 3), (0, -2), "a finite number, at least 1, or -1"),
    ],
)
def test_a_range_is_its_bounds(allowed, inside, outside, words):
    assert all(x in allowed for x in inside) and not any(x in allowed for x in outside)
    assert str(allowed) == words


def test_a_bool_and_a_text_have_no_range():
    for value in (True, False, "x", None, {"a": -1}):
        check_range(TreeShape, "width", value, "width")
    with pytest.raises(UserError, match="config.width is 0: use a finite number, at least 1"):
        build(TreeShape, {"width": 0})
