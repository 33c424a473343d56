"""Random encoders and cross-encoders, written by Transformers as folders on the Hub are."""

import json
from pathlib import Path

import hf_reference

WORDS = "the a who directed film was born in city of rome ann bob and is query passage : ? , ."
SPECIAL = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]  # RoBERTa's order: padding is 1
TEXTS = ["who directed the film ?", "", "ann was born in rome , a city .", "the film " * 40, "zoo"]
BASE = {
    "vocab_size": 40,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 400,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
MODERN = {"cls_token_id": 0, "sep_token_id": 2, "local_attention": 8, "num_hidden_layers": 4}
DECODER = {"num_key_value_heads": 2, "head_dim": 8}
CHANGES = {"modernbert": MODERN, "qwen3": DECODER, "qwen2": DECODER}


def write_json(path: Path, value) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def write_tokenizer(folder: Path, template: str, length: int) -> None:
    """Writes a tokenizer of words; `template` is that of one text."""
    import tokenizers
    import transformers

    vocab = {word: n for n, word in enumerate([*SPECIAL, *WORDS.split()])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = [(word, vocab[word]) for word in ("<s>", "</s>")]
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single=template, pair="<s> $A </s> </s> $B:1 </s>:1", special_tokens=special
    )
    names = {"pad_token": "<pad>", "unk_token": "<unk>", "eos_token": "</s>"}
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=length,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        **names,
    ).save_pretrained(folder)


def write_model(folder: Path, kind: str, head: str = "AutoModel", **changes) -> Path:
    """Writes a random model whose parameters all matter, and its tokenizer."""
    import torch
    import transformers

    torch.set_num_threads(1)
    fields = BASE | CHANGES.get(kind, {}) | changes
    config = transformers.AutoConfig.for_model(kind, **fields)
    model = getattr(transformers, head).from_config(config).float().eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            is_gain = "norm" in name.lower() and name.endswith("weight")
            weight.copy_(1 + 0.3 * noise if is_gain else noise * weight.shape[-1] ** -0.5)
    is_decoder = kind in ("qwen2", "qwen3")
    write_tokenizer(folder, "$A </s>" if is_decoder else "<s> $A </s>", 200)
    return hf_reference.save(model, folder)


def write_sentence_files(folder, pooling, *, dense=False, normalise=True, prompts=None) -> None:
    """Writes the files of sentence-transformers in the form that most folders have."""
    kinds = {"Transformer": "", "Pooling": "1_Pooling"}
    if dense:
        kinds["Dense"] = "2_Dense"
        write_dense(folder / "2_Dense")
    if normalise:
        kinds["Normalize"] = "3_Normalize"
    modules = [
        {"idx": n, "name": str(n), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for n, (kind, path) in enumerate(kinds.items())
    ]
    write_json(folder / "modules.json", modules)
    flags = {"mean": "mean_tokens", "cls": "cls_token", "lasttoken": "lasttoken"}
    modes = {f"pooling_mode_{flag}": name == pooling for name, flag in flags.items()}
    write_json(folder / "1_Pooling/config.json", {"word_embedding_dimension": 32, **modes})
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": 150})
    write_json(folder / "config_sentence_transformers.json", {"prompts": prompts or {}})


def write_dense(folder: Path) -> None:
    import safetensors.torch
    import torch

    generator = torch.Generator().manual_seed(1)
    activation = "torch.nn.modules.activation.Tanh"
    fields = {
        "in_features": 32,
        "out_features": 12,
        "bias": True,
        "activation_function": activation,
    }
    write_json(folder / "config.json", fields)
    shapes = {"linear.weight": (12, 32), "linear.bias": (12,)}
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
