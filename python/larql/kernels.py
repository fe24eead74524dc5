"""The engine's inner loops on NumPy arrays, to look at and to compare with.

They run in one thread (but for a Matrix, which has its own) by the instruction set that the environment variable
LARQL_ISA names, or else the best that this CPU has. All instruction sets give the same bits. Anything that NumPy makes
an array of is taken, as float32. A shape that does not fit raises InputError.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from larql import _core
from larql.errors import InputError

__all__ = [
    "Matrix",
    "QuantizedActivations",
    "dequantize",
    "gelu_gate",
    "quantize_activations",
    "rms_norm",
    "silu_gate",
    "softcap",
]

BLOCK = 32  # activations that share a scale


class QuantizedActivations(NamedTuple):
    """A vector x [n] as integer kernels take it: quants * scales, but for two elements that are kept as they are."""

    quants: NDArray[np.int8]  # [n], 0 where an element is kept
    scales: NDArray[np.float32]  # [n / 32, rounded up], one for each 32 quants
    kept_at: NDArray[np.uint32]  # [2], places of the two elements with the largest magnitude
    kept: NDArray[np.float32]  # [2], their values

    def dequantize(self) -> NDArray[np.float32]:
        """What the integers stand for, float32 [n]."""
        x: NDArray[np.float32] = self.quants * np.repeat(self.scales, BLOCK)[: len(self.quants)]
        x[self.kept_at] = self.kept
        return x


class Matrix:
    """A weight matrix [rows, columns] that is stored as blocks and multiplied as it is stored.

    `data` are the bytes [rows, bytes of a row] of a weight type such as Q4_K, as GGUF files have them; they are packed
    once. `precision` is `fast` (inputs in int8) or `reference` (weights decoded to f32). Raises InputError for bytes
    that do not fit, or a type that there is not.
    """

    def __init__(self, dtype: str, data: ArrayLike, columns: int, *, precision: str = "fast", threads: int = 1) -> None:
        rows = _bytes(data)
        if rows.ndim != 2:
            raise InputError(f"data has shape {list(rows.shape)}; it must be [rows, bytes of a row]")
        if not 0 < columns < 2**32 or not 0 < threads < 2**32:
            raise InputError(f"there cannot be {columns} columns and {threads} threads")
        self.dtype = dtype
        self.shape = (len(rows), columns)
        self._matrix = _core.Matrix(dtype, rows, columns, precision=precision, threads=threads)

    @property
    def n_bytes(self) -> int:
        """Bytes that a product reads: the rows, filled up to a multiple of 16."""
        return self._matrix.n_bytes

    def multiply(self, x: ArrayLike) -> NDArray[np.float32]:
        """The products [rows] with x [columns], or [n, rows] with x [n, columns]. Raises InputError."""
        return self._matrix.multiply(_floats(x))

    def __repr__(self) -> str:
        return f"<Matrix {list(self.shape)} of {self.dtype}, {self.n_bytes} bytes>"


def dequantize(dtype: str, data: ArrayLike) -> NDArray[np.float32]:
    """The weights [n] of whole blocks of a weight type, given as bytes; raises InputError for another length."""
    return _core.dequantize(dtype, _bytes(data).ravel())


def rms_norm(x: ArrayLike, weight: ArrayLike, eps: float = 1e-6) -> NDArray[np.float32]:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis (Zhang and Sennrich, 2019).

    x is [width] or [n, width], weight [width]; the result has the shape of x.
    """
    rows = _floats(x)
    if rows.ndim not in (1, 2):
        raise InputError(f"x has shape {list(rows.shape)}; it must be [width] or [n, width]")
    return _core.rms_norm(np.atleast_2d(rows), _floats(weight), eps).reshape(rows.shape)


def silu_gate(gate: ArrayLike, x: ArrayLike) -> NDArray[np.float32]:
    """gate * sigmoid(gate) * x, element by element; both have the same shape."""
    return _gate("silu", gate, x)


def gelu_gate(gate: ArrayLike, x: ArrayLike) -> NDArray[np.float32]:
    """gelu(gate) * x with GELU by its tanh approximation (Hendrycks and Gimpel, 2016); both have the same shape."""
    return _gate("gelu", gate, x)


def softcap(x: ArrayLike, cap: float) -> NDArray[np.float32]:
    """cap * tanh(x / cap), element by element."""
    values = _floats(x)
    return _core.softcap(values.ravel(), cap).reshape(values.shape)


def quantize_activations(x: ArrayLike) -> QuantizedActivations:
    """A vector [n], n at least 2, in int8 with one scale for each 32, as `fast` precision multiplies it."""
    values = _floats(x)
    if values.ndim != 1 or len(values) < 2:
        raise InputError(f"x has shape {list(values.shape)}; it must be [n] with n at least 2")
    return QuantizedActivations(*_core.quantize_activations(values))


def _gate(activation: str, gate: ArrayLike, x: ArrayLike) -> NDArray[np.float32]:
    gates, values = _floats(gate), _floats(x)
    if gates.shape != values.shape:
        raise InputError(f"the gate has shape {list(gates.shape)}, and x has {list(values.shape)}")
    return _core.gate(activation, gates.ravel(), values.ravel()).reshape(values.shape)


def _floats(x: ArrayLike) -> NDArray[np.float32]:
    return np.ascontiguousarray(x, np.float32)


def _bytes(data: ArrayLike) -> NDArray[np.uint8]:
    given = np.asarray(data)
    if given.dtype.kind not in "iu" or (given.size and not (given.min() >= 0 and given.max() < 256)):
        raise InputError("blocks are given as bytes: integers from 0 to 255")
    return np.ascontiguousarray(given, np.uint8)
