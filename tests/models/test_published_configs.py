"""Published `config.json` files: each is read as Transformers reads it, or refused for its reason.

`published_configs.json` holds facts: the fields of each file, and where they were copied from. A
file that Transformers printed may have fields added that are at their defaults.
"""

import json
import pathlib
import warnings

import pytest
import transformers

from jax_ragrl.errors import UserError
from jax_ragrl.models.hf_config import REQUIRED, from_hf, to_hf
from jax_ragrl.models.published import MODEL_CONFIGS

PUBLISHED = json.loads((pathlib.Path(__file__).parent / "published_configs.json").read_text())
READ = [name for name, entry in PUBLISHED.items() if entry["expect"] == "read"]
REFUSED = [name for name in PUBLISHED if name not in READ]
# Notes of whoever trained the model; every other field is known.
UNKNOWN = {
    "ALLaM-AI/ALLaM-7B-Instruct-preview": "internal_version",
    "meta-llama/Llama-2-7b-hf, pruned": "sparsity",
}


@pytest.mark.parametrize("name", READ)
def test_a_published_config_is_read_as_transformers_reads_it(name):
    raw = PUBLISHED[name]["config"]
    with warnings.catch_warnings(record=True) as messages:
        warnings.simplefilter("always")
        ours = from_hf(raw)
    unknown = [f"sets {UNKNOWN[name]}, unknown"] if name in UNKNOWN else []
    assert len(messages) == len(unknown)
    assert all(
        text in str(message.message) for text, message in zip(unknown, messages, strict=True)
    )
    theirs = transformers.AutoConfig.for_model(**raw)
    rope = theirs.rope_parameters
    kind = None if rope["rope_type"] == "default" else rope["rope_type"]
    pairs = REQUIRED | {
        "num_key_value_heads": "num_kv_heads",
        "rms_norm_eps": "rms_norm_eps",
        "tie_word_embeddings": "tie_embeddings",
    }
    for their_name, our_name in pairs.items():
        assert getattr(ours, our_name) == getattr(theirs, their_name), our_name
    assert ours.head_dim == getattr(theirs, "head_dim", ours.hidden_size // ours.num_heads)
    assert ours.rope_theta == rope["rope_theta"]
    assert (ours.rope_scaling and ours.rope_scaling.kind) == kind
    assert ours.sliding_window is None
    assert from_hf(to_hf(ours, "bfloat16")) == ours  # it survives an export


@pytest.mark.parametrize("name", REFUSED)
def test_a_config_that_is_not_implemented_is_refused_for_its_reason(name):
    with pytest.raises(UserError) as error:
        from_hf(PUBLISHED[name]["config"])
    assert PUBLISHED[name]["expect"] in str(error.value)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("Qwen/Qwen2.5-0.5B-Instruct", "qwen2.5-0.5b"),
        ("Qwen/Qwen2.5-3B", "qwen2.5-3b"),
        ("Qwen/Qwen3-0.6B", "qwen3-0.6b"),
        ("Qwen/Qwen3-1.7B", "qwen3-1.7b"),
        ("Qwen/Qwen3-8B", "qwen3-8b"),
        ("meta-llama/Llama-3.2-1B", "llama-3.2-1b"),
        ("meta-llama/Llama-3.2-3B", "llama-3.2-3b"),
        ("meta-llama/Meta-Llama-3.1-8B", "llama-3.1-8b"),
        ("unsloth/Llama-3.2-1B-Instruct", "llama-3.2-1b"),
    ],
)
def test_a_known_shape_is_that_of_the_published_config(name, shape):
    assert from_hf(PUBLISHED[name]["config"]) == MODEL_CONFIGS[shape]


@pytest.mark.parametrize(
    ("name", "head_dim"), [("Qwen/Qwen3-0.6B", 128), ("Qwen/Qwen2.5-0.5B-Instruct", 896 // 14)]
)
def test_a_head_dim_left_unsaid_is_the_familys(name, head_dim):
    raw = {key: value for key, value in PUBLISHED[name]["config"].items() if key != "head_dim"}
    assert from_hf(raw).head_dim == head_dim
