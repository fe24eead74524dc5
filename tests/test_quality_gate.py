"""The gate: a path may be so far from the f32 reference as bench/quality_gate.toml says (docs/quality-gate.md)."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from conftest import model_path
from larql.evaluate import Figures, Row, bundled_text, compare, engine_rows
from larql.model import Model
from larql.source import open_model
from reference import Array, Reference

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest brings it there

GATE = Path(__file__).parents[1] / "bench" / "quality_gate.toml"
TABLES: dict[str, dict[str, dict[str, float]]] = tomllib.loads(GATE.read_text("utf-8"))
DOCUMENT = Path(__file__).parents[1] / "docs" / "quality-gate.md"
GATED = {"kl_first", "kl_mean_after_first", "kl_p99", "top1", "flips"}

Limits = Mapping[str, float]

pytestmark = pytest.mark.timeout(1800)  # seconds; the largest model takes minutes in f32


def limits_of(name: str, path: str) -> Limits:
    """What is allowed; logits that are not finite never are."""
    return TABLES[name][path] | {"non_finite": 0}


def breaches(figures: Figures, limits: Limits) -> list[str]:
    """The figures beyond their limits."""
    values = {name: getattr(figures, name) for name in limits}
    return [
        f"{name} is {values[name]:.6g}, the limit is {limit:g}"
        for name, limit in limits.items()
        if not (values[name] >= limit if name == "top1" else values[name] <= limit)  # NaN is a breach
    ]


def measure(model: Path, ids: list[int], **paths: Iterable[Row]) -> dict[str, Figures]:
    """The distance of paths from the reference on the ids of the bundled text."""
    engine = Model(open_model(model), precision="reference").engine
    return compare(ids, engine_rows(engine, ids), paths).paths


@pytest.mark.parametrize(("name", "path"), [(name, path) for name, paths in TABLES.items() for path in paths])
def test_the_gate(name: str, path: str) -> None:
    model = Model(open_model(model_path(name)), precision=path)
    ids = model.encode(bundled_text())
    figures = measure(model_path(name), ids, path=engine_rows(model.engine, ids))["path"]
    found = breaches(figures, limits_of(name, path))
    assert not found, f"{name}, {path}: {'; '.join(found)}"
    assert documented()[name] == cells(figures), "docs/quality-gate.md has the figures of another state"


def documented() -> dict[str, list[str]]:
    """The figures of `fast` in the document, whose table has the models in the order of the limits."""
    rows = re.findall(r"\*\*fast\*\* \|(.*)\|[^|]*\|$", DOCUMENT.read_text("utf-8"), re.MULTILINE)
    return dict(zip(TABLES, ([cell.strip(" *") for cell in row.split("|")] for row in rows), strict=True))


def cells(figures: Figures) -> list[str]:
    """How the document writes figures."""
    mean = f"{figures.kl_mean_after_first:.6f}"
    return [
        *(f"{figures.perplexity:.4f}", f"{figures.kl_first:.5f}", mean, f"{figures.kl_median:.5f}"),
        *(f"{figures.kl_p99:.4f}", f"{figures.top1:.3f}", str(figures.flips)),
    ]


def test_every_limit_is_stated() -> None:
    for table in (table for paths in TABLES.values() for table in paths.values()):
        assert set(table) == GATED


# The gate itself


class Coarse(Reference):
    """A worse path: inputs of matrix products become integers up to `largest`, with one scale for each `width`."""

    def __init__(self, path: Path, width: int, largest: int) -> None:
        super().__init__(path)
        self.block, self.largest = width, np.float32(largest)

    def linear(self, name: str, x: Array) -> Array:
        return super().linear(name, self.coarse(x))

    def norm(self, name: str, x: Array) -> Array:
        y = super().norm(name, x)
        return self.coarse(y) if name == "output_norm" else y  # the head's input

    def coarse(self, x: Array) -> Array:
        """x [T, columns] as integers and back."""
        padded = np.pad(x, ((0, 0), (0, -x.shape[1] % self.block)))
        blocks = padded.reshape(len(x), -1, self.block)
        scales = np.abs(blocks).max(axis=-1, keepdims=True) / self.largest
        quants = np.rint(blocks / np.where(scales == 0, np.float32(1), scales))
        return (quants * scales).reshape(padded.shape)[:, : x.shape[1]]


@pytest.fixture(scope="module")
def trials(smollm_path: Path) -> dict[str, Figures]:
    """Paths computed in numpy, on SmolLM2."""
    ids = Model(open_model(smollm_path)).encode(bundled_text())
    return measure(
        smollm_path,
        ids,
        f32=Reference(smollm_path).logits(ids),
        blocks_of_32=Coarse(smollm_path, 32, 127).logits(ids),
        coarse_blocks_of_256=Coarse(smollm_path, 256, 63).logits(ids),
    )


@pytest.mark.parametrize("path", ["blocks_of_32", "coarse_blocks_of_256"])
def test_a_planted_worse_path_fails(trials: dict[str, Figures], path: str) -> None:
    found = breaches(trials[path], limits_of("smollm2-135m", "fast"))
    assert any(breach.startswith("kl_mean_after_first is ") for breach in found), trials[path]


def test_an_independent_path_in_f32_passes(trials: dict[str, Figures]) -> None:
    assert not breaches(trials["f32"], limits_of("smollm2-135m", "fast"))
    assert trials["f32"].kl_mean_after_first < 1e-6


def test_each_figure_can_fail() -> None:
    limits = {"kl_first": 0.1, "kl_mean_after_first": 0.1, "kl_p99": 0.1, "top1": 0.9, "flips": 2, "non_finite": 0}
    good = Figures(9.0, 0.1, 0.1, 9.0, 0.1, 0.9, 2, 0)
    assert not breaches(good, limits)
    assert breaches(replace(good, top1=0.89), limits) == ["top1 is 0.89, the limit is 0.9"]
    for name in set(limits) - {"top1"}:
        assert breaches(replace(good, **{name: 3}), limits) == [f"{name} is 3, the limit is {limits[name]:g}"]
    assert breaches(replace(good, kl_p99=float("nan")), limits) == ["kl_p99 is nan, the limit is 0.1"]
