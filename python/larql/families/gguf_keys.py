"""The GGUF keys that all families share."""

from __future__ import annotations

from typing import Literal, TypedDict

from larql.config import RopeConfig
from larql.errors import ModelError
from larql.families.gguf_names import EMBEDDING, HEAD
from larql.families.keys import Keys


class Sizes(TypedDict):
    """The fields of ModelConfig that every family reads from the same keys."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    context_length: int
    norm_eps: float
    tied_head: bool


def read_sizes(keys: Keys) -> Sizes:
    """The sizes of the model; refuses the variants of an architecture that LARQL does not run."""
    _refuse_variants(keys)
    hidden_size = keys.integer("embedding_length")
    n_heads = keys.integer("attention.head_count")
    return Sizes(
        vocab_size=_vocab_size(keys, hidden_size),
        hidden_size=hidden_size,
        intermediate_size=keys.integer("feed_forward_length"),
        n_heads=n_heads,
        n_kv_heads=keys.integer("attention.head_count_kv", n_heads),
        head_dim=_head_dim(keys, hidden_size, n_heads),
        context_length=keys.integer("context_length"),
        norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
        tied_head=HEAD not in keys.source.tensors,
    )


def read_n_layers(keys: Keys) -> int:
    """The number of layers, which a broken file cannot make larger than its number of tensors."""
    n_layers = keys.integer("block_count")
    n_tensors = len(keys.source.tensors)
    if n_layers > n_tensors:
        raise ModelError(f"metadata key {keys.full('block_count')} is {n_layers}, but the file has {n_tensors} tensors")
    return n_layers


def read_rope(
    keys: Keys, head_dim: int, pairing: Literal["adjacent", "half"], *, default_base: float = 10_000.0
) -> RopeConfig:
    """The rotary embedding; of the ways to stretch it, only linear interpolation."""
    return RopeConfig(
        base=keys.number("rope.freq_base", default_base),
        dims=keys.integer("rope.dimension_count", head_dim),
        pairing=pairing,
        scaling_factor=_scaling_factor(keys),
    )


def refuse_window(keys: Keys, context_length: int) -> None:
    """Refuses a sliding window, unless it is as long as the context, in a family that has full attention."""
    window = keys.integer("attention.sliding_window", 0, minimum=0)
    if 0 < window < context_length:
        raise ModelError(
            f"metadata key {keys.full('attention.sliding_window')} is {window}; "
            f"{keys.architecture} models with a sliding window are not supported"
        )


def _refuse_variants(keys: Keys) -> None:
    n_experts = keys.integer("expert_count", 0, minimum=0)
    if n_experts:
        raise ModelError(
            f"metadata key {keys.full('expert_count')} is {n_experts}; mixture-of-experts models are not supported"
        )
    if not keys.flag("attention.causal", True):
        raise ModelError(f"metadata key {keys.full('attention.causal')} is false; only causal attention is supported")
    attention_factor = keys.number("rope.scaling.attn_factor", 1.0)
    if attention_factor != 1.0:
        raise ModelError(
            f"metadata key {keys.full('rope.scaling.attn_factor')} is {attention_factor}; only 1 is supported"
        )


def _vocab_size(keys: Keys, hidden_size: int) -> int:
    embedding = keys.source.tensors.get(EMBEDDING)
    if embedding is None:
        raise ModelError(f"the model file lacks the tensor {EMBEDDING}")
    if len(embedding.shape) != 2 or embedding.shape[1] != hidden_size:
        raise ModelError(
            f"tensor {EMBEDDING} has shape {embedding.shape}, expected (vocabulary, {hidden_size}) "
            f"from metadata key {keys.full('embedding_length')}"
        )
    return embedding.shape[0]


def _head_dim(keys: Keys, hidden_size: int, n_heads: int) -> int:
    default = None
    if hidden_size % n_heads == 0:
        default = hidden_size // n_heads
    head_dim = keys.integer("attention.key_length", default)
    value_length = keys.integer("attention.value_length", head_dim)
    if value_length != head_dim:
        raise ModelError(
            f"metadata key {keys.full('attention.value_length')} is {value_length}; "
            f"values of another size than keys ({head_dim}) are not supported"
        )
    return head_dim


def _scaling_factor(keys: Keys) -> float:
    kind = keys.text("rope.scaling.type", "linear")
    if kind == "none":
        return 1.0
    if kind != "linear":
        raise ModelError(
            f"metadata key {keys.full('rope.scaling.type')} is {kind!r}; supported RoPE scalings are linear and none"
        )
    legacy = keys.number("rope.scale_linear", 1.0)
    return keys.number("rope.scaling.factor", legacy) or 1.0  # 0 stands for no scaling
