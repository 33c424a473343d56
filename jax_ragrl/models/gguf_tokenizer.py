"""The tokenizer in a GGUF file's metadata, as the files of a Hugging Face folder.

Two kinds are read. Of byte-level BPE (`gpt2`: Qwen, Llama 3, SmolLM2) GGUF stores a vocabulary, its
merges and the name of the rule that splits text before merging; the rules themselves are those of
the published `tokenizer.json` of each family. Of SentencePiece BPE (`llama`: Llama 2, TinyLlama,
Mistral 7B) it stores a score per piece, which gives the order of the merges.
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
# Rules by tokenizer.ggml.pre. Of Qwen, whose tokenizer.json composes Unicode first; of Llama 3,
# where a piece that is a token is not merged from its characters.
COMPOSED = ("qwen2", "deepseek-r1-qwen")
WHOLE_PIECES = ("llama-bpe", "llama3", "llama-v3", "smaug-bpe")
# The pattern of a piece, or None for GPT-2's with each digit on its own.
SPLITS: Mapping[str, str | None] = {
    **dict.fromkeys(COMPOSED, rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}"),
    **dict.fromkeys(WHOLE_PIECES, rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"),
    "smollm": None,
}
SPECIAL = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def build_tokenizer(fields: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer of a file's metadata: values by the names after `tokenizer.ggml.`.

    Raises `UserError` for another kind of tokenizer, an unknown splitting rule or damaged fields.
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
    rule = str(fields.get("pre"))
    if rule not in SPLITS:
        raise UserError(
            f"this GGUF file splits text by the rule {rule!r}, but only {', '.join(SPLITS)} are "
            "supported: give the original folder"
        )
    vocabulary = _vocabulary(fields, types)
    merges = [tuple(merge.split(" ", 1)) for merge in fields["merges"]]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=rule in WHOLE_PIECES))
    tokenizer.pre_tokenizer = _splitter(SPLITS[rule])
    tokenizer.decoder = decoders.ByteLevel()
    if rule in COMPOSED:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _vocabulary(fields: Mapping[str, Any], types: list[int]) -> dict[str, int]:
    """Ids of tokens, but not of those that only pad the vocabulary to the rows of the embedding."""
    pairs = enumerate(zip(fields["tokens"], types, strict=True))
    return {text: number for number, (text, kind) in pairs if kind != UNUSED}


def _sentence_piece(fields: Mapping[str, Any], types: list[int]) -> Tokenizer:
    """SentencePiece BPE, without added tokens, as in the `tokenizer.json` of Llama 2."""
    merges = _merges_by_score(fields["tokens"], fields["scores"], types)
    options = {"unk_token": special_tokens(fields).get("unk_token"), "fuse_unk": True}
    vocabulary = _vocabulary(fields, types)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, **options, byte_fallback=True))
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
    """The merges that pieces with scores imply, best first: the highest score is formed first."""
    # Control tokens and bytes are never merged from text.
    rows = zip(tokens, scores, types, strict=True)
    pieces = {token: score for token, score, kind in rows if kind == NORMAL}
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
    single = [*first, "$A", *last]
    second = [f"{text}:1" for text in [*first, "$B", *last]]
    return processors.TemplateProcessing(single=single, pair=single + second, special_tokens=ids)


def begins_with_token(fields: Mapping[str, Any]) -> bool:
    """Whether a text begins with a token; llama.cpp's default depends on the kind."""
    default = fields.get("model") == SENTENCE_PIECE and fields.get("bos_token_id") is not None
    return bool(fields.get("add_bos_token", default))


def special_tokens(fields: Mapping[str, Any]) -> dict[str, str]:
    """The texts of the begin, end, unknown and padding tokens that the file names."""
    ids = {name: fields.get(key) for name, key in SPECIAL.items()}
    return {name: fields["tokens"][number] for name, number in ids.items() if number is not None}


def tokenizer_config(fields: Mapping[str, Any], template: str | None, length: int) -> dict:
    """The fields of `tokenizer_config.json`; `template` is in Jinja, `length` of the context."""
    config: dict[str, Any] = {
        **special_tokens(fields),
        "add_bos_token": begins_with_token(fields),
        "add_eos_token": bool(fields.get("add_eos_token")),
        "clean_up_tokenization_spaces": False,
        "model_max_length": length,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    return config | ({"chat_template": template} if template else {})
