"""A model in a GGUF file, to be packed: in memory, or into a .vindex."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from larql._core import Gguf
from larql.cache import file_sha256
from larql.config import ModelConfig
from larql.errors import ModelError
from larql.families import read_model
from larql.families.keys import TensorInfo, architecture
from larql.tokenizer import Tokenizer


class GgufFile:
    """An open GGUF file, all its shards together.

    Opening it, and whatever reads it, raises ModelError when it cannot be used.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.gguf_path = path
        self.gguf = Gguf(path)

    @cached_property
    def metadata(self) -> Mapping[str, Any]:
        """All metadata of the file."""
        return self.gguf.metadata()

    @cached_property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """All tensors of the file by name."""
        return {name: TensorInfo(type, shape, n_bytes) for name, type, shape, n_bytes in self.gguf.tensors()}

    def read_f32(self, name: str) -> NDArray[np.float32]:
        """One tensor decoded to f32, in its shape."""
        return self.gguf.read_f32(name)

    @property
    def name(self) -> str | None:
        """What the model calls itself."""
        name = self.metadata.get("general.name")
        return name if isinstance(name, str) else None

    @property
    def architecture(self) -> str:
        """The family's name."""
        return architecture(self)

    @property
    def config(self) -> ModelConfig:
        """The model as the engine runs it."""
        return self._model[0]

    @property
    def tensor_names(self) -> dict[str, str]:
        """The file's name of each of the engine's tensors."""
        return self._model[1]

    @cached_property
    def _model(self) -> tuple[ModelConfig, dict[str, str]]:
        return read_model(self)

    @property
    def weights(self) -> tuple[Gguf, dict[str, str]]:
        """For an engine, which packs them in memory."""
        return self.gguf, self.tensor_names

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that the metadata describe."""
        return Tokenizer.from_metadata(self.metadata)

    @property
    def chat_template(self) -> str | None:
        """The model's chat template, if it has one."""
        template = self.metadata.get("tokenizer.chat_template")
        return template if isinstance(template, str) else None

    @cached_property
    def sha256(self) -> str:
        """The file's checksum in hex; of several shards, that of their checksums, one after another."""
        try:
            sums = [file_sha256(path) for path in map(Path, self.gguf.paths)]
        except OSError as error:
            raise ModelError(f"{self.path}: cannot be read: {error.strerror or error}") from error
        return sums[0] if len(sums) == 1 else hashlib.sha256("".join(sums).encode()).hexdigest()
