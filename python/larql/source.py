"""From a MODEL argument to an open model file."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from larql._core import Gguf
from larql.errors import ModelError
from larql.families.keys import TensorInfo
from larql.packaged import PACKAGED_MODELS, find_packaged


class ModelFile:
    """An open GGUF file, all its shards together.

    Raises ModelError when it cannot be used.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.gguf = Gguf(path)
        self.metadata: Mapping[str, Any] = self.gguf.metadata()
        self.tensors: Mapping[str, TensorInfo] = {
            name: TensorInfo(type, shape, n_bytes) for name, type, shape, n_bytes in self.gguf.tensors()
        }

    def read_f32(self, name: str) -> NDArray[np.float32]:
        """One tensor decoded to f32, in its shape."""
        return self.gguf.read_f32(name)


def open_model(model: str | os.PathLike[str]) -> ModelFile:
    """Opens the file that `model` stands for: the path of a .gguf file, or the name of a packaged model."""
    return ModelFile(resolve(model))


def resolve(model: str | os.PathLike[str]) -> Path:
    """The path of the file that `model` stands for; raises ModelError when there is none."""
    name = os.fspath(model)
    path = Path(name).expanduser()
    if path.is_file():
        return path
    if name in PACKAGED_MODELS:
        return find_packaged(name)
    raise ModelError(f"{_what_is_wrong(name, path)}; a model is a .gguf file or one of {', '.join(PACKAGED_MODELS)}")


def _what_is_wrong(name: str, path: Path) -> str:
    if path.is_dir():
        return f"{name} is a folder"
    if close := difflib.get_close_matches(name, PACKAGED_MODELS, n=1):
        return f"there is no model {name!r}, did you mean {close[0]!r}"
    return f"there is no model file {name!r}"
