"""Model families: from a file's metadata to the ModelConfig that the engine executes.

A family is one module with two names: ARCHITECTURES, the `general.architecture` values that it understands, and
`config`, which reads the metadata.
"""

from __future__ import annotations

from typing import Protocol

from larql.config import ModelConfig
from larql.errors import ModelError
from larql.families import gemma3, llama, qwen2, qwen3
from larql.families.gguf_names import tensor_names
from larql.families.keys import Source, architecture

__all__ = ["FAMILIES", "read_model"]


class Family(Protocol):
    """What a family's module holds."""

    @property
    def ARCHITECTURES(self) -> tuple[str, ...]:
        """The values of `general.architecture` that the family understands."""

    def config(self, source: Source) -> ModelConfig:
        """The model of a file of this family."""


FAMILIES: tuple[Family, ...] = (gemma3, llama, qwen2, qwen3)


def read_model(source: Source) -> tuple[ModelConfig, dict[str, str]]:
    """The model in `source`, and the source's name of each tensor that the engine asks for.

    Raises ModelError for an unknown architecture, a key that is missing or has a value that LARQL cannot run, and a
    tensor that is missing or would be left unused.
    """
    name = architecture(source)
    for family in FAMILIES:
        if name in family.ARCHITECTURES:
            config = family.config(source)
            return config, tensor_names(config, source)
    supported = ", ".join(name for family in FAMILIES for name in family.ARCHITECTURES)
    raise ModelError(f"models of architecture {name!r} are not supported; supported are {supported}")
