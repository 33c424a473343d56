"""Makes `tiny_bert/`: a random BERT of 2 layers as a sentence-transformers folder, and its vectors.

Run once with torch installed: `python tests/models/make_tiny_bert.py`. The vectors in
`expected.json` come from `transformers.BertModel` with mean pooling and normalization.
"""

import json
import pathlib

import torch
import transformers

FOLDER = pathlib.Path(__file__).parent / "tiny_bert"
WORDS = "the a who directed film was born in city of rome ann bob and is ##s ##ed . ? , 1 9 7 0"
TEXTS = ["who directed the film?", "", "Ann was born in Rome, a city.", "the film " * 40, "unknown"]


def write_json(name, value):
    path = FOLDER / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1) + "\n")


def make_tokenizer():
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS.split()]
    tokenizer = transformers.BertTokenizer(vocab={name: n for n, name in enumerate(names)})
    tokenizer.save_pretrained(FOLDER)
    return tokenizer


def expected(model, tokenizer):
    rows = []
    for text in TEXTS:
        batch = tokenizer(text, truncation=True, max_length=24, return_tensors="pt")
        with torch.no_grad():
            hidden = model(**batch).last_hidden_state[0]
        rows.append(torch.nn.functional.normalize(hidden.mean(0), dim=0).tolist())
    return {"texts": TEXTS, "vectors": [[round(x, 7) for x in row] for row in rows]}


def main():
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    config = transformers.BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=32,
        initializer_range=0.5,
    )
    model = transformers.BertModel(config).eval()
    model.save_pretrained(FOLDER)
    kinds = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    modules = [{"path": path, "type": f"models.{kind}"} for kind, path in kinds.items()]
    write_json("modules.json", modules)
    write_json("1_Pooling/config.json", {"pooling_mode_mean_tokens": True})
    write_json("sentence_bert_config.json", {"max_seq_length": 24})
    write_json("expected.json", expected(model, tokenizer))


if __name__ == "__main__":
    main()
