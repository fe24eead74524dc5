"""Kernels on arrays, against NumPy in double precision."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

import larql
from larql import kernels
from larql.errors import InputError

RANDOM = np.random.default_rng(7)


def floats(*shape: int) -> NDArray[np.float32]:
    return RANDOM.standard_normal(shape).astype(np.float32)


def test_rms_norm() -> None:
    x, weight = floats(5, 96), floats(96)
    wide = x.astype(np.float64)
    want = wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + 1e-5) * weight
    np.testing.assert_allclose(kernels.rms_norm(x, weight, 1e-5), want, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(kernels.rms_norm(x[2], weight, 1e-5), kernels.rms_norm(x, weight, 1e-5)[2])
    np.testing.assert_allclose(kernels.rms_norm([3, 4], [1, 1], 0.0), np.array([3, 4]) / np.sqrt(12.5), rtol=1e-6)


def test_gates() -> None:
    gate, x = 3 * floats(4, 33), floats(4, 33)
    wide = gate.astype(np.float64)
    np.testing.assert_allclose(kernels.silu_gate(gate, x), wide / (1 + np.exp(-wide)) * x, rtol=1e-5, atol=1e-6)
    gelu = 0.5 * wide * (1 + np.tanh(np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3)))
    np.testing.assert_allclose(kernels.gelu_gate(gate, x), gelu * x, rtol=1e-5, atol=1e-6)


def test_softcap() -> None:
    x = 40 * floats(7, 5)
    np.testing.assert_allclose(kernels.softcap(x, 30), 30 * np.tanh(x.astype(np.float64) / 30), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("n", [2, 31, 32, 100, 257])
def test_quantised_activations_are_close(n: int) -> None:
    x = floats(n)
    x[n // 2] = 100
    quantised = kernels.quantize_activations(x)
    assert quantised.quants.shape == (n,)
    assert quantised.scales.shape == ((n + 31) // 32,)
    assert sorted(quantised.kept_at) == sorted(np.argsort(-np.abs(x))[:2])
    error = np.abs(quantised.dequantize() - x)
    assert (error <= np.repeat(quantised.scales, 32)[:n] * 0.51).all()
    np.testing.assert_array_equal(quantised.kept, x[quantised.kept_at])


def test_a_matrix_multiplies_its_blocks() -> None:
    # Q8_0: an f16 scale and 32 signed quants.
    blocks = np.zeros((20, 4), [("scale", np.float16), ("quants", np.int8, 32)])
    blocks["scale"] = RANDOM.uniform(0.01, 0.02, (20, 4))
    blocks["quants"] = RANDOM.integers(-127, 128, (20, 4, 32))
    data = blocks.view(np.uint8).reshape(20, -1)
    weights = kernels.dequantize("Q8_0", data.ravel()).reshape(20, 128)
    np.testing.assert_array_equal(
        weights.reshape(20, 4, 32)[3, 2], np.float32(blocks["scale"][3, 2]) * blocks["quants"][3, 2]
    )
    x = floats(128)
    want = weights.astype(np.float64) @ x
    exact = kernels.Matrix("Q8_0", data, 128, precision="reference").multiply(x)
    fast = kernels.Matrix("Q8_0", data, 128).multiply(x)
    np.testing.assert_allclose(exact, want, rtol=1e-4, atol=1e-3)
    assert np.abs(fast - want).max() < 0.02 * np.abs(want).max()
    np.testing.assert_array_equal(kernels.Matrix("Q8_0", data.tolist(), 128).multiply(x.tolist()), fast)


def test_shapes_that_do_not_fit() -> None:
    cases = [
        (lambda: kernels.rms_norm(floats(3, 4), floats(5)), "rows of 4, and the weight has 5"),
        (lambda: kernels.rms_norm(floats(3, 4, 5), floats(5)), r"x has shape \[3, 4, 5\]"),
        (lambda: kernels.silu_gate(floats(3), floats(4)), r"the gate has shape \[3\], and x has \[4\]"),
        (lambda: kernels.quantize_activations(floats(1)), "n at least 2"),
        (lambda: kernels.quantize_activations(floats(2, 2)), "it must be"),
        (lambda: kernels.Matrix("Q8_0", np.zeros((2, 34), np.uint8), -32), "there cannot be -32 columns"),
        (lambda: kernels.Matrix("Q8_0", np.zeros((2, 34), np.uint8), 33), "bytes cannot hold"),
        (lambda: kernels.Matrix("Q8_0", np.zeros(34, np.uint8), 32), "it must be"),
        (lambda: kernels.Matrix("Q8_0", floats(2, 34), 32), "integers from 0 to 255"),
        (lambda: kernels.dequantize("Q8_0", [300] * 34), "integers from 0 to 255"),
        (lambda: kernels.dequantize("Q8_0", [3] * 33), "not whole blocks"),
    ]
    for call, message in cases:
        with pytest.raises(InputError, match=message):
            call()


def test_they_are_there_at_once() -> None:
    assert larql.kernels is kernels
    assert larql.kernels.rms_norm.__doc__
