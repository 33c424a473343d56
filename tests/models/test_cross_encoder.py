"""Cross-encoders equal sentence-transformers on small random models."""

import json

import numpy as np
import pytest
import text_models

from jax_ragrl.errors import UserError
from jax_ragrl.models.cross_encoder import load_cross_encoder, score_activation

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


def change(folder, **fields):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


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
    library = pytest.importorskip("sentence_transformers")
    write(tmp_path, kind, **changes)
    for fields in ({}, IDENTITY):
        change(tmp_path, **fields)
        scores = load_cross_encoder(tmp_path).scores(PAIRS)
        theirs = library.CrossEncoder(str(tmp_path), device="cpu").predict(PAIRS)
        assert scores.dtype == np.float32 and scores.shape == (len(PAIRS),)
        np.testing.assert_allclose(scores, theirs, atol=1e-4)
    assert len(set(scores.tolist())) == len(PAIRS)


def test_a_folder_that_sentence_transformers_saves_is_read(tmp_path):
    library = pytest.importorskip("sentence_transformers")
    write(tmp_path / "old", "bert", type_vocab_size=2)
    theirs = library.CrossEncoder(str(tmp_path / "old"), device="cpu")
    theirs.save_pretrained(str(tmp_path / "new"))
    scores = load_cross_encoder(tmp_path / "new").scores(PAIRS)
    np.testing.assert_allclose(scores, theirs.predict(PAIRS), atol=1e-4)


def test_the_other_pairs_change_no_score(tmp_path):
    write(tmp_path, "bert", type_vocab_size=2)
    model = load_cross_encoder(tmp_path)
    alone = np.concatenate([model.scores([pair]) for pair in PAIRS])
    np.testing.assert_allclose(model.scores(PAIRS[::-1])[::-1], alone, atol=1e-6)
    assert model.scores([]).shape == (0,)


def test_the_config_names_the_activation_of_the_logits():
    assert score_activation({}) == "Sigmoid"
    assert score_activation(IDENTITY) == "Identity"
    old = {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}
    assert score_activation(old) == "Identity"
    with pytest.raises(UserError, match="Softsign"):
        score_activation({"sbert_ce_default_activation_function": "torch.nn.Softsign"})


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


def test_other_modules_are_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    (tmp_path / "modules.json").write_text('[{"type": "x.Transformer"}, {"type": "x.LogitScore"}]')
    with pytest.raises(UserError, match="LogitScore"):
        load_cross_encoder(tmp_path)
