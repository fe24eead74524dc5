"""JSON values into dataclasses, strictly: every key and no other, every value of its field's type."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import fields, is_dataclass
from types import UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from larql.errors import ModelError

T = TypeVar("T")


def decode(kind: type[T], value: object, place: str) -> T:
    """`value`, as `json.loads` gives it, as a `kind`; a tuple is made from an array.

    Raises ModelError, starting with `place`, which says where the value comes from.
    """
    try:
        decoded: T = _decode(kind, value, "")
    except ValueError as error:
        raise ModelError(f"{place}: {error}") from None
    return decoded


def _decode(kind: Any, value: Any, key: str) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if is_dataclass(kind) and isinstance(value, dict):
        return _decode_fields(kind, value, key)
    if origin is tuple and isinstance(value, list):
        return tuple(_decode(arguments[0], item, f"{key}[{i}]") for i, item in enumerate(value))
    if origin is dict and isinstance(value, dict):
        return {name: _decode(arguments[1], item, _below(key, name)) for name, item in value.items()}
    if origin is UnionType:  # X | None
        return None if value is None else _decode(arguments[0], value, key)
    if origin is Literal and isinstance(value, str) and value in arguments:
        return value
    if kind is float and type(value) is int:
        with contextlib.suppress(OverflowError):
            return float(value)
    if type(value) is kind:
        return value
    raise ValueError(f"{key or 'it'} is {_shown(value)}, which it cannot be")


def _decode_fields(kind: Any, value: dict[str, Any], key: str) -> Any:
    hints = _hints(kind)
    for name in hints:
        if name not in value:
            raise ValueError(f"{_below(key, name)} is missing")
    for name in value:
        if name not in hints:
            raise ValueError(f"{_shown(_below(key, name))} is no key that there is")
    return kind(**{name: _decode(hint, value[name], _below(key, name)) for name, hint in hints.items()})


def _below(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}


def _shown(value: object) -> str:
    """A value that may be long, or not printable, for a message."""
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
