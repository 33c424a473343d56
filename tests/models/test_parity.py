"""The decoder equals Transformers for every family; golden files replace a missing PyTorch."""

from pathlib import Path

import decoding
import hf_reference
import numpy as np
import pytest

from jax_ragrl.models import hf_config
from jax_ragrl.models.hf import load_decoder
from jax_ragrl.models.rope import frequencies

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize(
    ("theta", "positions", "rope"),
    [
        # Llama 3.1 and 3.2, the setting of Qwen2.5 for long inputs, and other fields of YaRN.
        (5e5, 131072, hf_reference.LLAMA3 | {"original_max_position_embeddings": 8192}),
        (5e5, 131072, hf_reference.LLAMA3 | {"factor": 32.0}),
        (1e6, 32768, {"rope_type": "yarn", "factor": 4.0}),
        (1e6, 40960, hf_reference.YARN | {"attention_factor": 0.9, "truncate": False}),
        (1e4, 4096, hf_reference.YARN | {"beta_fast": 16.0, "beta_slow": 2.0}),
        (1e4, 4096, {"rope_type": "linear", "factor": 3.0}),
    ],
)
def test_rotary_frequencies_equal_transformers(theta, positions, rope):
    pytest.importorskip("torch")
    import transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    fields = {"head_dim": 128, "max_position_embeddings": positions, "rope_theta": theta}
    config = transformers.LlamaConfig(**fields, rope_scaling=rope)
    expected, gain = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, "cpu")
    ours = hf_config.from_hf(config.to_dict())
    actual, factor = frequencies(ours.head_dim, ours.rope_theta, ours.rope_scaling)
    np.testing.assert_allclose(actual, expected.numpy(), rtol=2e-6)
    assert factor == pytest.approx(gain)


@pytest.mark.parametrize("name", hf_reference.CASES)
def test_golden_logits_gradients_and_tokens_are_reproduced(name):
    decoder = load_decoder(GOLDEN / name)
    golden = dict(np.load(GOLDEN / name / "reference.npz"))
    ids_BL, mask_BL = golden["ids"], golden["mask"]
    grads, actual = decoding.evaluate(decoder, ids_BL, mask_BL)
    np.testing.assert_allclose(actual[mask_BL], golden["logits"][mask_BL], atol=2e-4)
    norms = [np.linalg.norm(grads[n]) for n in golden["gradient_names"]]
    np.testing.assert_allclose(norms, golden["gradient_norms"], rtol=1e-3, atol=1e-6)
    tokens = decoding.greedy(decoder, ids_BL[:2], mask_BL[:2], golden["greedy"].shape[1])
    np.testing.assert_array_equal(tokens, golden["greedy"])
