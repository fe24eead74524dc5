"""Speed of the matrix product for every weight type, instruction set, number of threads and of columns N.

usage: pytest bench/bench_kernels.py [-k "Q4_K and avx2 and t2"] [--matrix-mib 256] [--record FILE]

A case is the product of a matrix of random blocks with N columns of activations. Before each timed product comes what
it is compared to: a read of as many bytes for N = 1, the product with one column for N up to 8, as many multiply-adds
in registers for the large N. Ratios are formed in each of these turns. Every answer is checked; no time fails a case.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import lru_cache, partial
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray
from pytest_benchmark.fixture import BenchmarkFixture

from larql import _core
from larql.errors import InputError
from larql.figures import rounded, spread
from larql.roofline import ReadProbe, default_threads

# Where the blocks of a weight type hold floats, the byte of each that has the sign and the exponent: the other bytes
# may be anything.
EXPONENTS = {
    **{"F32": (3,), "F16": (1,), "BF16": (1,)},
    **{"Q4_0": (1,), "Q4_1": (1, 3), "Q5_0": (1,), "Q5_1": (1, 3), "Q8_0": (1,)},
    **{"Q4_K": (1, 3), "Q5_K": (1, 3), "Q6_K": (209,)},
}
FLOATS = ("F32", "F16", "BF16")
WIDTH = 2048  # columns of the matrix
HEIGHT = 4096  # its rows, for MANY
FEW, MANY = (1, 2, 4, 8), (64, 512)  # columns of activations; memory limits the first, arithmetic the others
ROUNDS = 5
SCALAR_SHARE = 16  # the scalar kernels' matrices are smaller by this factor: they take seconds for what others do in ms
SAMPLE = 32  # rows of the answer that are checked
# Largest error of a sum over the sum of its terms' magnitudes. In int8, activations are off by at most a 254th of the
# largest in their block of 32: about 1 % if no errors of a sum cancelled, but of 2,048 a tenth of that remains at most.
LIMITS = {"int8": 0.002, "f32": 1e-5}

Array = NDArray[np.float32]


def isas() -> list[str]:
    """The instruction sets that this CPU can run: the core names them to who asks for one that there is not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LARQL_ISA", "?")
        with pytest.raises(InputError) as refusal:
            _core.measure_peak("f32", threads=1)
    return str(refusal.value).rpartition(": ")[2].split()


class Weights(NamedTuple):
    """A matrix, and some of its rows decoded."""

    matrix: _core.Matrix
    sample: NDArray[np.intp]  # which rows
    decoded: NDArray[np.float64]  # [sample, WIDTH]
    n_weights: int


@lru_cache(maxsize=2)  # one for FEW and one for MANY
def random_weights(weight_type: str, rows: int, threads: int) -> Weights:
    """Blocks of random bits, but for the exponents of their floats: these are between 2^-8 and 1/2, of either sign."""
    rng = np.random.default_rng(rows)
    _, block_bytes = block_size(weight_type)
    words = rng.integers(0, 1 << 64, rows * row_bytes(weight_type) // 8, dtype=np.uint64)
    blocks = words.view(np.uint8).reshape(-1, block_bytes)
    kept, exponent = (0x80, 0x3E) if weight_type in ("F32", "BF16") else (0x83, 0x1C)
    for at in EXPONENTS[weight_type]:
        blocks[:, at] = blocks[:, at] & kept | exponent
    data = blocks.reshape(rows, -1)
    sample = np.unique(np.linspace(0, rows - 1, SAMPLE).astype(np.intp))  # with the first and the last row
    decoded = _core.dequantize(weight_type, data[sample].reshape(-1)).reshape(-1, WIDTH)
    matrix = _core.Matrix(weight_type, data, WIDTH, threads=threads)
    return Weights(matrix, sample, decoded.astype(np.float64), rows * WIDTH)


def block_size(weight_type: str) -> tuple[int, int]:
    """Weights and bytes of a block."""
    return GGML_QUANT_SIZES[GGMLQuantizationType[weight_type]]


def row_bytes(weight_type: str) -> int:
    """Bytes of a row of the matrix; a multiple of 8."""
    weights, n_bytes = block_size(weight_type)
    return WIDTH // weights * n_bytes


def rows_of(weight_type: str, isa: str, n: int, matrix_mib: int) -> int:
    """The height of the matrix for a case."""
    rows = HEIGHT if n in MANY else (matrix_mib << 20) // row_bytes(weight_type)
    return rows // SCALAR_SHARE if isa == "scalar" else rows


def check(weights: Weights, x: Array, answer: Array, limit: float) -> None:
    """Compares the sampled rows to sums in f64."""
    assert np.isfinite(answer).all()
    columns = x.astype(np.float64)
    errors = np.abs(answer[:, weights.sample] - columns @ weights.decoded.T)
    largest = float((errors / (np.abs(columns) @ np.abs(weights.decoded).T)).max())
    assert largest < limit


def references(
    weights: Weights, x: Array, kind: str, threads: int, probe: Callable[[], ReadProbe]
) -> list[Callable[[], float]]:
    """What a product is compared to, as the seconds that it takes; of two, the faster counts."""
    matrix, n = weights.matrix, len(x)

    def read(*, prefetch: bool) -> float:
        return matrix.n_bytes / 1e9 / probe().gb_s(threads, prefetch=prefetch)

    def product_with_one_column() -> float:
        start = time.perf_counter()
        matrix.multiply(x[:1])
        return time.perf_counter() - start

    def multiply_adds() -> float:
        return n * weights.n_weights / _core.measure_peak(kind, threads=threads)

    if n == 1:
        return [partial(read, prefetch=False), partial(read, prefetch=True)]
    return [product_with_one_column] if n in FEW else [multiply_adds]


def figures(weights: Weights, n: int, seconds: list[float], limits: list[list[float]]) -> dict[str, float]:
    """What a record says of a case whose turns took `seconds`, and each of its references so many."""
    gb, gmac = weights.matrix.n_bytes / 1e9, n * weights.n_weights / 1e9
    limit = min(limits, key=median)
    pairs = list(zip(seconds, limit, strict=True))
    made = {"gb_s": rounded(gb / median(seconds)), "gmac_s": rounded(gmac / median(seconds))}
    if n == 1:
        made["read_gb_s"] = rounded(gb / median(limit))
    if n in MANY:
        made["peak_gmac_s"] = rounded(gmac / median(limit))
    if 1 < n <= max(FEW):
        return made | spread("cost", [ours / single for ours, single in pairs])
    return made | spread("share", [best / ours for ours, best in pairs])


# The last varies slowest: cases that share a matrix follow each other.
@pytest.mark.parametrize("n", FEW + MANY, ids="n{}".format)
@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("threads", sorted({1, default_threads()}), ids="t{}".format)
@pytest.mark.parametrize("weight_type", EXPONENTS)
def test_product(
    weight_type: str,
    threads: int,
    isa: str,
    n: int,
    benchmark: BenchmarkFixture,
    kernel_rows: list[dict[str, Any]],
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LARQL_ISA", isa)
    rows = rows_of(weight_type, isa, n, request.config.getoption("matrix_mib"))
    weights = random_weights(weight_type, rows, threads)
    x = np.random.default_rng(n).standard_normal((n, WIDTH), dtype=np.float32)
    kind = "f32" if weight_type in FLOATS else "int8"
    compared = references(weights, x, kind, threads, partial(request.getfixturevalue, "read_probe"))
    limits: list[list[float]] = [[] for _ in compared]

    def take_turns() -> None:
        for seconds, reference in zip(limits, compared, strict=True):
            seconds.append(reference())

    weights.matrix.multiply(x)  # the first one does not count
    answer = benchmark.pedantic(weights.matrix.multiply, (x,), setup=take_turns, rounds=ROUNDS)
    check(weights, x, answer, LIMITS[kind])
    if benchmark.stats:  # there are none with --benchmark-disable
        made = figures(weights, n, benchmark.stats.stats.data, limits)
        benchmark.extra_info.update(made)
        case = {"type": weight_type, "isa": isa, "threads": threads, "n": n, "matrix_bytes": weights.matrix.n_bytes}
        kernel_rows.append(case | made)
