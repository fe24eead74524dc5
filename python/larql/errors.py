"""The errors a caller can act on; everything else is a bug."""

from __future__ import annotations


class LarqlError(Exception):
    """Base of every error that LARQL raises on purpose."""


class ModelError(LarqlError):
    """The model file cannot be used: missing, broken, or of a kind that is not supported."""


class InputError(LarqlError, ValueError):
    """An argument does not make sense."""


class ContextError(InputError):
    """A text does not fit: `needed` tokens where the context holds `limit`."""

    def __init__(self, message: str, needed: int, limit: int) -> None:
        super().__init__(message)
        self.needed = needed
        self.limit = limit
