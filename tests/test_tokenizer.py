"""The tokenizers built from GGUF metadata, against the official ones and against the rules written out plainly."""

from __future__ import annotations

import itertools
import json
import lzma
import random
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import models

from larql.errors import InputError, ModelError
from larql.pretokenizers import PRE_TOKENIZERS
from larql.spm_merges import used_merges
from larql.tokenizer import Tokenizer, TokenType

GOLDEN = Path(__file__).parent / "golden" / "tokenizer"
KEY = "tokenizer.ggml."
# The letter that a byte-level vocabulary writes for a byte.
LETTERS = {byte: chr(byte) for byte in [*range(33, 127), *range(161, 173), *range(174, 256)]}
LETTERS |= {byte: chr(256 + i) for i, byte in enumerate(byte for byte in range(256) if byte not in LETTERS)}


def read_metadata(path: Path) -> dict[str, Any]:
    from larql import _core

    return _core.Gguf(path).metadata()


@pytest.fixture(scope="module")
def gemma_metadata(gemma_path: Path) -> dict[str, Any]:
    return read_metadata(gemma_path)


@pytest.fixture(scope="module")
def gemma(gemma_metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_metadata(gemma_metadata)


@pytest.fixture(scope="module")
def smollm(smollm_path: Path) -> Tokenizer:
    return Tokenizer.from_metadata(read_metadata(smollm_path))


@pytest.fixture(scope="module")
def qwen(qwen05_path: Path) -> Tokenizer:
    return Tokenizer.from_metadata(read_metadata(qwen05_path))


@pytest.fixture(scope="module")
def llama3_json() -> str:
    with lzma.open(GOLDEN / "llama3_1.tokenizer.json.xz", "rt", encoding="utf-8") as file:
        return file.read()


@pytest.fixture(scope="module")
def llama3(llama3_json: str) -> Tokenizer:
    """From the metadata that a GGUF file of Llama 3.1 has."""
    official = json.loads(llama3_json)
    vocab: dict[str, int] = official["model"]["vocab"]
    controls = {token["content"]: token["id"] for token in official["added_tokens"]}
    tokens = sorted(vocab | controls, key=(vocab | controls).__getitem__)
    return Tokenizer.from_metadata(
        {
            KEY + "model": "gpt2",
            KEY + "pre": "llama-bpe",
            KEY + "tokens": tokens,
            KEY + "token_type": np.array([3 if token in controls else 1 for token in tokens], np.int32),
            KEY + "merges": official["model"]["merges"],
            KEY + "bos_token_id": 128000,
            KEY + "eos_token_id": 128009,
        }
    )


@pytest.fixture(scope="module", params=["gemma", "smollm", "qwen", "llama3"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    found: Tokenizer = request.getfixturevalue(request.param)
    return found


def spm_metadata(**changes: Any) -> dict[str, Any]:
    """A small SentencePiece vocabulary: bytes, letters, and "hello" with and without a space."""
    pieces = ["he", "ll", "hell", "lo", "hello", "\u2581hello", "\u2581", "h", "e", "l", "o", "<tag>", "</s>b"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    types = [2, 3, 3, *[6] * 256, *[1] * 11, 4, 1]
    scores = [0.0] * 259 + [-float(i) for i in range(len(pieces))]
    return _changed({"model": "llama", "tokens": tokens, "scores": scores, "token_type": types}, changes)


def bpe_metadata(pre: str = "gpt-2", **changes: Any) -> dict[str, Any]:
    """A small byte-level vocabulary: every byte, "ab", "abc" (which no merge makes), a control token."""
    tokens = [*LETTERS.values(), "ab", "abc", "<|im_end|>"]
    types = [1] * 258 + [3]
    return _changed({"model": "gpt2", "pre": pre, "tokens": tokens, "token_type": types, "merges": ["a b"]}, changes)


def _changed(metadata: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    merged = {KEY + name: value for name, value in (metadata | changes).items()}
    return {name: value for name, value in merged.items() if value is not None}


def random_texts(count: int, seed: int) -> list[str]:
    """Texts of one to four kinds of character each: ASCII with controls, spaces, words, scripts, emoji, any plane."""
    rng = random.Random(seed)
    words = [" the", "hello", " def ", "tion", "<|im_end|>", "<bos>", "<start_of_turn>", "<|eot_id|>", "</s>", "<b>"]
    words += ["    ", "\n\n", "\r\n", "====", "\u2581", "<0x0A>", "e\u0301", "12345", "'RE"]
    kinds = [
        lambda: chr(rng.randrange(0x80)),
        lambda: rng.choice(" \n\t "),
        lambda: rng.choice(words),
        lambda: chr(rng.randrange(0x80, 0x3000)),
        lambda: chr(rng.randrange(0x3000, 0xD800)),
        lambda: chr(rng.randrange(0xE000, 0x110000)),
        lambda: rng.choice([chr(rng.randrange(0x1F300, 0x1FA00)), "\u200d", "\ufe0f"]),
    ]
    texts = []
    for _ in range(count):
        chosen = rng.sample(kinds, rng.randint(1, 4))
        texts.append("".join(rng.choice(chosen)() for _ in range(rng.randint(0, 40))))
    return texts


def normalised(tokenizer: Tokenizer, text: str) -> str:
    """`text` as the vocabulary can hold it."""
    if tokenizer.hf.token_to_id("<0x00>") is not None:
        return text.replace("\u2581", " ")
    missing = {byte for byte, letter in LETTERS.items() if tokenizer.hf.token_to_id(letter) is None}
    text = "".join(char for char in text if not missing & set(char.encode()))
    return text if tokenizer.hf.normalizer is None else str(tokenizer.hf.normalizer.normalize_str(text))


# Against the official tokenizers


@pytest.mark.parametrize(("name", "golden"), [("gemma", "gemma3"), ("qwen", "qwen3"), ("llama3", "llama3_1")])
def test_official_ids(name: str, golden: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(name)
    for row in json.loads((GOLDEN / f"{golden}.json").read_text(encoding="utf-8"))["rows"]:
        assert tokenizer.encode(row["text"], bos=False) == row["ids"], row["text"]
        assert tokenizer.decode(row["ids"]) == row["decoded"]


def test_llama3_random_texts(llama3: Tokenizer, llama3_json: str) -> None:
    official = tokenizers.Tokenizer.from_str(llama3_json)
    for text in random_texts(2000, seed=1):
        ids = official.encode(text, add_special_tokens=False).ids
        assert llama3.encode(text, bos=False) == ids, text
        assert llama3.decode(ids) == official.decode(ids, skip_special_tokens=False)


def test_gemma_random_texts(gemma: Tokenizer, gemma_metadata: dict[str, Any]) -> None:
    """The rule written out: cut at user-defined pieces, then join the best-scoring neighbours, leftmost first."""
    tokens = gemma_metadata[KEY + "tokens"]
    types = gemma_metadata[KEY + "token_type"].tolist()
    scores = dict(zip(tokens, gemma_metadata[KEY + "scores"].tolist(), strict=True))
    ids = {token: i for i, token in enumerate(tokens)}
    normal = {token for token, kind in zip(tokens, types, strict=True) if kind == TokenType.NORMAL}
    user = [token for token, kind in zip(tokens, types, strict=True) if kind == TokenType.USER_DEFINED]
    user_defined = re.compile("(" + "|".join(map(re.escape, sorted(user, key=len, reverse=True))) + ")")

    def merged(part: str) -> list[int]:
        symbols = list(part.replace(" ", "\u2581"))
        while True:
            pairs = [left + right for left, right in itertools.pairwise(symbols)]
            known = [i for i, pair in enumerate(pairs) if pair in normal]
            if not known:
                break
            best = max(known, key=lambda i: (scores[pairs[i]], -i))
            symbols[best : best + 2] = [pairs[best]]
        found: list[int] = []
        for symbol in symbols:
            found += [ids[symbol]] if symbol in normal else [ids[f"<0x{byte:02X}>"] for byte in symbol.encode()]
        return found

    for text in random_texts(1000, seed=2):
        expected: list[int] = []
        for i, part in enumerate(user_defined.split(text)):
            expected += [ids[part]] if i % 2 else merged(part)
        assert gemma.encode(text, bos=False, special=False) == expected, text


# There and back


def test_round_trip(tokenizer: Tokenizer) -> None:
    fixed = ["", " ", "  ", "\n", " a", "a ", "\x00", "\x00\x7f", "\u200b", "\U0001f469\u200d\U0001f467", "\ufffd"]
    for text in fixed + random_texts(1500, seed=3):
        text = normalised(tokenizer, text)
        for special in (True, False):
            assert tokenizer.decode(tokenizer.encode(text, bos=False, special=special)) == text


def test_decode_as_hf(tokenizer: Tokenizer) -> None:
    for text in random_texts(500, seed=4):
        ids = tokenizer.encode(text, bos=False)
        assert tokenizer.decode(ids) == tokenizer.hf.decode(ids, skip_special_tokens=False)
        assert tokenizer.decode(ids, special=False) == tokenizer.hf.decode(ids, skip_special_tokens=True)


def test_stream_joins_to_decode(tokenizer: Tokenizer) -> None:
    """Random ids are full of broken characters."""
    rng = random.Random(5)
    byte_ids = [i for i in range(tokenizer.vocab_size) if len(tokenizer.token_bytes(i)) == 1]
    for _ in range(500):
        ids = [rng.choice(byte_ids) if rng.random() < 0.7 else rng.randrange(tokenizer.vocab_size) for _ in range(20)]
        for special in (True, False):
            stream = tokenizer.stream(special=special)
            pieces = [stream.push(i) for i in ids]
            assert "".join(pieces) + stream.flush() == tokenizer.decode(ids, special=special)
        joined = b"".join(map(tokenizer.token_bytes, ids))
        assert tokenizer.decode(ids) == joined.decode("utf-8", errors="replace")


def test_stream_holds_half_characters(tokenizer: Tokenizer) -> None:
    text = "\U0001f9d9\u200d\u2642\ufe0f \U000e0041 \u4e2d"
    stream = tokenizer.stream()
    pieces = [stream.push(i) for i in tokenizer.encode(text, bos=False)]
    assert "".join(pieces) == text
    assert "" in pieces
    assert stream.flush() == ""


def test_stream_broken_bytes(gemma: Tokenizer) -> None:
    euro = [gemma.hf.token_to_id(f"<0x{byte:02X}>") for byte in "\u20ac".encode()]
    assert [gemma.stream().push(i) for i in euro] == ["", "\ufffd", "\ufffd"]
    stream = gemma.stream()
    assert [stream.push(i) for i in euro] == ["", "", "\u20ac"]
    assert [stream.push(i) for i in euro[:2]] == ["", ""]
    assert stream.flush() == "\ufffd"
    assert gemma.decode([euro[0], *gemma.encode("a", bos=False)]) == "\ufffda"


# Control tokens, BOS, end tokens


def test_bos_exactly_once(gemma: Tokenizer, llama3: Tokenizer) -> None:
    for tokenizer, bos_text in ((gemma, "<bos>"), (llama3, "<|begin_of_text|>")):
        hi = tokenizer.encode("hi", bos=False)
        bos = [tokenizer.bos_id]
        assert tokenizer.encode("hi") == bos + hi
        assert tokenizer.encode(bos_text + "hi") == bos + hi
        assert tokenizer.encode(bos_text + "hi", bos=True) == bos + hi
        assert tokenizer.encode(bos_text + "hi", bos=False) == bos + hi
        assert tokenizer.encode("", bos=True) == bos
        plain = tokenizer.encode(bos_text + "hi", special=False)
        assert plain[:1] == bos
        assert tokenizer.decode(plain[1:]) == bos_text + "hi"


def test_bos_only_on_request(smollm: Tokenizer) -> None:
    assert smollm.encode("hi") == smollm.encode("hi", bos=False)
    assert smollm.encode("hi", bos=True) == [smollm.bos_id, *smollm.encode("hi")]
    assert smollm.encode("", bos=None) == []


def test_control_text(tokenizer: Tokenizer) -> None:
    """Without `special` no control token comes out, whatever the text; threads with both settings do not disturb."""
    texts = random_texts(300, seed=6)
    plain = [tokenizer.encode(text, bos=False, special=False) for text in texts]
    parsed = [tokenizer.encode(text, bos=False) for text in texts]
    assert not any(tokenizer.is_control(i) for ids in plain for i in ids)
    assert any(tokenizer.is_control(i) for ids in parsed for i in ids)
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            plain_again = pool.map(lambda text: tokenizer.encode(text, bos=False, special=False), texts)
            parsed_again = pool.map(lambda text: tokenizer.encode(text, bos=False), texts)
            assert list(plain_again) == plain
            assert list(parsed_again) == parsed


def test_longest_control_token_wins() -> None:
    tokens = [*LETTERS.values(), "<|a|>", "<|a|><|b|>", "<|"]
    tokenizer = Tokenizer.from_metadata(bpe_metadata(tokens=tokens, token_type=[1] * 256 + [3] * 3, merges=[]))
    assert tokenizer.encode("<|a|><|b|><|a|><|b") == [257, 256, 258, tokenizer.encode("b")[0]]


def test_end_ids(gemma: Tokenizer, smollm: Tokenizer, qwen: Tokenizer, llama3: Tokenizer) -> None:
    def ends(tokenizer: Tokenizer) -> set[str]:
        return {tokenizer.token_text(i) for i in tokenizer.end_ids}

    assert ends(gemma) == {"<eos>", "<end_of_turn>"}  # "</s>" is HTML there
    assert ends(smollm) == {"<|im_end|>", "<|endoftext|>"}
    assert ends(qwen) == {"<|im_end|>", "<|endoftext|>"}
    assert ends(llama3) == {"<|end_of_text|>", "<|eot_id|>"}


def test_end_ids_by_key_and_text() -> None:
    ends = ["<|eot_id|>", "<|end|>", "<|im_end|>", "</s>"]
    tokens = [*LETTERS.values(), *ends]
    types = [1] * 256 + [TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.NORMAL, TokenType.USER_DEFINED]
    tokenizer = Tokenizer.from_metadata(
        bpe_metadata(tokens=tokens, token_type=types, merges=[], eot_token_id=5, eom_token_id=6)
    )
    assert tokenizer.end_ids == {5, 6, 256, 257}


# SentencePiece with a space in front


@pytest.mark.parametrize("as_array", [False, True])
def test_space_prefix(as_array: bool) -> None:
    metadata = spm_metadata()
    if as_array:
        metadata[KEY + "scores"] = np.array(metadata[KEY + "scores"], np.float32)
        metadata[KEY + "token_type"] = np.array(metadata[KEY + "token_type"], np.int32)
    tokenizer = Tokenizer.from_metadata(metadata)
    hello, spaced_hello, space, tag = (tokenizer.hf.token_to_id(t) for t in ("hello", "\u2581hello", "\u2581", "<tag>"))
    assert tokenizer.encode("hello") == [1, spaced_hello]
    assert tokenizer.encode(" hello", bos=False) == [space, spaced_hello]
    assert tokenizer.encode("</s>hello", bos=False) == [2, spaced_hello]
    assert tokenizer.encode("<unk>", bos=False) == [0]
    assert tokenizer.encode("hello<tag>", bos=False) == [spaced_hello, tag]
    for text in ["hello", " hello", "</s>hello</s> hello", "<tag>hello", "hellohello", "\x00", "", " "]:
        assert tokenizer.decode(tokenizer.encode(text, bos=False)) == text
    assert tokenizer.decode([spaced_hello, hello], continued=True) == " hellohello"
    assert tokenizer.decode([2, spaced_hello], special=False) == "hello"


def test_no_space_prefix() -> None:
    tokenizer = Tokenizer.from_metadata(spm_metadata(add_space_prefix=False, add_bos_token=False))
    assert tokenizer.encode("hello") == [tokenizer.hf.token_to_id("hello")]
    assert tokenizer.decode([tokenizer.hf.token_to_id("\u2581hello")]) == " hello"


# Byte-level rules

WORDS = {
    "command-r": "camelCase|'|S|1|2|3|4",
    "deepseek-coder": "camelCase|'|S|1|2|3|4",
    "deepseek-r1-qwen": "camelCase|'S|1|2|3|4",
    "deepseek-v3": "camelCase|'S|123|4",
    "default": "camelCase|'|S|123|4",
    "falcon": "camelCase|'|S|123|4",
    "falcon3": "camelCase|'S|123|4",
    "gpt-2": "camelCase|'|S|1234",
    "gpt-4o": "camel|Case'S|123|4",
    "llama-bpe": "camelCase|'S|123|4",
    "llama-v3": "camelCase|'S|123|4",
    "llama3": "camelCase|'S|123|4",
    "phi-2": "camelCase|'|S|1234",
    "qwen2": "camelCase|'S|1|2|3|4",
    "qwen35": "camelCase|'S|1|2|3|4",
    "refact": "camelCase|'|S|1|2|3|4",
    "smollm": "camelCase|'|S|1|2|3|4",
    "starcoder": "camelCase|'|S|1|2|3|4",
    "tekken": "camel|Case|'S|1|2|3|4",
}


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_words(pre: str) -> None:
    words = [word for word, _ in PRE_TOKENIZERS[pre].build().pre_tokenize_str("camelCase'S1234")]
    assert "|".join(words) == WORDS[pre]
    tokenizer = Tokenizer.from_metadata(bpe_metadata(pre, bos_token_id=258))
    for text in random_texts(100, seed=7):
        text = normalised(tokenizer, text)
        assert tokenizer.decode(tokenizer.encode(text, bos=False)) == text


def test_whole_word_needs_no_merges() -> None:
    abc = Tokenizer.from_metadata(bpe_metadata("llama-bpe", bos_token_id=258)).encode("abc", bos=False)
    assert abc == [257]
    assert len(Tokenizer.from_metadata(bpe_metadata("gpt-2")).encode("abc")) == 2


def test_user_defined_tokens_always_match() -> None:
    tokens = [*LETTERS.values(), "<tool>", "<\u00e9>"]
    types = [1] * 256 + [TokenType.USER_DEFINED] * 2
    tokenizer = Tokenizer.from_metadata(bpe_metadata(tokens=tokens, token_type=types, merges=[]))
    assert tokenizer.encode("<tool><\u00e9>", special=False) == [256, 257]
    assert tokenizer.decode([256, 257], special=False) == "<tool><\u00e9>"


def test_merges_that_are_left_out_are_never_used() -> None:
    rng = random.Random(11)

    def words(n: int, longest: int) -> list[str]:
        return ["".join(rng.choices("abc", k=rng.randint(1, longest))) for _ in range(n)]

    for _ in range(300):
        ranked = list(dict.fromkeys([*rng.sample("abc", rng.randint(2, 3)), *words(rng.randint(1, 30), 7)]))
        rng.shuffle(ranked)
        cuts = [(piece[:at], piece[at:]) for piece in ranked for at in range(1, len(piece))]
        every_merge = [(left, right) for left, right in cuts if left in ranked and right in ranked]
        used = used_merges(ranked)
        assert len(used) == len({left + right for left, right in used})
        vocab = {piece: i for i, piece in enumerate([*ranked, "<unk>"])}
        few, all_of_them = (
            tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>"))
            for merges in (used, every_merge)
        )
        for text in words(20, 30):
            assert few.encode(text).tokens == all_of_them.encode(text).tokens


# Saving, errors


def test_saved_and_loaded(smollm: Tokenizer) -> None:
    saved = smollm.hf.to_str()
    text = "<|im_start|>user\nhi 123<|im_end|>"
    assert tokenizers.Tokenizer.from_str(saved).encode(text).ids == smollm.encode(text)
    loaded = Tokenizer.from_json(saved.encode(), smollm.facts)
    for special in (True, False):
        assert loaded.encode(text, special=special) == smollm.encode(text, special=special)
    assert loaded.decode(loaded.encode(text)) == text


def test_input_errors() -> None:
    tokenizer = Tokenizer.from_metadata(bpe_metadata())
    for token_id in (-1, 259, 2**40):
        with pytest.raises(InputError, match=rf"token id {token_id} is not in the vocabulary \(0 to 258\)"):
            tokenizer.decode([token_id])
    with pytest.raises(InputError, match=r"lone surrogate U\+D83E at position 2"):
        tokenizer.encode("ab\ud83e")
    with pytest.raises(InputError, match="no BOS token"):
        tokenizer.encode("a", bos=True)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (bpe_metadata(model=None), "tokenizer.ggml.model is missing"),
        (bpe_metadata(model="bert"), 'tokenizer.ggml.model: "bert" is not supported; supported: gpt2, llama'),
        (bpe_metadata(model=1), "tokenizer.ggml.model is not a string"),
        (bpe_metadata(pre=None), "tokenizer.ggml.pre is missing"),
        (bpe_metadata(pre="mine"), 'tokenizer.ggml.pre: "mine" is not supported; supported: command-r, deepseek-coder'),
        (bpe_metadata(tokens=None), "tokenizer.ggml.tokens is missing"),
        (bpe_metadata(tokens=[]), "tokenizer.ggml.tokens is empty"),
        (bpe_metadata(tokens=[1, 2]), "tokenizer.ggml.tokens is not an array of strings"),
        (bpe_metadata(tokens=["a"] * 259), 'tokenizer.ggml.tokens: "a" has the ids 0 and 258'),
        (bpe_metadata(token_type=[1]), "tokenizer.ggml.token_type has 1 entries for 259 tokens"),
        (bpe_metadata(token_type=[9] * 259), "tokenizer.ggml.token_type has a value outside 0 to 6"),
        (bpe_metadata(token_type=["x"] * 259), "tokenizer.ggml.token_type is not an array of numbers"),
        (bpe_metadata(merges=None), "tokenizer.ggml.merges is missing"),
        (bpe_metadata(merges=["a b", "ab"]), 'tokenizer.ggml.merges: entry 1, "ab", is not two tokens'),
        (bpe_metadata(merges=["a b c"]), 'tokenizer.ggml.merges: entry 0, "a b c", is not two tokens'),
        (bpe_metadata(merges=["a c"]), 'tokenizer.ggml.merges: entry 0, "a c", is not two tokens'),
        (bpe_metadata(bos_token_id=259), "tokenizer.ggml.bos_token_id is 259, but the vocabulary has 259 tokens"),
        (bpe_metadata(eos_token_id="x"), "tokenizer.ggml.eos_token_id is not an integer"),
        (bpe_metadata(add_bos_token=True), "tokenizer.ggml.bos_token_id is missing"),
        (bpe_metadata("llama-bpe"), "tokenizer.ggml.bos_token_id is missing"),
        (bpe_metadata(add_bos_token="yes"), "tokenizer.ggml.add_bos_token is not true or false"),
        (spm_metadata(scores=None), "tokenizer.ggml.scores is missing"),
        (spm_metadata(scores=[0.0]), "tokenizer.ggml.scores has 1 entries for 272 tokens"),
        (spm_metadata(scores=[float("nan")] * 272), "tokenizer.ggml.scores has a value that is not a number"),
        (
            spm_metadata(tokens=[*map(str, range(271)), "a" * 1001], token_type=None),
            "tokenizer.ggml.tokens has a piece of more than 1000 characters",
        ),
        (
            spm_metadata(remove_extra_whitespaces=True),
            "tokenizer.ggml.remove_extra_whitespaces = true is not supported",
        ),
    ],
)
def test_bad_metadata(metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=re.escape(message)):
        Tokenizer.from_metadata(metadata)
