"""Reading a model file's metadata, with errors that name the key."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from larql.errors import ModelError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class TensorInfo(NamedTuple):
    """What a file says of one tensor: weight type, shape with the contiguous dimension last, and bytes."""

    type: str
    shape: tuple[int, ...]
    n_bytes: int


class Source(Protocol):
    """The part of an open model file that a family reads."""

    @property
    def metadata(self) -> Mapping[str, Any]:
        """All metadata of the file."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """All tensors of the file by name."""

    def read_f32(self, name: str) -> NDArray[np.float32]:
        """One tensor decoded to f32, in its shape."""


def architecture(source: Source) -> str:
    """The value of `general.architecture`."""
    return _text(source, "general.architecture", None)


class Keys:
    """The metadata keys of a file's own architecture, named without its prefix.

    A key without a default is required. A missing key, a value of the wrong kind or out of range raises ModelError.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.architecture = architecture(source)

    def full(self, name: str) -> str:
        """The key as it stands in the file."""
        return f"{self.architecture}.{name}"

    def integer(self, name: str, default: int | None = None, *, minimum: int = 1) -> int:
        """An integer of at least `minimum`."""
        value = _lookup(self.source, self.full(name), default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise _wrong_kind(self.full(name), "an integer", value)
        if value < minimum:
            raise ModelError(f"metadata key {self.full(name)} is {value}; it must be at least {minimum}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number."""
        value = _lookup(self.source, self.full(name), default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise _wrong_kind(self.full(name), "a number", value)
        if not math.isfinite(value):
            raise ModelError(f"metadata key {self.full(name)} is {value}; it must be finite")
        return float(value)

    def flag(self, name: str, default: bool | None = None) -> bool:
        """A truth value."""
        value = _lookup(self.source, self.full(name), default)
        if not isinstance(value, bool):
            raise _wrong_kind(self.full(name), "true or false", value)
        return value

    def text(self, name: str, default: str | None = None) -> str:
        """A string."""
        return _text(self.source, self.full(name), default)


def _text(source: Source, key: str, default: str | None) -> str:
    value = _lookup(source, key, default)
    if not isinstance(value, str):
        raise _wrong_kind(key, "a string", value)
    return value


def _lookup(source: Source, key: str, default: Any) -> Any:
    value = source.metadata.get(key, default)
    if value is None:
        raise ModelError(f"the model file lacks the metadata key {key}")
    return value


def _wrong_kind(key: str, expected: str, value: Any) -> ModelError:
    found = repr(value) if isinstance(value, str | int | float) else f"a value of type {type(value).__name__}"
    return ModelError(f"metadata key {key}: expected {expected}, found {found}")
