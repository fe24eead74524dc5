"""Decoding of weight formats, bit for bit against the public `gguf` package."""

import itertools

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from larql import _core, errors

# Bytes at which a block holds an f16: its scale, and its minimum where it has one.
F16_OFFSETS = {
    "F32": (),
    "F16": (0,),
    "BF16": (),
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}
F16_EXTREMES = np.array(
    # 0, -0, smallest and largest subnormal, smallest normal, max, infinities, quiet and signalling NaN, 1, -0.3
    [0x0000, 0x8000, 0x0001, 0x83FF, 0x0400, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E00, 0xFD01, 0x3C00, 0xB4CD],
    dtype="<u2",
)


def block_size(dtype: str) -> tuple[int, int]:
    """Weights and bytes of a block."""
    return gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[dtype]]


def extreme_blocks(dtype: str, rng: np.random.Generator) -> NDArray[np.uint8]:
    """Every combination of extreme f16 fields with all other bits 0, all 1, and random."""
    offsets, block_bytes = F16_OFFSETS[dtype], block_size(dtype)[1]
    blocks = []
    for fields in itertools.product(F16_EXTREMES, repeat=len(offsets)):
        for rest in (np.zeros(block_bytes), np.full(block_bytes, 255), rng.integers(0, 256, block_bytes)):
            block = rest.astype(np.uint8)
            for offset, field in zip(offsets, fields, strict=True):
                block[offset : offset + 2] = np.frombuffer(field.tobytes(), np.uint8)
            blocks.append(block)
    return np.stack(blocks)


def assert_same_bits(dtype: str, blocks: NDArray[np.uint8]) -> None:
    """Compares every weight; NaNs need only be at the same places."""
    data = blocks.reshape(-1)
    got = _core.dequantize(dtype, data)
    # The package reads float types as flat arrays, block types as rows of blocks. It also multiplies 0 by infinity.
    source = data if block_size(dtype)[0] == 1 else blocks
    with np.errstate(all="ignore"):
        want = gguf.quants.dequantize(source, gguf.GGMLQuantizationType[dtype]).reshape(-1)
    assert got.dtype == np.float32
    assert got.shape == want.shape
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    numbers = ~np.isnan(want)
    np.testing.assert_array_equal(got[numbers].view(np.uint32), want[numbers].view(np.uint32))


@pytest.mark.parametrize("dtype", F16_OFFSETS)
@pytest.mark.parametrize("n_blocks", [1, 7, 8, 9, 2000])
def test_random_bytes(dtype: str, n_blocks: int) -> None:
    rng = np.random.default_rng(n_blocks)
    assert_same_bits(dtype, rng.integers(0, 256, (n_blocks, block_size(dtype)[1]), dtype=np.uint8))


@pytest.mark.parametrize("dtype", F16_OFFSETS)
def test_extreme_blocks(dtype: str) -> None:
    assert_same_bits(dtype, extreme_blocks(dtype, np.random.default_rng(0)))


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_every_16_bit_float(dtype: str) -> None:
    assert_same_bits(dtype, np.arange(65536, dtype="<u2").view(np.uint8).reshape(-1, 2))


@pytest.mark.parametrize("dtype", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F16", "BF16"])
def test_weights_that_the_package_quantised(dtype: str) -> None:
    weights = np.random.default_rng(3).standard_normal((16, 320), dtype=np.float32)
    packed = gguf.quants.quantize(weights, gguf.GGMLQuantizationType[dtype]).view(np.uint8)
    got = _core.dequantize(dtype, packed.reshape(-1)).reshape(weights.shape)
    # A row's largest error is half a step of its 32 weights, about 3 / 8 at 4 bits.
    assert np.abs(got - weights).max() < 0.4
    assert_same_bits(dtype, packed.reshape(-1, block_size(dtype)[1]))


@pytest.mark.parametrize("dtype", F16_OFFSETS)
def test_no_blocks(dtype: str) -> None:
    assert _core.dequantize(dtype, np.zeros(0, np.uint8)).shape == (0,)


@pytest.mark.parametrize("dtype", F16_OFFSETS)
def test_bytes_that_are_not_whole_blocks(dtype: str) -> None:
    block_bytes = block_size(dtype)[1]
    for n_bytes in (1, block_bytes - 1, block_bytes + 1, 8 * block_bytes - 1):
        with pytest.raises(errors.InputError, match=rf"\b{n_bytes}\b"):
            _core.dequantize(dtype, np.zeros(n_bytes, np.uint8))


@pytest.mark.parametrize("dtype", ["Q2_K", "IQ4_NL", "q4_0", ""])
def test_unknown_types_are_named_with_the_supported_ones(dtype: str) -> None:
    with pytest.raises(errors.LarqlError, match=rf"weight type {dtype} is not supported; supported are F32 .*Q6_K"):
        _core.dequantize(dtype, np.zeros(18, np.uint8))
