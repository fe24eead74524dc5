"""Text to token ids and back, with a tokenizer built from a GGUF file's own metadata, or a saved one."""

from __future__ import annotations

import codecs
import operator
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import AddedToken, decoders, models, normalizers

from larql.errors import InputError, ModelError
from larql.pretokenizers import PRE_TOKENIZERS
from larql.spm_merges import used_merges

_KEY = "tokenizer.ggml."
_SPACE = "\u2581"  # stands for a space inside the pieces of a SentencePiece vocabulary
_LONGEST_PIECE = 1000  # characters; real ones have fewer than 100, and finding merges takes the square of it
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")

# A turn ends with a control token of one of these texts, whatever the file calls its end token.
_TURN_ENDS = frozenset(
    {
        "<end_of_turn>",
        "<|end_of_turn|>",
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<|end|>",
        "<|EOT|>",
        "<EOT>",
        "<eos>",
        "</s>",
        "<end_of_utterance>",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
    }
)


class TokenType(IntEnum):
    """The kinds of token in `tokenizer.ggml.token_type`."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def _byte_letters() -> dict[str, int]:
    """The letter that byte-level vocabularies write for each byte: itself if printable, else one from U+0100 up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_LETTER = _byte_letters()


@dataclass(frozen=True)
class TokenizerFacts:
    """What a tokenizer.json does not say."""

    model: str  # this and the next are GGUF's names for the rules
    pre: str | None
    vocab_size: int
    bos_id: int | None
    eos_id: int | None
    add_bos: bool
    end_ids: tuple[int, ...]  # generation stops at any of these
    space_prefix: bool  # text, and text after an added token, is encoded with a space before it

    def __post_init__(self) -> None:
        named = [token_id for token_id in (self.bos_id, self.eos_id) if token_id is not None]
        if any(not 0 <= token_id < self.vocab_size for token_id in (*named, *self.end_ids)):
            raise ValueError("a token id is not in the vocabulary")


class Tokenizer:
    """A vocabulary with its rules. It never changes, so threads can share it.

    `hf` is the `tokenizers` object behind it: `hf.to_str()` is a complete tokenizer.json. It is set to read control
    tokens as plain text; `encode` cuts the text at them itself, so that one object serves both ways.
    """

    def __init__(self, hf: tokenizers.Tokenizer, facts: TokenizerFacts) -> None:
        self.hf = hf
        self.facts = facts
        self.bos_id = facts.bos_id
        self.add_bos = facts.add_bos
        self.end_ids = frozenset(facts.end_ids)
        self.space_prefix = facts.space_prefix
        self.vocab_size = facts.vocab_size
        hf.encode_special_tokens = True
        self._byte_level = isinstance(hf.decoder, decoders.ByteLevel)
        added = hf.get_added_tokens_decoder()
        self._added = {token_id: token.content for token_id, token in added.items()}
        self._controls = _Controls({token.content: token_id for token_id, token in added.items() if token.special})

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """Builds the tokenizer that a GGUF file describes, from its metadata by GGUF key.

        Raises ModelError naming the key that is missing, malformed or not supported.
        """
        model = _text(metadata, "model")
        tokens = _tokens(metadata)
        types = _types(metadata, len(tokens))
        if model == "llama":
            # SentencePiece matches user-defined pieces after spaces became marks; here they match the text itself.
            for i in np.flatnonzero(types == TokenType.USER_DEFINED).tolist():
                tokens[i] = tokens[i].replace(_SPACE, " ")
        elif model != "gpt2":
            raise ModelError(f'{_KEY}model: "{model}" is not supported; supported: gpt2, llama')

        vocab = _vocab(tokens)
        ids = {name: _token_id(metadata, name, len(tokens)) for name in ("bos", "eos", "eot", "eom", "unknown")}
        if model == "llama":
            for name, default in (("unknown", 0), ("bos", 1), ("eos", 2)):
                if ids[name] is None and default < len(tokens):
                    ids[name] = default
            space_prefix = _flag(metadata, "add_space_prefix", True)
            add_bos = _flag(metadata, "add_bos_token", True)
            hf = _build_spm(metadata, tokens, types, vocab, ids["unknown"], space_prefix)
        else:
            pre = _text(metadata, "pre")
            if pre not in PRE_TOKENIZERS:
                raise ModelError(f'{_KEY}pre: "{pre}" is not supported; supported: {", ".join(PRE_TOKENIZERS)}')
            space_prefix = False
            add_bos = _flag(metadata, "add_bos_token", PRE_TOKENIZERS[pre].add_bos)
            hf = _build_byte_level(metadata, vocab, pre)
        if add_bos and ids["bos"] is None:
            raise ModelError(f"{_KEY}bos_token_id is missing, but a BOS token is to be added")

        for kinds, special in (((TokenType.CONTROL, TokenType.UNKNOWN), True), ((TokenType.USER_DEFINED,), False)):
            texts = [tokens[i] for i in np.flatnonzero(np.isin(types, kinds)).tolist()]
            hf.add_tokens([AddedToken(text, special=special, normalized=False) for text in texts])
        end_ids = {token_id for name in ("eos", "eot", "eom") if (token_id := ids[name]) is not None}
        end_ids |= {vocab[text] for text in _TURN_ENDS & vocab.keys() if _ends_turn(text, types[vocab[text]])}
        facts = TokenizerFacts(
            model=model,
            pre=_text(metadata, "pre") if _KEY + "pre" in metadata else None,
            vocab_size=len(tokens),
            bos_id=ids["bos"],
            eos_id=ids["eos"],
            add_bos=add_bos,
            end_ids=tuple(sorted(end_ids)),
            space_prefix=space_prefix,
        )
        return cls(hf, facts)

    @classmethod
    def from_json(cls, data: bytes, facts: TokenizerFacts) -> Tokenizer:
        """Reads a tokenizer.json. Raises ModelError when it cannot be used."""
        try:
            hf = tokenizers.Tokenizer.from_buffer(data)
        except BaseException as error:  # a panic of the package is no Exception
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            raise ModelError(f"the tokenizer cannot be read: {error}") from error
        # Without added tokens, which have ids of the vocabulary: counting them makes a copy of it.
        size = hf.get_vocab_size(with_added_tokens=False)
        if size != facts.vocab_size:
            raise ModelError(f"the tokenizer has {size} tokens where {facts.vocab_size} are expected")
        return cls(hf, facts)

    def encode(
        self, text: str, *, bos: bool | None = None, special: bool = True, literal: str | None = None
    ) -> list[int]:
        """The ids of `text`. `bos` puts one BOS token in front (None: as the model wants), unless it is there already.

        `special` turns the text of control tokens into these tokens; without it that text is encoded like any other.
        User-defined tokens match always. Bytes that a byte-level vocabulary lacks are left out, as the models expect.
        `literal` is a mark of `break_controls`.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            char = text[error.start]
            raise InputError(f"the text has a lone surrogate U+{ord(char):04X} at position {error.start}") from None
        wants_bos = self.add_bos if bos is None else bos
        if wants_bos and self.bos_id is None:
            raise InputError("bos=True, but the model has no BOS token")

        ids: list[int] = []
        for part in self._controls.cut(text) if special else [text]:
            if isinstance(part, int):
                ids.append(part)
                continue
            plain = part.replace(literal, "") if literal else part
            ids += self.hf.encode(plain, add_special_tokens=False).ids
        if wants_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def break_controls(self, text: str, literal: str) -> str:
        """The text with a mark inside that of control tokens; `encode` with the same mark reads it as plain text."""
        parts = self._controls.cut(text)
        if len(parts) == 1 and isinstance(parts[0], str):
            return text
        texts = [part if isinstance(part, str) else self._added[part] for part in parts]
        return "".join(
            text if isinstance(part, str) else text[0] + literal + text[1:]
            for part, text in zip(parts, texts, strict=True)
        )

    def is_control_text(self, text: str) -> bool:
        """Whether a control token has this text."""
        return text in self._controls.ids

    def decode(self, ids: Iterable[int], *, special: bool = True, continued: bool = False) -> str:
        """The text of `ids`; bytes that are not UTF-8 become U+FFFD. `special` keeps the text of control tokens.

        A model that encodes text with a space before it gets that space removed, except where `continued` says that
        the ids go on after earlier text, as generated ones do.
        """
        decoder = self.stream(special=special, continued=continued)
        return "".join([*map(decoder.push, ids), decoder.flush()])

    def stream(self, *, special: bool = True, continued: bool = False) -> StreamDecoder:
        """A decoder that takes ids one by one; options as in `decode`."""
        return StreamDecoder(self, special=special, continued=continued)

    def token_text(self, token_id: int) -> str:
        """The token as the vocabulary writes it. Raises InputError for an id that is not in the vocabulary."""
        token_id = operator.index(token_id)
        text = self.hf.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None
        if text is None:
            raise InputError(f"token id {token_id} is not in the vocabulary (0 to {self.vocab_size - 1})")
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that the token adds to a text; often not UTF-8 by themselves."""
        text = self.token_text(token_id)
        if self.is_added(token_id):
            return text.encode()
        if self._byte_level:
            try:
                return bytes([_BYTE_OF_LETTER[letter] for letter in text])
            except KeyError:
                return text.encode()
        byte = _BYTE_PIECE.fullmatch(text)
        return bytes([int(byte[1], 16)]) if byte else text.replace(_SPACE, " ").encode()

    def is_added(self, token_id: int) -> bool:
        """True for control and user-defined tokens."""
        return token_id in self._added

    def is_control(self, token_id: int) -> bool:
        """True for control tokens: turn marks, BOS, padding, the unknown token and the like."""
        return self._added.get(token_id) in self._controls.ids


class StreamDecoder:
    """Decodes ids one by one: what `push` and a last `flush` return joins to `Tokenizer.decode` of all ids.

    Bytes of a character that is not complete yet are held back.
    """

    def __init__(self, tokenizer: Tokenizer, *, special: bool, continued: bool) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._drop_space = tokenizer.space_prefix and not continued
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes."""
        tokenizer = self._tokenizer
        data = tokenizer.token_bytes(token_id)
        if tokenizer.is_added(token_id):
            self._drop_space = tokenizer.space_prefix
            if not self._special and tokenizer.is_control(token_id):
                return ""
        elif self._drop_space:
            self._drop_space = False
            data = data.removeprefix(b" ")
        return self._utf8.decode(data)

    def flush(self) -> str:
        """The end: U+FFFD for each piece of an incomplete character."""
        return self._utf8.decode(b"", final=True)


class _Controls:
    """Finds control tokens in a text, the longest where several start."""

    def __init__(self, ids: dict[str, int]) -> None:
        self.ids = ids
        lengths: dict[str, set[int]] = {}
        for text in filter(None, ids):
            lengths.setdefault(text[0], set()).add(len(text))
        self._lengths = {first: sorted(found, reverse=True) for first, found in lengths.items()}
        self._first = re.compile("|".join(map(re.escape, lengths)) or r"(?!)")

    def cut(self, text: str) -> list[str | int]:
        """The text in order: control tokens as ids, what lies between them (never empty) as text."""
        parts: list[str | int] = []
        start = 0
        for match in self._first.finditer(text):
            at = match.start()
            if at < start:
                continue
            for length in self._lengths[match[0]]:
                token_id = self.ids.get(text[at : at + length])
                if token_id is not None:
                    if at > start:
                        parts.append(text[start:at])
                    parts.append(token_id)
                    start = at + length
                    break
        if start < len(text):
            parts.append(text[start:])
        return parts


def _ends_turn(text: str, kind: int) -> bool:
    """Only control tokens end a turn, or user-defined ones with a text that is nothing else ("</s>" is also HTML)."""
    return kind == TokenType.CONTROL or (kind == TokenType.USER_DEFINED and text != "</s>")


def _build_spm(
    metadata: Mapping[str, Any],
    tokens: list[str],
    types: NDArray[np.int64],
    vocab: dict[str, int],
    unknown_id: int | None,
    space_prefix: bool,
) -> tokenizers.Tokenizer:
    """SentencePiece BPE: of all neighbours that join to a piece, the pair whose piece scores best goes first."""
    if _flag(metadata, "remove_extra_whitespaces", False):
        raise ModelError(f"{_KEY}remove_extra_whitespaces = true is not supported")
    scores = _numbers(metadata, "scores", len(tokens), np.float64)
    if np.isnan(scores).any():
        raise ModelError(f"{_KEY}scores has a value that is not a number")

    # Control, user-defined, byte and unknown tokens are never made by merging.
    mergeable = np.isin(types, (TokenType.UNDEFINED, TokenType.NORMAL, TokenType.UNUSED))
    order = np.argsort(-scores, kind="stable")
    ranked = [tokens[i] for i in order[mergeable[order]].tolist()]
    if max(map(len, ranked), default=0) > _LONGEST_PIECE:
        raise ModelError(f"{_KEY}tokens has a piece of more than {_LONGEST_PIECE} characters")
    unknown = None if unknown_id is None else tokens[unknown_id]
    hf = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=used_merges(ranked), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    marks = normalizers.Replace(" ", _SPACE)
    spaces = decoders.Replace(_SPACE, " ")
    if space_prefix:
        hf.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), marks])
        strip = decoders.Strip(content=" ", left=1, right=0)
        hf.decoder = decoders.Sequence([spaces, decoders.ByteFallback(), decoders.Fuse(), strip])
    else:
        hf.normalizer = marks
        hf.decoder = decoders.Sequence([spaces, decoders.ByteFallback(), decoders.Fuse()])
    return hf


def _build_byte_level(metadata: Mapping[str, Any], vocab: dict[str, int], pre: str) -> tokenizers.Tokenizer:
    """Byte-level BPE: merges come with the file, in order; `pre` names how text is cut into words."""
    rules = PRE_TOKENIZERS[pre]
    merges: list[tuple[str, str]] = []
    for i, merge in enumerate(_strings(metadata, "merges")):
        left, _, right = merge.partition(" ")
        if left not in vocab or right not in vocab or left + right not in vocab:
            raise ModelError(f'{_KEY}merges: entry {i}, "{merge}", is not two tokens that join to a token')
        merges.append((left, right))
    hf = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=rules.ignore_merges))
    if rules.nfc:
        hf.normalizer = normalizers.NFC()
    hf.pre_tokenizer = rules.build()
    hf.decoder = decoders.ByteLevel()
    return hf


def _value(metadata: Mapping[str, Any], name: str) -> Any:
    if _KEY + name not in metadata:
        raise ModelError(f"{_KEY}{name} is missing")
    return metadata[_KEY + name]


def _text(metadata: Mapping[str, Any], name: str) -> str:
    value = _value(metadata, name)
    if not isinstance(value, str):
        raise ModelError(f"{_KEY}{name} is not a string")
    return value


def _strings(metadata: Mapping[str, Any], name: str) -> list[str]:
    value = _value(metadata, name)
    if not isinstance(value, list) or not set(map(type, value)) <= {str}:
        raise ModelError(f"{_KEY}{name} is not an array of strings")
    return value


def _tokens(metadata: Mapping[str, Any]) -> list[str]:
    """A copy of the token texts, in id order; at least one."""
    tokens = _strings(metadata, "tokens").copy()
    if not tokens:
        raise ModelError(f"{_KEY}tokens is empty")
    return tokens


def _vocab(tokens: list[str]) -> dict[str, int]:
    """Text to id. Raises ModelError for a text that is there twice."""
    vocab = {text: token_id for token_id, text in enumerate(tokens)}
    if len(vocab) != len(tokens):
        first = next(i for i, text in enumerate(tokens) if vocab[text] != i)
        raise ModelError(f'{_KEY}tokens: "{tokens[first]}" has the ids {first} and {vocab[tokens[first]]}')
    return vocab


def _numbers(metadata: Mapping[str, Any], name: str, count: int, dtype: type[np.generic]) -> NDArray[Any]:
    """An array of `count` numbers, one per token."""
    try:
        numbers = np.asarray(_value(metadata, name)).astype(dtype, casting="same_kind")
    except (TypeError, ValueError):
        raise ModelError(f"{_KEY}{name} is not an array of numbers of the right kind") from None
    if numbers.shape != (count,):
        raise ModelError(f"{_KEY}{name} has {numbers.size} entries for {count} tokens")
    return numbers


def _types(metadata: Mapping[str, Any], count: int) -> NDArray[np.int64]:
    """The kind of each token; all normal when the file does not say."""
    if _KEY + "token_type" not in metadata:
        return np.full(count, TokenType.NORMAL, np.int64)
    types = _numbers(metadata, "token_type", count, np.int64)
    if types.min() < 0 or types.max() > max(TokenType):
        raise ModelError(f"{_KEY}token_type has a value outside 0 to {max(TokenType)}")
    return types


def _token_id(metadata: Mapping[str, Any], name: str, count: int) -> int | None:
    """The id under `name`_token_id, or None when the file does not say."""
    key = f"{_KEY}{name}_token_id"
    if metadata.get(key) is None:
        return None
    try:
        token_id = operator.index(metadata[key])
    except TypeError:
        raise ModelError(f"{key} is not an integer") from None
    if not 0 <= token_id < count:
        raise ModelError(f"{key} is {token_id}, but the vocabulary has {count} tokens")
    return token_id


def _flag(metadata: Mapping[str, Any], name: str, default: bool) -> bool:
    value = metadata.get(_KEY + name, default)
    if not isinstance(value, bool | np.bool_):
        raise ModelError(f"{_KEY}{name} is not true or false")
    return bool(value)
