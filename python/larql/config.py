"""The model as data: what a family reads from a model file and the engine executes."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Literal


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding of one layer; fields as in rust/config.rs."""

    base: float
    dims: int
    pairing: Literal["adjacent", "half"]
    scaling_factor: float = 1.0
    frequency_factors: tuple[float, ...] | None = None


@dataclass(frozen=True)
class LayerConfig:
    """What differs between the layers of one model: the attention window (tokens) and the rotary embedding."""

    rope: RopeConfig
    window: int | None = None


@dataclass(frozen=True)
class ModelConfig:
    """One decoder-only transformer; fields and units as in rust/config.rs, which checks them."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    context_length: int
    norm_eps: float
    query_scale: float
    activation: Literal["silu", "gelu_tanh"]
    tied_head: bool
    layers: tuple[LayerConfig, ...]
    embedding_scale: float = 1.0
    qkv_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    attention_softcap: float | None = None
    logit_softcap: float | None = None

    def to_json(self) -> str:
        """The form that the engine reads."""
        return json.dumps(asdict(self))
