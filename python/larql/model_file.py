"""An open model, whatever it is stored in."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from larql._core import Engine, Gguf, Vindex
from larql.config import ModelConfig
from larql.errors import ModelError
from larql.families.keys import TensorInfo
from larql.roofline import default_threads
from larql.tokenizer import Tokenizer


class ModelFile(Protocol):
    """A GGUF file (GgufFile), which is packed in memory, or a .vindex (VindexFolder), which is packed."""

    @property
    def path(self) -> Path:
        """What was opened: a GGUF file, though its .vindex may be used, or else a folder."""

    @property
    def gguf_path(self) -> Path | None:
        """The GGUF file with the same model, if it is at hand."""

    @property
    def sha256(self) -> str:
        """The checksum, in hex, of the file that the model comes from."""

    @property
    def name(self) -> str | None:
        """What the model calls itself."""

    @property
    def architecture(self) -> str:
        """The family's name."""

    @property
    def config(self) -> ModelConfig:
        """The model as the engine runs it."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """All tensors by name."""

    @property
    def weights(self) -> Vindex | tuple[Gguf, dict[str, str]]:
        """What an engine gets its weights from."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer."""

    @property
    def chat_template(self) -> str | None:
        """The model's chat template, if it has one."""


def make_engine(
    file: ModelFile, *, threads: int | None = None, context: int | None = None, precision: str = "fast"
) -> Engine:
    """An engine for whatever the tokenizer gives. Raises ModelError when weights, config and tokenizer do not fit."""
    if file.tokenizer.vocab_size > file.config.vocab_size:
        raise ModelError(
            f"the tokenizer has {file.tokenizer.vocab_size} tokens, but the embedding has {file.config.vocab_size}"
        )
    if threads is None:
        threads = default_threads()
    return Engine(file.weights, file.config.to_json(), threads=threads, context=context, precision=precision)
