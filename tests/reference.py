"""An independent forward pass in plain numpy: the oracle for the engine's logits.

It shares nothing with the engine: weights and metadata come from the public `gguf` package, every weight is decoded
to f32 when it is used, and all arithmetic is f32 (only the RoPE angles are computed in f64). It is written from:

- Llama: arXiv 2302.13971 and 2307.09288, grouped-query attention 2305.13245, RMSNorm 1910.07467, SwiGLU 2002.05202
- RoPE: arXiv 2104.09864; linear scaling ("position interpolation") 2306.15595
- Gemma 3: arXiv 2503.19786; soft caps and sandwich norms from Gemma 2, 2408.00118
- Qwen2: arXiv 2407.10671 (biases on q, k, v); Qwen3: 2505.09388 (norms on q and k instead)
- GGUF: docs/gguf.md in the ggml repository, and the constants of the `gguf` package

Shapes use one letter per axis: T tokens, D width, H query heads, G key/value heads, E head size, R rotary dimensions,
F feed-forward width, V vocabulary. A matrix stored as [rows, columns] maps columns to rows: y = x @ W.T.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader, ReaderTensor
from gguf.quants import dequantize

Array = npt.NDArray[np.float32]

ROWS_PER_CHUNK = 16384  # rows of the head decoded at a time: a 262k-wide head would need gigabytes at once


def rms_norm(x: Array, weight: Array, epsilon: float) -> Array:
    """Divide every vector on the last axis by its root mean square, then scale it: [..., n], [n] -> [..., n]."""
    mean_square = np.mean(x * x, axis=-1, keepdims=True)
    return x / np.sqrt(mean_square + np.float32(epsilon)) * weight


def silu(x: Array) -> Array:
    """x * sigmoid(x); the sigmoid is written with tanh, which cannot overflow."""
    return x * (0.5 * (1 + np.tanh(0.5 * x)))


def gelu(x: Array) -> Array:
    """The tanh form of GELU."""
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def softmax(x: Array) -> Array:
    """Softmax over the last axis; -inf marks what must get no weight."""
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def soft_cap(x: Array, cap: float | None) -> Array:
    """Squash x smoothly into (-cap, cap); without a cap x stays as it is."""
    return x if cap is None else np.float32(cap) * np.tanh(x / np.float32(cap))


def rotate(x: Array, frequencies: npt.NDArray[np.float64], half_split: bool) -> Array:
    """RoPE: turn pair j of every head at position t by the angle t * frequencies[j]: [T, heads, E] -> same.

    The pairs are dimensions (j, j + R/2) when half_split, else (2j, 2j + 1). Dimensions from R = 2 * len(frequencies)
    on are left alone.
    """
    n_pairs = len(frequencies)
    angles = np.arange(len(x))[:, None, None] * frequencies  # [T, 1, R/2]
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    if half_split:
        first, second = slice(0, n_pairs), slice(n_pairs, 2 * n_pairs)
    else:
        first, second = slice(0, 2 * n_pairs, 2), slice(1, 2 * n_pairs, 2)
    a, b = x[..., first], x[..., second]
    rotated = x.copy()
    rotated[..., first] = a * cos - b * sin
    rotated[..., second] = a * sin + b * cos
    return rotated


def visible(n_tokens: int, window: int | None) -> npt.NDArray[np.bool_]:
    """[T, T]: may the query of row i see the key of column j? Causal; a window W keeps only j in i-W+1..i."""
    distance = np.arange(n_tokens)[:, None] - np.arange(n_tokens)
    return (distance >= 0) & (distance < (window or n_tokens))


def attend(q: Array, k: Array, v: Array, window: int | None, scale: float, cap: float | None) -> Array:
    """Grouped-query attention: q [T, H, E], k and v [T, G, E] -> [T, H * E].

    Query head h reads key/value head h // (H / G).
    """
    n_tokens, n_heads, _ = q.shape
    group = n_heads // k.shape[1]
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)  # [T, H, E]
    scores = q.transpose(1, 0, 2) @ k.transpose(1, 2, 0) * np.float32(scale)  # [H, T, T]
    scores = np.where(visible(n_tokens, window), soft_cap(scores, cap), np.float32(-np.inf))
    mixed = softmax(scores) @ v.transpose(1, 0, 2)  # [H, T, E]
    return mixed.transpose(1, 0, 2).reshape(n_tokens, -1)


@dataclass(frozen=True)
class Family:
    """What the metadata does not say, because every model of the architecture does it."""

    half_split: bool = True  # RoPE pairs; llama files store q and k permuted for adjacent pairs
    qk_norm: bool = False  # an RMSNorm on every query and key head, before RoPE
    sandwich: bool = False  # norms after attention and feed-forward too, before the residual addition
    scaled_embedding: bool = False  # the embedding is multiplied by sqrt(width)
    activation: Callable[[Array], Array] = silu


FAMILIES = {
    "gemma3": Family(qk_norm=True, sandwich=True, scaled_embedding=True, activation=gelu),
    "llama": Family(half_split=False),
    "qwen2": Family(),
    "qwen3": Family(qk_norm=True),
}

GEMMA3_PERIOD = 6  # five local layers, then a global one
GEMMA3_LOCAL_BASE = 10000.0
GEMMA3_27B_LAYERS = 62


class Reference:
    """One GGUF model, run over a whole sequence at once without a cache."""

    def __init__(self, path: Path) -> None:
        reader = GGUFReader(path)
        self.fields = reader.fields
        self.tensors: dict[str, ReaderTensor] = {tensor.name: tensor for tensor in reader.tensors}
        self.architecture: str = reader.fields["general.architecture"].contents()
        self.family = FAMILIES[self.architecture]
        self.n_layers: int = self.required("block_count")
        self.width: int = self.required("embedding_length")
        self.n_heads: int = self.required("attention.head_count")
        self.n_kv_heads: int = self.optional("attention.head_count_kv", self.n_heads)
        self.head_size: int = self.optional("attention.key_length", self.width // self.n_heads)
        self.epsilon: float = self.required("attention.layer_norm_rms_epsilon")
        self.attention_cap: float | None = self.optional("attn_logit_softcapping", None)
        self.final_cap: float | None = self.optional("final_logit_softcapping", None)

    def logits(self, ids: Sequence[int], positions: Sequence[int] | None = None) -> Array:
        """Logits of the given positions, by default of all: [len(positions), V]."""
        x = self.residuals(ids)[-1]
        if positions is not None:
            x = x[list(positions)]
        x = self.norm("output_norm", x)
        head = self.tensors.get("output.weight") or self.tensors["token_embd.weight"]
        chunks = [head.data[start : start + ROWS_PER_CHUNK] for start in range(0, len(head.data), ROWS_PER_CHUNK)]
        logits = np.concatenate([x @ dequantize(rows, head.tensor_type).T for rows in chunks], axis=-1)
        return soft_cap(logits, self.final_cap)

    def residuals(self, ids: Sequence[int]) -> Array:
        """The residual stream after the embedding and after every layer: [layers + 1, T, D]."""
        stream = [self.embed(ids)]
        for layer in range(self.n_layers):
            stream.append(self.layer(layer, stream[-1]))
        return np.stack(stream)

    def embed(self, ids: Sequence[int]) -> Array:
        """The embedding rows of the tokens: [T, D]."""
        table = self.tensors["token_embd.weight"]
        x: Array = dequantize(table.data[list(ids)], table.tensor_type)
        return x * np.float32(math.sqrt(self.width)) if self.family.scaled_embedding else x

    def layer(self, layer: int, x: Array) -> Array:
        """One transformer layer on the residual stream: [T, D] -> [T, D]."""
        block = f"blk.{layer}"
        h = self.attention(layer, self.norm(f"{block}.attn_norm", x))
        x = x + (self.norm(f"{block}.post_attention_norm", h) if self.family.sandwich else h)
        h = self.feed_forward(layer, self.norm(f"{block}.ffn_norm", x))
        return x + (self.norm(f"{block}.post_ffw_norm", h) if self.family.sandwich else h)

    def attention(self, layer: int, x: Array) -> Array:
        """Self-attention: [T, D] -> [T, D]."""
        block = f"blk.{layer}"
        q = self.linear(f"{block}.attn_q", x).reshape(len(x), self.n_heads, -1)
        k = self.linear(f"{block}.attn_k", x).reshape(len(x), self.n_kv_heads, -1)
        v = self.linear(f"{block}.attn_v", x).reshape(len(x), self.n_kv_heads, -1)
        if self.family.qk_norm:
            q, k = self.norm(f"{block}.attn_q_norm", q), self.norm(f"{block}.attn_k_norm", k)
        window = self.window(layer)
        frequencies = self.frequencies(local=window is not None)
        q, k = rotate(q, frequencies, self.family.half_split), rotate(k, frequencies, self.family.half_split)
        mixed = attend(q, k, v, window, self.query_scale(), self.attention_cap)
        return self.linear(f"{block}.attn_output", mixed)

    def feed_forward(self, layer: int, x: Array) -> Array:
        """The gated feed-forward network, [T, D] -> [T, F] -> [T, D]."""
        block = f"blk.{layer}"
        gate = self.family.activation(self.linear(f"{block}.ffn_gate", x))
        return self.linear(f"{block}.ffn_down", gate * self.linear(f"{block}.ffn_up", x))

    def window(self, layer: int) -> int | None:
        """How many positions a layer sees, its own included; None means all. Only Gemma 3 has windows."""
        if self.architecture != "gemma3":
            return None
        pattern = self.optional("attention.sliding_window_pattern", GEMMA3_PERIOD)
        # a list has one flag per layer, true for local; a number is the period of the global layers
        local = pattern[layer] if isinstance(pattern, list) else (layer + 1) % pattern != 0
        return self.required("attention.sliding_window") if local else None

    def frequencies(self, local: bool) -> npt.NDArray[np.float64]:
        """The angle per position of every RoPE pair: [R/2]."""
        n_rotary = self.optional("rope.dimension_count", self.head_size)
        exponents = -np.arange(0, n_rotary, 2) / n_rotary
        if local:
            return np.power(self.optional("rope.freq_base_swa", GEMMA3_LOCAL_BASE), exponents)
        frequencies = np.power(self.optional("rope.freq_base", 10000.0), exponents) / self.rope_factor()
        return frequencies / self.weight("rope_freqs.weight") if "rope_freqs.weight" in self.tensors else frequencies

    def rope_factor(self) -> float:
        """By how much linear scaling slows the rotation; older files call the key `rope.scale_linear`."""
        kind = self.optional("rope.scaling.type", "linear")
        if kind == "none":
            return 1.0
        if kind != "linear":
            raise ValueError(f"RoPE scaling {kind!r}")
        factor: float = self.optional("rope.scaling.factor", self.optional("rope.scale_linear", 1.0))
        return factor

    def query_scale(self) -> float:
        """The factor of q . k before the softmax; Gemma 3 27B alone does not take it from the real head size."""
        if self.architecture == "gemma3" and self.n_layers == GEMMA3_27B_LAYERS:
            return 1 / math.sqrt(self.width / self.n_heads)
        return 1 / math.sqrt(self.head_size)

    def norm(self, name: str, x: Array) -> Array:
        """RMSNorm by a named weight; Gemma's files store the weight with the 1 of its (1 + w) already added."""
        return rms_norm(x, self.weight(f"{name}.weight"), self.epsilon)

    def linear(self, name: str, x: Array) -> Array:
        """x @ W.T, plus the bias where the model has one: [T, columns] -> [T, rows]."""
        y = x @ self.weight(f"{name}.weight").T
        return y + self.weight(f"{name}.bias") if f"{name}.bias" in self.tensors else y

    def weight(self, name: str) -> Array:
        """A tensor decoded to f32, [rows, columns] or [n]."""
        tensor = self.tensors[name]
        return dequantize(tensor.data, tensor.tensor_type)

    def required(self, key: str) -> Any:
        """The metadata value of this architecture's key."""
        return self.fields[f"{self.architecture}.{key}"].contents()

    def optional(self, key: str, default: Any) -> Any:
        """The metadata value, or the default where the file has none."""
        return self.required(key) if f"{self.architecture}.{key}" in self.fields else default
