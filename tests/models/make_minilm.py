"""Makes `minilm.json`: vectors of a few texts by sentence-transformers' all-MiniLM-L6-v2.

Run once with sentence-transformers installed: `python tests/models/make_minilm.py`.
"""

import json
import pathlib

import sentence_transformers

from jax_ragrl.models.encoder import minilm_folder

FILE = pathlib.Path(__file__).parent / "minilm.json"
TEXTS = [
    "Who directed the film?",
    "",
    "Zürich, 東京 and Łódź: three cities in one sentence, with a naïve café.",
    "longer than the longest input " * 90,
]


def main():
    model = sentence_transformers.SentenceTransformer(str(minilm_folder()), device="cpu")
    vectors = [[round(float(x), 6) for x in row] for row in model.encode(TEXTS)]
    FILE.write_text(json.dumps({"texts": TEXTS, "vectors": vectors}) + "\n")


if __name__ == "__main__":
    main()
