"""The kernel table: what its figures are made of, that its check finds errors, and that a run becomes tables."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from larql import _core

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))
from bench_kernels import EXPONENTS, FLOATS, LIMITS, WIDTH, check, figures, random_weights
from kernel_tables import kernel_tables

ROOT = Path(__file__).parents[1]


def test_figures_compare_within_each_turn() -> None:
    weights = random_weights("F32", 16, 1)  # 131,072 bytes
    few = figures(weights, 1, [1e-5, 2e-5, 4e-5], [[2e-5, 2e-5, 2e-5], [5e-6, 1e-5, 1e-5]])
    assert (few["gb_s"], few["gmac_s"]) == (6.5536, 1.6384)
    assert few["read_gb_s"] == 13.107, "the better of the two"
    assert (few["share"], few["share_min"], few["share_max"]) == (0.5, 0.25, 0.5)
    some = figures(weights, 8, [3e-5, 4e-5, 5e-5], [[1e-5, 2e-5, 2e-5]])
    assert (some["gmac_s"], some["cost"], some["cost_max"]) == (6.5536, 2.5, 3)
    many = figures(weights, 64, [4e-5, 4e-5, 4e-5], [[1e-5, 1e-5, 1e-5]])
    assert (many["share"], many["peak_gmac_s"]) == (0.25, 209.72)


@pytest.mark.parametrize("weight_type", EXPONENTS)
def test_weights_are_finite_and_their_products_checked(weight_type: str) -> None:
    weights = random_weights(weight_type, 80, 1)
    assert np.isfinite(weights.decoded).all()
    assert weights.decoded.std() > 0.001
    assert {0, 79} <= set(weights.sample)
    x = np.random.default_rng(1).standard_normal((2, WIDTH), dtype=np.float32)
    limit = LIMITS["f32" if weight_type in FLOATS else "int8"]
    answer = weights.matrix.multiply(x)
    check(weights, x, answer, limit)
    for wrong in (
        answer[::-1],
        0 * answer,
        np.roll(answer, 1, axis=1),
        np.where(answer == answer[1, 5], np.nan, answer),
    ):
        with pytest.raises(AssertionError):
            check(weights, x, wrong, limit)


@pytest.mark.skipif(_core.build_profile != "release", reason="a debug build has no speed to record")
def test_a_run_becomes_tables(tmp_path: Path) -> None:
    record = tmp_path / "01-first.kernels.json"
    # Not the cases with one column, which read a large buffer, nor the slow ones.
    cases = "(F32 or Q4_K) and scalar and t1 and (n2 or n64)"
    options = ["-p", "no:cacheprovider", "-k", cases, "--matrix-mib", "1", "--record", str(record)]
    command = [sys.executable, "-m", "pytest", "bench/bench_kernels.py", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\nscalar, 1 thread\n" in done.stdout
    made = json.loads(record.read_text("utf-8"))
    ((title, lines),) = kernel_tables(made["rows"])
    assert title == "scalar, 1 thread"
    assert [(line[0], [bool(cell) for cell in line[1:]]) for line in lines] == [
        (name, [False, True, False, False, True, False]) for name in ("F32", "Q4_K")
    ]
    assert {"kind", "date", "machine", "build"} <= set(made)
