"""Llama 2, 3, 3.1 and 3.2, and the models that share their form: Mistral, SmolLM2."""

from __future__ import annotations

from dataclasses import replace

from larql.config import LayerConfig, ModelConfig, RopeConfig
from larql.errors import ModelError
from larql.families.gguf_keys import read_n_layers, read_rope, read_sizes, refuse_window
from larql.families.gguf_names import ROPE_FACTORS
from larql.families.keys import Keys, Source

ARCHITECTURES = ("llama",)


def config(source: Source) -> ModelConfig:
    """The model of a `llama` file, whose Q and K rows are stored for adjacent RoPE pairs."""
    keys = Keys(source)
    sizes = read_sizes(keys)
    refuse_window(keys, sizes["context_length"])
    rope = _with_frequency_factors(read_rope(keys, sizes["head_dim"], "adjacent"), source)
    return ModelConfig(
        **sizes,
        query_scale=sizes["head_dim"] ** -0.5,
        activation="silu",
        layers=(LayerConfig(rope),) * read_n_layers(keys),
    )


def _with_frequency_factors(rope: RopeConfig, source: Source) -> RopeConfig:
    """Llama 3.1 and later divide each frequency by a factor that the file holds as a tensor [dims / 2]."""
    factors = source.tensors.get(ROPE_FACTORS)
    if factors is None:
        return rope
    if factors.shape != (rope.dims // 2,):
        raise ModelError(f"tensor {ROPE_FACTORS} has shape {factors.shape}, expected {(rope.dims // 2,)}")
    return replace(rope, frequency_factors=tuple(source.read_f32(ROPE_FACTORS).tolist()))
