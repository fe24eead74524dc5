"""The `reference` precision against logits that numpy computed from the same files (tests/golden/logits)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from engines import logits_at, open_engine

GOLDEN = Path(__file__).parent / "golden" / "logits"
LIMIT = 5e-3


@pytest.mark.parametrize("name", ["gemma3-270m", "smollm2-135m", "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b"])
def test_reference_gives_the_golden_logits(name: str, request: pytest.FixtureRequest) -> None:
    fixture = {"gemma3-270m": "gemma", "smollm2-135m": "smollm"}.get(name, "qwen05" if "0.5b" in name else "qwen15")
    engine = open_engine(request.getfixturevalue(f"{fixture}_path"), "reference")
    golden = json.loads((GOLDEN / f"{name}.json").read_text())
    assert golden["rows"]
    for row in golden["rows"]:
        checks = row["checks"]
        logits = logits_at(engine, row["ids"], [check["position"] for check in checks])
        assert len(logits) == len(checks)
        for check, got in zip(checks, logits.astype(np.float64), strict=True):
            ids, values = zip(*check["top"], strict=True)
            where = f"{row['text'][:20]!r} at {check['position']}"
            assert np.abs(got[list(ids)] - values).max() < LIMIT, where
            assert abs(got.mean() - check["mean"]) < LIMIT, where
            log_sum = got.max() + np.log(np.exp(got - got.max()).sum())
            assert abs(log_sum - check["logsumexp"]) < LIMIT, where
            assert np.argsort(-got, kind="stable")[0] == ids[0], where
