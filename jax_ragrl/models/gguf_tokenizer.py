"""The tokenizer in a GGUF file's metadata, as the files of a Hugging Face folder.

Two kinds are read (`tokenizer.ggml.model`). Byte-level BPE (`gpt2`: Qwen, Llama 3, SmolLM2): GGUF
stores a vocabulary, its merges and the name of the rule that splits text before merging
(`tokenizer.ggml.pre`), not the rule. The rules are taken from the published `tokenizer.json` of
each family. SentencePiece BPE (`llama`: Llama 2, TinyLlama, Mistral 7B): GGUF stores a score per
piece and no merges. SentencePiece merges the neighbors whose union has the highest score, so the
scores are the order of the merges.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from jax_ragrl.errors import UserError

# Of tokenizer.ggml.token_type.
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
BYTE_LEVEL, SENTENCE_PIECE = "gpt2", "llama"
MAX_PIECE = 1024  # characters; the work for a piece grows with their square
SPACE = "\u2581"  # SentencePiece's spelling of a space

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
# By tokenizer.ggml.pre: the pattern of a piece, or None for GPT-2's with each digit on its own.
SPLITS: Mapping[str, str | None] = {
    "qwen2": rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}",
    "deepseek-r1-qwen": rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}",
    "llama-bpe": rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}",
    "llama3": rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}",
    "llama-v3": rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}",
    "smaug-bpe": rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}",
    "smollm": None,
}
# Unicode is composed first, as in Qwen's tokenizer.json.
COMPOSED = ("qwen2", "deepseek-r1-qwen")
# A piece that is a token is not merged from its characters, as in Llama 3's tokenizer.json.
WHOLE_PIECES = ("llama-bpe", "llama3", "llama-v3", "smaug-bpe")
SPECIAL = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def build_tokenizer(fields: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer of a file's metadata.

    Args:
      fields: values by the names that follow `tokenizer.ggml.` in the file.

    Raises:
      UserError: another kind of tokenizer, an unknown splitting rule, or damaged fields.
    """
    kinds = {BYTE_LEVEL: _byte_level, SENTENCE_PIECE: _sentence_piece}
    if (model := str(fields.get("model"))) not in kinds:
        raise UserError(
            f"this GGUF file has a tokenizer of kind {model!r}, but only byte-level BPE ('gpt2': "
            "Qwen, Llama 3, SmolLM2) and SentencePiece BPE ('llama': Llama 2, TinyLlama) are "
            "supported: give the original folder"
        )
    try:
        types = fields.get("token_type") or [NORMAL] * len(fields["tokens"])
        tokenizer = kinds[model](fields, types)
        for kind, special in ((CONTROL, True), (USER_DEFINED, False)):
            texts = [text for text, t in zip(fields["tokens"], types, strict=True) if t == kind]
            added = [AddedToken(text, special=special, normalized=False) for text in texts]
            (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)
        tokenizer.post_processor = _ends(fields)
        return tokenizer
    except UserError:
        raise
    except Exception as error:  # the package tokenizers raises no other class
        raise UserError(
            f"the tokenizer of this GGUF file is damaged ({type(error).__name__}: {error}): "
            "download it again"
        ) from error


def _byte_level(fields: Mapping[str, Any], types: list[int]) -> Tokenizer:
    """Byte-level BPE, without added tokens."""
    rule = str(fields.get("pre"))
    if rule not in SPLITS:
        raise UserError(
            f"this GGUF file splits text by the rule {rule!r}, but only {', '.join(SPLITS)} are "
            "supported: give the original folder"
        )
    # Tokens that only pad the vocabulary to the rows of the embedding are left out.
    pairs = enumerate(zip(fields["tokens"], types, strict=True))
    vocabulary = {text: number for number, (text, kind) in pairs if kind != UNUSED}
    merges = [tuple(merge.split(" ", 1)) for merge in fields["merges"]]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=rule in WHOLE_PIECES))
    tokenizer.pre_tokenizer = _splitter(SPLITS[rule])
    tokenizer.decoder = decoders.ByteLevel()
    if rule in COMPOSED:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _sentence_piece(fields: Mapping[str, Any], types: list[int]) -> Tokenizer:
    """SentencePiece BPE, without added tokens, as in the `tokenizer.json` of Llama 2."""
    pairs = enumerate(zip(fields["tokens"], types, strict=True))
    vocabulary = {text: number for number, (text, kind) in pairs if kind != UNUSED}
    unknown = special_tokens(fields).get("unk_token")
    tokenizer = Tokenizer(
        models.BPE(
            vocabulary,
            _merges_by_score(fields["tokens"], fields["scores"], types),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    normalizer: list[normalizers.Normalizer] = [normalizers.Replace(" ", SPACE)]
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    # A space is added before a text and removed after decoding, unless the file says otherwise.
    if fields.get("add_space_prefix", True):
        normalizer.insert(0, normalizers.Prepend(SPACE))
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(normalizer)
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _merges_by_score(
    tokens: Sequence[str], scores: Sequence[float], types: Sequence[int]
) -> list[tuple[str, str]]:
    """The merges that a vocabulary with scores implies, best first.

    Args:
      tokens: the pieces.
      scores: the score of each piece; SentencePiece forms the piece of the highest score first.
      types: the type of each piece. Control tokens and bytes are never merged from text.
    """
    pieces = {
        token: score
        for token, score, kind in zip(tokens, scores, types, strict=True)
        if kind == NORMAL
    }
    if (longest := max(map(len, pieces), default=0)) > MAX_PIECE:
        raise ValueError(f"a piece has {longest} characters")
    merges = [
        (score, len(token[:cut]), token[:cut], token[cut:])
        for token, score in pieces.items()
        for cut in range(1, len(token))
        if token[:cut] in pieces and token[cut:] in pieces
    ]
    merges.sort(key=lambda merge: (-merge[0], merge[1]))
    return [merge[2:] for merge in merges]


def _splitter(pattern: str | None) -> pre_tokenizers.PreTokenizer:
    if pattern is None:
        digits = pre_tokenizers.Digits(individual_digits=True)
        bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        return pre_tokenizers.Sequence([digits, bytes_])
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([split, bytes_])


def _ends(fields: Mapping[str, Any]) -> processors.PostProcessor:
    """Tokens put before and after a text if special tokens are asked for."""
    names = special_tokens(fields)
    first = [names["bos_token"]] if begins_with_token(fields) else []
    last = [names["eos_token"]] if fields.get("add_eos_token") else []
    if not first + last:
        # No tokens are added; of this processor, byte-level BPE needs the offsets.
        return processors.ByteLevel(trim_offsets=False)
    ids = [(text, fields["tokens"].index(text)) for text in first + last]
    return processors.TemplateProcessing(
        single=[*first, "$A", *last],
        pair=[*first, "$A", *last, *(f"{text}:1" for text in first), "$B:1"]
        + [f"{text}:1" for text in last],
        special_tokens=ids,
    )


def begins_with_token(fields: Mapping[str, Any]) -> bool:
    """Whether a text begins with a token; llama.cpp's default depends on the kind."""
    default = fields.get("model") == SENTENCE_PIECE and fields.get("bos_token_id") is not None
    return bool(fields.get("add_bos_token", default))


def special_tokens(fields: Mapping[str, Any]) -> dict[str, str]:
    """The texts of the begin, end, unknown and padding tokens that the file names."""
    ids = {name: fields.get(key) for name, key in SPECIAL.items()}
    return {name: fields["tokens"][number] for name, number in ids.items() if number is not None}


def tokenizer_config(fields: Mapping[str, Any], template: str | None, length: int) -> dict:
    """The fields of `tokenizer_config.json`.

    Args:
      fields: as in `build_tokenizer`.
      template: the chat template, in Jinja, if the file has one.
      length: tokens in the model's context.
    """
    config: dict[str, Any] = {
        **special_tokens(fields),
        "add_bos_token": begins_with_token(fields),
        "add_eos_token": bool(fields.get("add_eos_token")),
        "clean_up_tokenization_spaces": False,
        "model_max_length": length,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    return config | ({"chat_template": template} if template else {})
