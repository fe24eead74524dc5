"""The counts of instructions: docs/kernels.md shows what the record has."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "bench" / "baselines" / "cpu" / "08-neon.instructions.json"


def test_the_table_in_the_docs_is_that_of_the_record() -> None:
    spec = importlib.util.spec_from_file_location("count", ROOT / "bench" / "instructions" / "count.py")
    assert spec is not None
    assert spec.loader is not None
    count = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(count)
    lines = count.table(json.loads(RECORD.read_text("utf-8")))
    assert len(lines) == 2 + len(count.TYPES)
    assert "\n".join(lines) in (ROOT / "docs" / "kernels.md").read_text("utf-8")
    # 144 bytes at 4 instructions a cycle and 3.5 GHz: with 64 instructions a core reads 31.5 GB/s.
    assert count.cores("Q4_K", 64.0) == 127 / 31.5
