"""Gemma 3, text models: norms around both blocks, five local layers for each global one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from larql.config import LayerConfig, ModelConfig
from larql.errors import ModelError
from larql.families.gguf_keys import read_n_layers, read_rope, read_sizes
from larql.families.keys import Keys, Source

ARCHITECTURES = ("gemma3",)

_LOCAL_ROPE_BASE = 10_000.0
_GLOBAL_ROPE_BASE = 1_000_000.0
_LAYERS_PER_GLOBAL = 6
_LAYERS_OF_27B = 62


def config(source: Source) -> ModelConfig:
    """The model of a `gemma3` file, whose norms are stored with the 1 already added.

    RoPE scaling is for the global layers only. The embedding scale is not rounded to bf16, unlike in the original.
    """
    keys = Keys(source)
    sizes = read_sizes(keys)
    n_layers = read_n_layers(keys)
    global_rope = read_rope(keys, sizes["head_dim"], "half", default_base=_GLOBAL_ROPE_BASE)
    local_rope = replace(global_rope, base=keys.number("rope.freq_base_swa", _LOCAL_ROPE_BASE), scaling_factor=1.0)
    global_layer = LayerConfig(global_rope)
    local_layer = LayerConfig(local_rope, keys.integer("attention.sliding_window"))
    # The 27B model was trained with queries scaled by its share of the width instead of its head size.
    query_width = sizes["hidden_size"] / sizes["n_heads"] if n_layers == _LAYERS_OF_27B else sizes["head_dim"]
    return ModelConfig(
        **sizes,
        query_scale=query_width**-0.5,
        activation="gelu_tanh",
        layers=tuple(local_layer if local else global_layer for local in _local_layers(keys, n_layers)),
        embedding_scale=sizes["hidden_size"] ** 0.5,
        qk_norm=True,
        post_norms=True,
        attention_softcap=keys.number("attn_logit_softcapping", 0.0) or None,
        logit_softcap=keys.number("final_logit_softcapping", 0.0) or None,
    )


def _local_layers(keys: Keys, n_layers: int) -> list[bool]:
    """Which layers have the window; the file may give the period of the global ones, or a list [layers]."""
    name = "attention.sliding_window_pattern"
    pattern = keys.source.metadata.get(keys.full(name))
    if isinstance(pattern, np.ndarray):
        if len(pattern) != n_layers:
            raise ModelError(f"metadata key {keys.full(name)} has {len(pattern)} entries for {n_layers} layers")
        return [bool(local) for local in pattern]
    period = keys.integer(name, _LAYERS_PER_GLOBAL)
    return [(i + 1) % period != 0 for i in range(n_layers)]
