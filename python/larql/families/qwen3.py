"""Qwen3, dense models: Q and K heads are normalised, and there are no biases."""

from __future__ import annotations

from larql.config import LayerConfig, ModelConfig
from larql.families.gguf_keys import read_n_layers, read_rope, read_sizes, refuse_window
from larql.families.keys import Keys, Source

ARCHITECTURES = ("qwen3",)


def config(source: Source) -> ModelConfig:
    """The model of a `qwen3` file."""
    keys = Keys(source)
    sizes = read_sizes(keys)
    refuse_window(keys, sizes["context_length"])
    rope = read_rope(keys, sizes["head_dim"], "half")
    return ModelConfig(
        **sizes,
        query_scale=sizes["head_dim"] ** -0.5,
        activation="silu",
        layers=(LayerConfig(rope),) * read_n_layers(keys),
        qk_norm=True,
    )
