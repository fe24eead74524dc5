"""Small random GGUF models of every supported family and weight format, written by the public `gguf` package.

They are nonsense as language models but complete as files, tokenizer included. They are built to be sensitive:
attention is peaked, windows are shorter than a test's prompt, and logits spread over several units, so that a wrong
position, scale or pairing shows in every logit.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, TokenType
from gguf.quants import dequantize, quantize

FAMILIES = ("gemma3", "qwen2", "qwen3", "llama")
FLOAT_TYPES = ("F16", "BF16", "F32")
WEIGHT_TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", *FLOAT_TYPES)

Value = int | float | str | Sequence[bool]


@dataclass(frozen=True)
class Shape:
    """The sizes of one family's tiny model; `head_size` and `feed_forward` follow the width."""

    width: int
    n_layers: int
    n_heads: int = 4
    n_kv_heads: int = 2
    wide_heads: bool = False  # twice width / n_heads

    @property
    def head_size(self) -> int:
        return self.width // self.n_heads * (2 if self.wide_heads else 1)

    @property
    def feed_forward(self) -> int:
        return 2 * self.width


def write_tiny_model(
    path: Path,
    family: str,
    weight_type: str,
    *,
    seed: int = 0,
    tied: bool = True,
    rope_freqs: bool = False,
    embedding_type: str | None = None,
    width: int | None = None,
    n_layers: int | None = None,
    vocab_size: int = 301,
    metadata: Mapping[str, Value] | None = None,
    other_metadata: Mapping[str, Value] | None = None,
) -> Path:
    """Write a model of `family` whose matrices all have `weight_type`; returns the path.

    `rope_freqs` adds the frequency divisors of Llama 3.1. `embedding_type` gives the embedding (and so a tied head)
    another format. `width` is by default 256 for K-quants, else 160; it must be a multiple of 8 and of the format's
    block. `metadata` adds or replaces keys, named without the architecture: {"final_logit_softcapping": 20.0};
    `other_metadata` adds keys with their full names.
    """
    if family not in FAMILIES:
        raise ValueError(f"unknown family {family!r}, expected one of {FAMILIES}")
    shape = Shape(
        width=width or (256 if weight_type.endswith("_K") else 160),
        n_layers=n_layers or (7 if family == "gemma3" else 3),  # Gemma: five local layers, a global one, a local one
        wide_heads=family in ("gemma3", "qwen3"),
    )
    writer = GGUFWriter(path, family)
    writer.add_quantization_version(2)
    for key, value in (_metadata(family, shape) | dict(metadata or {})).items():
        _add_value(writer, f"{family}.{key}", value)
    for key, value in (other_metadata or {}).items():
        _add_value(writer, key, value)
    if family.startswith("qwen"):
        _add_byte_level_tokenizer(writer, vocab_size)
    else:
        _add_sentencepiece_tokenizer(writer, family == "gemma3", vocab_size)
    _Weights(writer, seed, weight_type).add_model(family, shape, vocab_size, tied, rope_freqs, embedding_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _metadata(family: str, shape: Shape) -> dict[str, Value]:
    values: dict[str, Value] = {
        "context_length": 512,
        "embedding_length": shape.width,
        "block_count": shape.n_layers,
        "feed_forward_length": shape.feed_forward,
        "attention.head_count": shape.n_heads,
        "attention.head_count_kv": shape.n_kv_heads,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 10000.0 if family == "llama" else 1000000.0,
    }
    if shape.wide_heads:
        values |= {"attention.key_length": shape.head_size, "attention.value_length": shape.head_size}
    if family == "llama":
        values |= {"rope.dimension_count": shape.head_size}
    if family == "gemma3":
        values |= {"attention.sliding_window": 8, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
    return values


def _add_value(writer: GGUFWriter, key: str, value: Value) -> None:
    if isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


class _Weights:
    """Draws random tensors and adds them to the file; norms and biases are always F32."""

    def __init__(self, writer: GGUFWriter, seed: int, weight_type: str) -> None:
        self.writer = writer
        self.rng = np.random.default_rng(seed)
        self.weight_type = weight_type

    def add_model(
        self, family: str, shape: Shape, vocab_size: int, tied: bool, rope_freqs: bool, embedding_type: str | None
    ) -> None:
        self.matrix("token_embd.weight", vocab_size, shape.width, gain=2.0, weight_type=embedding_type)
        if not tied:
            self.matrix("output.weight", vocab_size, shape.width, gain=2.0)
        self.norm("output_norm.weight", shape.width)
        if rope_freqs:
            divisors = np.linspace(1, 8, shape.head_size // 2, dtype=np.float32)
            self.writer.add_tensor("rope_freqs.weight", divisors)
        for layer in range(shape.n_layers):
            self.add_layer(f"blk.{layer}", family, shape)

    def add_layer(self, block: str, family: str, shape: Shape) -> None:
        query_width = shape.n_heads * shape.head_size
        key_width = shape.n_kv_heads * shape.head_size
        self.norm(f"{block}.attn_norm.weight", shape.width)
        self.matrix(f"{block}.attn_q.weight", query_width, shape.width, gain=1.5)
        self.matrix(f"{block}.attn_k.weight", key_width, shape.width, gain=1.5)
        self.matrix(f"{block}.attn_v.weight", key_width, shape.width)
        self.matrix(f"{block}.attn_output.weight", shape.width, query_width)
        if family == "qwen2":
            self.bias(f"{block}.attn_q.bias", query_width)
            self.bias(f"{block}.attn_k.bias", key_width)
            self.bias(f"{block}.attn_v.bias", key_width)
        if family in ("gemma3", "qwen3"):
            self.norm(f"{block}.attn_q_norm.weight", shape.head_size)
            self.norm(f"{block}.attn_k_norm.weight", shape.head_size)
        if family == "gemma3":
            self.norm(f"{block}.post_attention_norm.weight", shape.width)
            self.norm(f"{block}.post_ffw_norm.weight", shape.width)
        self.norm(f"{block}.ffn_norm.weight", shape.width)
        self.matrix(f"{block}.ffn_gate.weight", shape.feed_forward, shape.width)
        self.matrix(f"{block}.ffn_up.weight", shape.feed_forward, shape.width)
        self.matrix(f"{block}.ffn_down.weight", shape.width, shape.feed_forward)

    def norm(self, name: str, size: int) -> None:
        self.writer.add_tensor(name, self.rng.uniform(0.5, 2.0, size).astype(np.float32))

    def bias(self, name: str, size: int) -> None:
        self.writer.add_tensor(name, self.rng.normal(0, 0.5, size).astype(np.float32))

    def matrix(self, name: str, rows: int, columns: int, gain: float = 1.0, weight_type: str | None = None) -> None:
        """Values of mean 0 and standard deviation gain / sqrt(columns)."""
        kind = GGMLQuantizationType[weight_type or self.weight_type]
        deviation = gain / math.sqrt(columns)
        if kind.name in FLOAT_TYPES:
            data = quantize(self.rng.normal(0, deviation, (rows, columns)).astype(np.float32), kind)
        else:
            data = random_blocks(self.rng, kind, rows, columns, deviation)
        self.writer.add_tensor(name, data, raw_dtype=kind)


@dataclass(frozen=True)
class BlockScales:
    """Where a block keeps its f16 scale and minimum (bytes from its start), and the mean of its quants.

    A value is scale * quant + sign * minimum; formats without a minimum have quants centred on zero.
    """

    scale: int = 0
    minimum: int | None = None
    minimum_sign: int = 1
    mean_quant: float = 0.0


BLOCK_SCALES = {
    GGMLQuantizationType.Q4_0: BlockScales(),
    GGMLQuantizationType.Q4_1: BlockScales(minimum=2, mean_quant=7.5),
    GGMLQuantizationType.Q5_0: BlockScales(),
    GGMLQuantizationType.Q5_1: BlockScales(minimum=2, mean_quant=15.5),
    GGMLQuantizationType.Q8_0: BlockScales(),
    GGMLQuantizationType.Q4_K: BlockScales(minimum=2, minimum_sign=-1, mean_quant=7.5),
    GGMLQuantizationType.Q5_K: BlockScales(minimum=2, minimum_sign=-1, mean_quant=15.5),
    GGMLQuantizationType.Q6_K: BlockScales(scale=208),
}


def random_blocks(
    rng: np.random.Generator, kind: GGMLQuantizationType, rows: int, columns: int, deviation: float
) -> npt.NDArray[np.uint8]:
    """Encoded rows whose every quant and inner scale is random, with finite values of the given deviation.

    An encoder would not do: the `gguf` package has none for the K-quants, and encoders leave out codes that a decoder
    must know, such as -128 in Q8_0 or a negative scale. Returns [rows, bytes per row].
    """
    block_size, type_size = GGML_QUANT_SIZES[kind]
    if columns % block_size:
        raise ValueError(f"{columns} columns are no multiple of the {kind.name} block of {block_size}")
    where = BLOCK_SCALES[kind]
    blocks = rng.integers(0, 256, (rows * columns // block_size, type_size), dtype=np.uint8)
    signs = rng.choice([-1.0, 1.0], (len(blocks), 1)) * rng.uniform(0.5, 1.5, (len(blocks), 1))

    def set_scales(scale: float) -> None:
        blocks[:, where.scale : where.scale + 2] = (scale * signs).astype("<f2").view(np.uint8)
        if where.minimum is not None:
            centre = -where.minimum_sign * where.mean_quant * scale * signs
            blocks[:, where.minimum : where.minimum + 2] = centre.astype("<f2").view(np.uint8)

    set_scales(1.0)
    set_scales(deviation / float(dequantize(blocks, kind).std()))
    return blocks.reshape(rows, -1)


@dataclass
class Vocabulary:
    """Tokens in id order, with their types and scores."""

    tokens: list[str] = field(default_factory=list)
    types: list[TokenType] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)

    def add(self, token: str, kind: TokenType = TokenType.NORMAL, score: float = 0.0) -> None:
        self.tokens.append(token)
        self.types.append(kind)
        self.scores.append(score)

    def write(self, writer: GGUFWriter, size: int, bos: str, eos: str) -> None:
        """Add the tokens to the file, filled up to `size` with unused ones as in real files."""
        if len(self.tokens) > size:
            raise ValueError(f"{len(self.tokens)} tokens do not fit a vocabulary of {size}")
        for token in range(len(self.tokens), size):
            self.add(f"[PAD{token}]", TokenType.UNUSED)
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.types)
        writer.add_bos_token_id(self.tokens.index(bos))
        writer.add_eos_token_id(self.tokens.index(eos))


MERGED_PIECES = ("▁t", "he", "in", "▁a", "er", "on", "▁the", "is", "ing", "▁is", "at", "▁w")
LETTERS = "▁etaoinshrdlcumwfgypbvkTFAI"
MERGES = ("Ġ t", "h e", "i n", "Ġ a", "Ġt he", "e r", "o n", "i s", "in g", "Ġ is", "a t", "Ġ w")


def _add_sentencepiece_tokenizer(writer: GGUFWriter, gemma: bool, size: int) -> None:
    """Pieces merged by score, with every byte as a fallback."""
    vocabulary = Vocabulary()
    for token in ("<pad>", "<eos>", "<bos>") if gemma else ("<unk>", "<s>", "</s>"):
        vocabulary.add(token, TokenType.UNKNOWN if token == "<unk>" else TokenType.CONTROL)
    for token in ("<unk>", "<start_of_turn>", "<end_of_turn>") if gemma else ():
        vocabulary.add(token, TokenType.CONTROL)
    for byte in range(256):
        vocabulary.add(f"<0x{byte:02X}>", TokenType.BYTE)
    for rank, piece in enumerate((*MERGED_PIECES, *LETTERS)):
        vocabulary.add(piece, score=float(-rank))
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    vocabulary.write(writer, size, *(("<bos>", "<eos>") if gemma else ("<s>", "</s>")))
    writer.add_token_scores(vocabulary.scores)
    writer.add_unk_token_id(vocabulary.tokens.index("<unk>"))
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(not gemma)


def _add_byte_level_tokenizer(writer: GGUFWriter, size: int) -> None:
    """Byte-level BPE with Qwen's control tokens."""
    vocabulary = Vocabulary()
    for token in (*_byte_characters(), *(merge.replace(" ", "") for merge in MERGES)):
        vocabulary.add(token)
    for token in ("<|endoftext|>", "<|im_start|>", "<|im_end|>"):
        vocabulary.add(token, TokenType.CONTROL)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    vocabulary.write(writer, size, bos="<|endoftext|>", eos="<|im_end|>")
    writer.add_token_merges(MERGES)
    writer.add_add_bos_token(False)


def _byte_characters() -> list[str]:
    """GPT-2's visible stand-in for every byte: printable ones are themselves, the rest follow from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    stand_ins = (chr(0x100 + n) for n in range(256))
    return [chr(byte) if byte in printable else next(stand_ins) for byte in range(256)]
