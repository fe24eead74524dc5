"""The gate: a path may be so far from the f32 reference as bench/quality_gate.toml says (docs/quality-gate.md)."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import model_path
from larql.evaluate import Evaluation, Figures, Row, bundled_text, compare, engine_rows
from larql.model import Model
from larql.source import open_model
from reference import Array, Reference

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest needs it there

LIMITS: Mapping[str, Mapping[str, dict[str, Any]]] = tomllib.loads(
    (Path(__file__).parents[1] / "bench" / "quality_gate.toml").read_text("utf-8")
)
GATED = {"kl_first", "kl_mean_after_first", "kl_p99", "top1", "flips"}
PARTIAL = 128  # tokens of the text that the planted paths, which are slow, are judged on

pytestmark = pytest.mark.timeout(1800)  # seconds; the largest model takes minutes in f32


def breaches(figures: Figures, limits: Mapping[str, Any]) -> list[str]:
    """What is beyond its limit; `missed` goes before the limits that it names."""
    exceptions = limits.get("missed", {})
    found = [
        f"{name} is {getattr(figures, name):.6g}, the limit is {exceptions.get(name, limit):g}"
        for name, limit in (limits | {"non_finite": 0}).items()
        if name != "missed" and not is_within(figures, name, exceptions.get(name, limit))
    ]
    needless = [name for name in exceptions if is_within(figures, name, limits[name])]
    return found + [f"{name} meets its limit, so `missed` must not name it" for name in needless]


def is_within(figures: Figures, name: str, limit: float) -> bool:
    value: float = getattr(figures, name)
    return value >= limit if name == "top1" else value <= limit


def judge(path: Path, rows: Iterable[Row], limits: Mapping[str, Any], n_tokens: int | None = None) -> list[str]:
    """The breaches of a path on the beginning of the bundled text, by default all of it."""
    reference = Model(open_model(path), precision="reference")
    ids = reference.encode(bundled_text())[:n_tokens]
    return breaches(compare(ids, engine_rows(reference.engine, ids), {"path": rows}).paths["path"], limits)


@pytest.mark.parametrize(("name", "precision"), [(name, path) for name, paths in LIMITS.items() for path in paths])
def test_the_gate(name: str, precision: str) -> None:
    path = model_path(name)
    model = Model(open_model(path), precision=precision)
    rows = engine_rows(model.engine, model.encode(bundled_text()))
    assert not (found := judge(path, rows, LIMITS[name][precision])), f"{name}, {precision}: {'; '.join(found)}"


def test_every_limit_is_stated() -> None:
    for paths in LIMITS.values():
        for limits in paths.values():
            assert set(limits) - {"missed"} == GATED
            assert set(limits.get("missed", {})) <= GATED


# The gate itself


class Coarse(Reference):
    """The reference with the inputs of all matrix products in integers that share a scale: a worse path."""

    def __init__(self, path: Path, width: int, largest: int) -> None:
        super().__init__(path)
        self.block_width, self.largest = width, largest

    def linear(self, name: str, x: Array) -> Array:
        return super().linear(name, self.coarse(x))

    def norm(self, name: str, x: Array) -> Array:
        y = super().norm(name, x)
        return self.coarse(y) if name == "output_norm" else y  # the head's input

    def coarse(self, x: Array) -> Array:
        """x [T, columns] in integers up to `largest`, one scale for each `block_width`, and back."""
        padded = np.pad(x, ((0, 0), (0, -x.shape[1] % self.block_width)))
        blocks = padded.reshape(len(x), -1, self.block_width)
        scales = np.abs(blocks).max(axis=-1, keepdims=True) / np.float32(self.largest)
        quants = np.rint(blocks / np.where(scales == 0, np.float32(1), scales))
        return (quants * scales).reshape(padded.shape)[:, : x.shape[1]]


@pytest.mark.parametrize(("width", "largest"), [(256, 63), (256, 127), (32, 127)])
def test_a_planted_worse_path_fails(smollm_path: Path, width: int, largest: int) -> None:
    ids = Model(open_model(smollm_path)).encode(bundled_text())[:PARTIAL]
    rows = Coarse(smollm_path, width, largest).logits(ids)
    found = judge(smollm_path, rows, LIMITS["smollm2-135m"]["fast"], PARTIAL)
    print(found)
    assert any(breach.startswith("kl_mean_after_first is ") for breach in found)


def test_an_independent_path_in_f32_passes(smollm_path: Path) -> None:
    ids = Model(open_model(smollm_path)).encode(bundled_text())[:PARTIAL]
    rows = Reference(smollm_path).logits(ids)
    assert not judge(smollm_path, rows, limits_without_exceptions("smollm2-135m"), PARTIAL)
