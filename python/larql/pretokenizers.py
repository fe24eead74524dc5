"""How byte-level BPE vocabularies cut text into words before merging, by the name a GGUF file gives (`pre`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tokenizers import Regex, pre_tokenizers
from tokenizers.pre_tokenizers import ByteLevel, Digits, Punctuation, Sequence, Split

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _splits(*patterns: str) -> Sequence:
    """Cut by each pattern in turn (matches and what lies between them become words), then map bytes to letters."""
    cuts: list[pre_tokenizers.PreTokenizer] = [Split(Regex(pattern), "isolated") for pattern in patterns]
    return Sequence([*cuts, ByteLevel(add_prefix_space=False, use_regex=False)])


def _gpt2() -> ByteLevel:
    return ByteLevel(add_prefix_space=False, use_regex=True)


def _digits_then_gpt2() -> Sequence:
    return Sequence([Digits(individual_digits=True), _gpt2()])


def _deepseek_coder() -> Sequence:
    cjk = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
    return _splits(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", cjk, r"\p{N}")


def _deepseek3() -> Sequence:
    cjk = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
    return _splits(r"\p{N}{1,3}", cjk, _DEEPSEEK3)


def _falcon() -> Sequence:
    """Falcon cuts digits after the mapping to letters: its own tokenizer is written so."""
    threes = Split(Regex("[0-9][0-9][0-9]"), "isolated")
    return Sequence([Punctuation("contiguous"), _gpt2(), Digits(individual_digits=False), threes])


def _default() -> Sequence:
    """What the file format means by "default": the rule of the files written before rules had names."""
    return _splits(r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")


@dataclass(frozen=True)
class PreTokenizer:
    """The rules that hang on a `pre` name."""

    build: Callable[[], pre_tokenizers.PreTokenizer]
    nfc: bool = False  # normalise to NFC first
    ignore_merges: bool = False  # a word that is a token as a whole needs no merges
    add_bos: bool = False  # when the file does not say


_LLAMA_BPE = PreTokenizer(lambda: _splits(_LLAMA3), ignore_merges=True, add_bos=True)
_STARCODER = PreTokenizer(_digits_then_gpt2)

PRE_TOKENIZERS = {
    "command-r": PreTokenizer(_digits_then_gpt2, nfc=True),
    "deepseek-coder": PreTokenizer(_deepseek_coder),
    "deepseek-r1-qwen": PreTokenizer(lambda: _splits(_QWEN2)),
    "deepseek-v3": PreTokenizer(_deepseek3),
    "default": PreTokenizer(_default),
    "falcon": PreTokenizer(_falcon),
    "falcon3": _LLAMA_BPE,
    "gpt-2": PreTokenizer(_gpt2),
    "gpt-4o": PreTokenizer(lambda: _splits(_GPT4O)),
    "llama-bpe": _LLAMA_BPE,
    "llama-v3": _LLAMA_BPE,
    "llama3": _LLAMA_BPE,
    "phi-2": PreTokenizer(_gpt2),
    "qwen2": PreTokenizer(lambda: _splits(_QWEN2), nfc=True),
    "qwen35": PreTokenizer(lambda: _splits(_QWEN35), nfc=True),
    "refact": _STARCODER,
    "smollm": _STARCODER,
    "starcoder": _STARCODER,
    "tekken": PreTokenizer(lambda: _splits(_TEKKEN), ignore_merges=True, add_bos=True),
}
