"""A random policy in the shape of SmolLM2, cut to two layers, and a set of short real-like data."""

from __future__ import annotations

import json
import pathlib

from flax import nnx

from jax_ragrl.models.config import DecoderConfig
from jax_ragrl.models.decoder import Decoder
from jax_ragrl.models.hf import save_decoder
from jax_ragrl.text.tokenizer import ChatTokenizer
from jax_ragrl.text.training import train_tokenizer

PEOPLE = {"Ada": "Ulm", "Ben": "Rome", "Cleo": "Oslo", "Dan": "Bern", "Eva": "Kyiv", "Finn": "Lima"}
STYLES = ("c3po_small", "coda_small", "mao_arag_small", "opera_small")


def passages() -> list[dict[str, str]]:
    """One passage per person, in the layout of FlashRAG."""
    text = '"{0} the painter"\n{0} was a painter. The painter {0} was born in {1}.'
    rows = enumerate(PEOPLE.items())
    return [{"id": str(i), "contents": text.format(*pair)} for i, pair in rows]


def questions() -> list[dict[str, object]]:
    """One question per person, with its gold passage."""
    return [
        {
            "id": f"q{i}",
            "question": f"where was {name} the painter born",
            "golden_answers": [f"the city of {city}", city],
            "metadata": {"gold": [str(i)]},
        }
        for i, (name, city) in enumerate(PEOPLE.items())
    ]


def write_data(folder: pathlib.Path) -> dict[str, str]:
    """Writes the data; returns the overrides that name its files."""
    for name, rows in (("corpus", passages()), ("questions", questions())):
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    splits = dict.fromkeys(("train", "dev", "test"), "questions") | {"corpus": "corpus"}
    return {f"data.files.{split}": str(folder / f"{f}.jsonl") for split, f in splits.items()}


def write_policy(folder: pathlib.Path) -> pathlib.Path:
    """Writes a random decoder: nine heads over three key-value heads, tied embeddings, ChatML."""
    prompts = pathlib.Path("jax_ragrl/text/prompts")
    prompts = pathlib.Path(__file__).parents[1] / prompts
    texts = [file.read_text() for style in STYLES for file in sorted((prompts / style).iterdir())]
    tokenizer = ChatTokenizer(train_tokenizer(texts, 600))
    heads = {"num_heads": 9, "num_kv_heads": 3, "head_dim": 4}
    config = DecoderConfig(len(tokenizer), 36, 64, num_layers=2, rope_theta=1e5, **heads)
    tokenizer.save(folder / "tokenizer")
    decoder = Decoder(config, rngs=nnx.Rngs(0))
    save_decoder(decoder, folder / "checkpoint", folder / "tokenizer")
    return folder / "checkpoint"
