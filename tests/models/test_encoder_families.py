"""Every family of encoders and cross-encoders equals sentence-transformers on random models."""

import json
import pathlib
import warnings

import numpy as np
import pytest
import text_models

from jax_ragrl.errors import UserError
from jax_ragrl.models import backbones, bert, encoder, sentence_files
from jax_ragrl.models.cross_encoder import load_cross_encoder, score_activation
from jax_ragrl.models.sentence_files import SETTINGS, Prefixes, known_prefixes
from jax_ragrl.types import Passage
from tests.model_folders import change_json

PROMPTS = {"query": "query : ", "document": "passage : "}
TINY = pathlib.Path(__file__).parent / "tiny_bert"


def reference(folder):
    library = pytest.importorskip("sentence_transformers")
    return library.SentenceTransformer(str(folder), device="cpu")


def check_equal(folder):
    ours, theirs, texts = encoder.load_encoder(folder), reference(folder), text_models.TEXTS
    np.testing.assert_allclose(ours.encode(texts), theirs.encode(texts, prompt=""), atol=1e-4)
    queries = theirs.encode_query(texts)
    np.testing.assert_allclose(ours.encode_queries(texts), queries, atol=1e-4)
    passages = [Passage(str(n), "ann", text) for n, text in enumerate(texts)]
    expected = theirs.encode_document([f"ann\n{text}" for text in texts])
    np.testing.assert_allclose(ours.encode_passages(passages), expected, atol=1e-4)
    assert ours.dimension == expected.shape[1]
    return ours


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "pooling", "options"),
    [
        ("bert", "cls", {"prompts": PROMPTS}),
        ("xlm-roberta", "mean", {"normalise": False}),
        ("mpnet", "mean", {}),
        ("modernbert", "mean", {"prompts": PROMPTS}),
        ("qwen3", "lasttoken", {"prompts": PROMPTS}),
        ("qwen2", "lasttoken", {"dense": True}),
        pytest.param("roberta", "mean", {"dense": True}, marks=pytest.mark.slow),
        pytest.param("modernbert", "cls", {"dense": True}, marks=pytest.mark.slow),
    ],
)
def test_vectors_equal_those_of_sentence_transformers(tmp_path, kind, pooling, options):
    pytest.importorskip("sentence_transformers")
    text_models.write_model(tmp_path, kind)
    text_models.write_sentence_files(tmp_path, pooling, **options)
    ours = check_equal(tmp_path)
    assert (ours.settings.pooling, ours.settings.max_length) == (pooling, 150)


def test_a_folder_that_sentence_transformers_saves_is_read(tmp_path):
    pytest.importorskip("sentence_transformers")
    text_models.write_model(tmp_path / "old", "bert")
    text_models.write_sentence_files(tmp_path / "old", "cls", dense=True, prompts=PROMPTS)
    reference(tmp_path / "old").save_pretrained(str(tmp_path / "new"))
    ours = check_equal(tmp_path / "new")
    assert ours.settings == encoder.load_encoder(tmp_path / "old").settings


def test_a_decoder_is_divided_over_the_devices(tmp_path):
    pytest.importorskip("torch")
    text_models.write_model(tmp_path, "qwen3")
    with pytest.warns(UserWarning, match="no sentence-transformers files"):
        ours = encoder.load_encoder(tmp_path)
    kernel = ours._state["backbone"]["decoder"]["layers"]["q_proj"][...]
    assert kernel.addressable_shards[0].data.size == kernel.size // 8
    assert (ours.settings.pooling, ours.settings.normalise) == ("lasttoken", True)


def test_distances_have_the_buckets_of_transformers():
    torch = pytest.importorskip("torch")
    from transformers.models.mpnet.modeling_mpnet import MPNetEncoder

    at = torch.arange(300)
    theirs = MPNetEncoder.relative_position_bucket(at[None, :] - at[:, None])
    np.testing.assert_array_equal(bert.distance_buckets(300), theirs.numpy())


@pytest.mark.parametrize(
    ("name", "prefixes"),
    [
        ("intfloat/e5-base-v2", Prefixes("query: ", "passage: ")),
        ("models/multilingual-e5-small", Prefixes("query: ", "passage: ")),
        ("/cache/models--intfloat--e5-large/snapshots/0a1b", Prefixes("query: ", "passage: ")),
        ("BAAI/bge-m3", None),
        ("/home/e5-base/contriever", None),
        ("minilm", None),
    ],
)
def test_a_family_is_known_by_the_name_of_its_model(name, prefixes):
    assert known_prefixes(name) == prefixes


def test_instructions_and_bge_have_a_query_prefix_only():
    for name in ("intfloat/multilingual-e5-large-instruct", "BAAI/bge-base-en-v1.5"):
        query, passage = known_prefixes(name)
        assert query and not passage


def test_known_prefixes_apply_with_a_warning_unless_others_are_given(tmp_path):
    folder = tmp_path / "e5-base-v2"
    folder.symlink_to(TINY)
    with pytest.warns(UserWarning, match="name no prefixes"):
        known = encoder.load_encoder(folder)
    assert (known.settings.query_prefix, known.settings.passage_prefix) == ("query: ", "passage: ")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plain = encoder.load_encoder(folder, query_prefix="", passage_prefix="")
        again = encoder.from_description(known.describe())
    assert (plain.settings.query_prefix, plain.settings.passage_prefix) == ("", "")
    with pytest.warns(UserWarning, match="uses 'q: ' and 'passage: '"):
        one = encoder.load_encoder(folder, query_prefix="q: ")
    assert (one.settings.query_prefix, one.settings.passage_prefix) == ("q: ", "passage: ")
    assert again.settings == known.settings


@pytest.mark.parametrize("kind", [*backbones.OTHER_MODELS, "whisper"])
def test_other_kinds_are_refused_by_name(kind):
    with pytest.raises(UserError, match="supported encoder: use a model of type bert") as error:
        backbones.read_backbone({"model_type": kind})
    assert repr(kind) in str(error.value) and "qwen3" in str(error.value)


@pytest.mark.parametrize(
    ("kind", "field", "reason"),
    [
        ("modernbert", {"hidden_activation": "swish2"}, "activation 'swish2'"),
        ("modernbert", {"rope_scaling": {"type": "linear"}}, "rotary positions"),
        ("modernbert", {"layer_types": ["linear_attention"]}, "layer_types"),
        ("modernbert", {"vocab_size": None}, "lacks 'vocab_size'"),
        ("mpnet", {"relative_attention_num_buckets": 64}, "64 buckets"),
    ],
)
def test_fields_that_change_the_arithmetic_are_refused(kind, field, reason):
    fields = {"model_type": kind, **text_models.BASE, **field}
    with pytest.raises(UserError, match=reason):
        backbones.read_backbone({name: x for name, x in fields.items() if x is not None})


def test_a_local_layer_without_a_rotary_base_has_that_of_the_others():
    fields = {**text_models.BASE, "model_type": "modernbert", "global_rope_theta": 8e4}
    bases = [{}, {"local_rope_theta": None}]
    assert [backbones.read_backbone(fields | x).config.bases for x in bases] == [
        (8e4, 1e4),
        (8e4, 8e4),
    ]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"activation_function": "torch.nn.Softsign"}, "Softsign"),
        ({"use_residual": True}, "residual"),
        ({"module_output_name": "token_embeddings"}, "other inputs"),
    ],
)
def test_a_dense_layer_of_another_form_is_refused(tmp_path, fields, reason):
    sizes = {"in_features": 2, "out_features": 2}
    (tmp_path / "config.json").write_text(json.dumps(sizes | fields))
    with pytest.raises(UserError, match=reason):
        sentence_files.dense_spec(tmp_path)


PAIRS = [
    ("who directed the film ?", "ann was born in rome ."),
    ("who ?", "the film " * 100),
    ("ann and bob " * 60, "the film " * 90),
    ("", "rome"),
    ("who directed the film ?", ""),
]
IDENTITY = {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}


def write(folder, kind, **changes):
    pytest.importorskip("sentence_transformers")
    head = "AutoModelForSequenceClassification"
    return text_models.write_model(folder, kind, head, num_labels=1, **changes)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("bert", {"type_vocab_size": 2}),
        ("xlm-roberta", {"type_vocab_size": 2}),
        ("modernbert", {"classifier_pooling": "mean"}),
        pytest.param("modernbert", {"classifier_pooling": "cls"}, marks=pytest.mark.slow),
        pytest.param("roberta", {"type_vocab_size": 2}, marks=pytest.mark.slow),
        pytest.param("mpnet", {}, marks=pytest.mark.slow),
    ],
)
def test_scores_equal_those_of_sentence_transformers(tmp_path, kind, changes):
    library, torch = map(pytest.importorskip, ("sentence_transformers", "torch"))
    write(tmp_path, kind, **changes)
    for fields in ({}, IDENTITY):
        change_json(tmp_path / "config.json", **fields)
        scores = load_cross_encoder(tmp_path).scores(PAIRS)
        theirs = library.CrossEncoder(str(tmp_path), device="cpu").predict(PAIRS)
        assert scores.dtype == np.float32 and scores.shape == (len(PAIRS),)
        np.testing.assert_allclose(scores, theirs, atol=1e-4)
    assert len(set(scores.tolist())) == len(PAIRS)
    # An activation of its own is saved beside that of config.json, and comes first.
    other = library.CrossEncoder(str(tmp_path), device="cpu", activation_fn=torch.nn.Tanh())
    other.save_pretrained(str(tmp_path / "saved"))
    again = load_cross_encoder(tmp_path / "saved").scores(PAIRS)
    np.testing.assert_allclose(again, np.tanh(theirs), atol=1e-4)
    change_json(tmp_path / "saved" / SETTINGS, prompts={"a": "film "}, default_prompt_name="a")
    with pytest.raises(UserError, match="with the prompt 'film '"):
        load_cross_encoder(tmp_path / "saved")


def test_the_other_pairs_change_no_score(tmp_path):
    write(tmp_path, "bert", type_vocab_size=2)
    model = load_cross_encoder(tmp_path)
    alone = np.concatenate([model.scores([pair]) for pair in PAIRS])
    np.testing.assert_allclose(model.scores(PAIRS[::-1])[::-1], alone, atol=1e-6)
    assert model.scores([]).shape == (0,)


def test_the_config_names_the_activation_of_the_logits_and_other_modules_are_refused(tmp_path):
    assert score_activation({}) == "Sigmoid"
    assert score_activation(IDENTITY) == "Identity"
    old = {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}
    assert score_activation(old) == "Identity"
    with pytest.raises(UserError, match="Softsign"):
        score_activation({"sbert_ce_default_activation_function": "torch.nn.Softsign"})
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    (tmp_path / "modules.json").write_text('[{"type": "x.Transformer"}, {"type": "x.LogitScore"}]')
    with pytest.raises(UserError, match="LogitScore"):
        load_cross_encoder(tmp_path)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"model_type": "deberta-v2"}, "BAAI/bge-reranker-base"),
        ({"model_type": "qwen3"}, "sequence-classification model of type bert"),
        ({"model_type": "bert", **text_models.BASE, "type_vocab_size": 2}, "2 labels"),
    ],
)
def test_other_kinds_of_models_are_refused_by_name(tmp_path, fields, reason):
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(UserError, match=reason):
        load_cross_encoder(tmp_path)
