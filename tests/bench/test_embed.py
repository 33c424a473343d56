"""The benchmark of embedding counts tokens, and compares vectors with another library's."""

from __future__ import annotations

import json
import pathlib

import numpy as np
import pytest

from jax_ragrl.bench.embed import EmbedWork, smallest_cosine
from jax_ragrl.bench.peers import compare_embeddings, sentence_transformers_embed
from jax_ragrl.cli.main import main
from jax_ragrl.errors import UserError
from jax_ragrl.models.encoder import MINILM_PACKAGE, load_encoder

TINY_BERT = pathlib.Path(__file__).parents[1] / "models" / "tiny_bert"


@pytest.fixture
def corpus(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "passages.jsonl"
    rows = [{"id": str(n), "title": "rome", "text": "the film " * n} for n in range(1, 6)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_command_counts_passages_and_tokens(corpus, capsys):
    options = ["--corpus", str(corpus), "--encoder", str(TINY_BERT), "--count", "4"]
    assert main(["bench", "embed", "--json", *options, "--repeats", "1"]) == 0
    result = json.loads(capsys.readouterr().out)
    texts = EmbedWork(corpus, count=4).texts()
    assert texts[1] == "rome\nthe film the film "
    assert result["tokens"] == sum(map(len, load_encoder(TINY_BERT).tokenize(texts)))
    assert result["corpus"] == "passages.jsonl" and result["passages_per_s"] > 0


def test_too_few_passages_are_refused(corpus):
    with pytest.raises(UserError, match="has 5 passages, fewer than --count 6"):
        EmbedWork(corpus, count=6).texts()


def test_vectors_of_other_lengths_and_directions_are_compared():
    x_XD = np.array([[1.0, 0.0], [0.0, 2.0]])
    assert smallest_cosine(x_XD, 3 * x_XD) == 1
    assert smallest_cosine(x_XD, np.array([[1.0, 0.0], [1.0, 1.0]])) == 0.707107


@pytest.mark.slow
def test_sentence_transformers_embeds_the_same_texts(corpus):
    pytest.importorskip("sentence_transformers")
    pytest.importorskip(MINILM_PACKAGE)
    work = EmbedWork(corpus, count=5, repeats=1)
    speed = sentence_transformers_embed(work)
    ours = load_encoder(work.encoder).encode(work.texts())
    assert smallest_cosine(ours, speed["vectors_XD"]) > 0.9999
    ratios = compare_embeddings({"embed_s": 1.0, "embed_cpu_s": 2.0}, speed)
    assert ratios["times_faster"] == round(speed["embed_s"], 3)
