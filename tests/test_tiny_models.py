"""Small random models of every family and weight format against the numpy forward pass."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from engines import feed, open_engine
from reference import Reference
from tiny_models import FAMILIES, WEIGHT_TYPES, write_tiny_model

IDS = random.Random(5).choices(range(301), k=40)
# Relative to the spread of the logits. f32 sums in another order; int8 activations and an f16 cache.
REFERENCE_LIMIT = 2e-4
FAST_LIMIT = 0.05


def error(got: np.ndarray, want: np.ndarray) -> float:
    """Root mean square of the difference, relative to the spread of `want`."""
    return float(np.sqrt(np.mean((got - want) ** 2)) / want.std())


@pytest.mark.parametrize("weight_type", WEIGHT_TYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_and_format(family: str, weight_type: str, tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "tiny.gguf", family, weight_type, seed=3, tied=family != "llama")
    want = Reference(path).logits(IDS)
    reference = open_engine(path, "reference")
    got = feed(reference, reference.new_sequence(), IDS)
    assert np.abs(got - want).max() < REFERENCE_LIMIT * want.std() * 10
    assert error(got, want) < REFERENCE_LIMIT
    fast = open_engine(path, "fast")
    assert error(feed(fast, fast.new_sequence(), IDS), want) < FAST_LIMIT


VARIANTS = {
    "llama-frequency-factors": ("llama", {"rope_freqs": True}),
    "llama-linear-scaling": ("llama", {"metadata": {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}}),
    "llama-partial-rotation": ("llama", {"metadata": {"rope.dimension_count": 20}}),
    "qwen2-untied": ("qwen2", {"tied": False}),
    "gemma3-logit-softcap": ("gemma3", {"metadata": {"final_logit_softcapping": 3.0}}),
    "gemma3-attention-softcap": ("gemma3", {"metadata": {"attn_logit_softcapping": 2.0}}),
    "gemma3-27b-query-scale": ("gemma3", {"n_layers": 62}),
    "gemma3-other-pattern": ("gemma3", {"metadata": {"attention.sliding_window_pattern": 3}}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_of_families(variant: str, tmp_path: Path) -> None:
    family, options = VARIANTS[variant]
    path = write_tiny_model(tmp_path / "tiny.gguf", family, "F32", **options)
    reference = open_engine(path, "reference")
    want = Reference(path).logits(IDS)
    assert error(feed(reference, reference.new_sequence(), IDS), want) < REFERENCE_LIMIT * 5


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tap_shows_the_residual_stream(family: str, tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "tiny.gguf", family, "Q8_0")
    engine = open_engine(path, "reference")
    sequence = engine.new_sequence()
    logits, residuals = engine.trace([(sequence, i, token, i % 2 == 0) for i, token in enumerate(IDS)])
    numpy = Reference(path)
    want = numpy.residuals(IDS)
    assert residuals.shape == want.shape
    assert np.abs(residuals - want).max() < 1e-3 * np.abs(want).max()
    assert error(logits, numpy.logits(IDS)[::2]) < REFERENCE_LIMIT
