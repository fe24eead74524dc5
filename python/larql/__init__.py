"""LARQL: runs quantised large language models fast on CPUs.

Names are imported when they are first used, so that the command line starts at once.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from larql.errors import ContextError, InputError, LarqlError, ModelError

if TYPE_CHECKING:
    from larql import kernels
    from larql._core import __version__
    from larql.chat import Chat
    from larql.generate import Generation, GenerationConfig, TextStream, Timings
    from larql.model import Model, load
    from larql.session import Session
    from larql.trace import Lens, Trace

_HOME = {
    "Chat": "larql.chat",
    "Generation": "larql.generate",
    "GenerationConfig": "larql.generate",
    "Lens": "larql.trace",
    "Model": "larql.model",
    "Session": "larql.session",
    "TextStream": "larql.generate",
    "Timings": "larql.generate",
    "Trace": "larql.trace",
    "__version__": "larql._core",
    "load": "larql.model",
}

__all__ = [
    "Chat",
    "ContextError",
    "Generation",
    "GenerationConfig",
    "InputError",
    "LarqlError",
    "Lens",
    "Model",
    "ModelError",
    "Session",
    "TextStream",
    "Timings",
    "Trace",
    "__version__",
    "kernels",
    "load",
]


def __getattr__(name: str) -> Any:
    if name == "kernels":
        return importlib.import_module("larql.kernels")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
