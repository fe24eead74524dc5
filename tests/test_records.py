"""The table of records: what it shows, what it refuses, and that the one in the repository is up to date."""

from __future__ import annotations

import copy
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]

RESULT = {
    "threads": 2,
    "prefill": {"tokens": 512, "tok_s": 400.25},
    "decode": {"depth": 5, "tok_s": 70.04, "gb_s": 17.36, "roofline_share": 0.594},
}
RECORD: dict[str, Any] = {
    "kind": "bench",
    "date": "2026-02-03",
    "note": "a | b",
    "machine": {"cpu": "Some CPU"},
    "build": {"version": "0.1.0", "commit": "abc123", "isa": "avx2"},
    "model": {"name": "tiny"},
    "settings": {"precision": "fast"},
    **RESULT,
}
PEER = {
    "peer": {"name": "llama.cpp"},
    "ratio": {
        "decode": {"median": 1.4, "min": 1.35, "max": 1.446, "pairs": 5},
        "prefill": {"median": 0.5, "min": 0.4, "max": 0.6, "pairs": 5},
    },
}
ROOFLINE = {
    "kind": "roofline",
    "machine": {"cpu": "Some CPU", "cores": 2},
    "read": [
        {"threads": 1, "plain": {"median": 19.04}, "prefetched": {"median": 20.0}, "gb_s": 20.0},
        {"threads": 2, "plain": {"median": 29.5}, "prefetched": {"median": 29.0}, "gb_s": 29.5},
    ],
    "saturation": {"threads": 2, "gb_s": 29.5},
    "peaks": [{"threads": 2, "f32_gmac_s": 103.4, "int8_gmac_s": 410.0}],
}


@pytest.fixture(scope="module")
def records() -> ModuleType:
    """bench/records.py, which is a program and belongs to no package."""
    spec = importlib.util.spec_from_file_location("records", ROOT / "bench" / "records.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["records"] = module
    spec.loader.exec_module(module)
    return module


def write(folder: Path, name: str, record: Any) -> None:
    (folder / name).write_text(json.dumps(record), "utf-8")


def rows(text: str, title: str) -> list[list[str]]:
    """The cells of one table, without its head."""
    section = text.split(f"## {title}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").replace("\\|", "\0").split("|")] for line in lines[1:]]


def test_the_table_of_the_repository_is_up_to_date(records: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert records.main(["--check"]) == 0, capsys.readouterr().err


def test_records_become_rows(records: ModuleType, tmp_path: Path) -> None:
    write(tmp_path, "01-first.tiny.json", RECORD)
    write(tmp_path, "02-next.tiny.json", RECORD | PEER)
    reference = copy.deepcopy(RECORD) | {"note": None}
    reference["settings"]["precision"] = "reference"
    reference["build"]["commit"] = None
    write(tmp_path, "02-next.tiny-2.5.json", reference)
    text = records.comparison(tmp_path)
    common = ["Some CPU", "tiny", "2", "5"]
    speeds = ["avx2", "70.0", "17.4", "59 %", "400.2 (512)"]
    build = ["2026-02-03", "abc123", "a \0 b"]
    assert rows(text, "Models") == [
        [*common, "01-first", *speeds, "", "", *build],
        [*common, "02-next", *speeds, "1.40 [1.35 to 1.45] llama.cpp", "0.50 [0.40 to 0.60] llama.cpp", *build],
        ["Some CPU", "tiny (reference)", "2", "5", "02-next", *speeds, "", "", "2026-02-03", "0.1.0", ""],
    ]
    assert rows(text, "Machines") == []


def test_a_sweep_has_a_row_for_each_thread_count(records: ModuleType, tmp_path: Path) -> None:
    common = {key: value for key, value in RECORD.items() if key not in RESULT}
    write(tmp_path, "01-first.json", common | {"sweep": [RESULT | {"threads": 16}, RESULT | PEER]})
    found = rows(records.comparison(tmp_path), "Models")
    assert [row[2] for row in found] == ["2", "16"]
    assert [bool(row[10]) for row in found] == [True, False]


def test_rooflines_become_rows(records: ModuleType, tmp_path: Path) -> None:
    write(tmp_path, "01-first.json", ROOFLINE)
    assert rows(records.comparison(tmp_path), "Machines") == [
        ["Some CPU", "2", "1", "19.0", "20.0", "", "", "", "01-first"],
        ["Some CPU", "2", "2", "29.5", "29.0", "yes", "103", "410", "01-first"],
    ]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({key: value for key, value in RECORD.items() if key != "decode"}, "bad.json has no 'decode'"),
        ({"kind": "poem"}, "bad.json is of the unknown kind 'poem'"),
        ([], "bad.json is no record"),
        (RECORD | {"build": "new"}, "bad.json is no record"),
    ],
)
def test_what_is_no_record_is_named(
    records: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], record: Any, message: str
) -> None:
    write(tmp_path, "bad.json", record)
    assert records.main([str(tmp_path)]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "COMPARISON.md").exists()


def test_check_notices_a_new_record(records: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert records.main([str(tmp_path), "--check"]) == 1
    assert records.main([str(tmp_path)]) == 0
    assert records.main([str(tmp_path), "--check"]) == 0
    write(tmp_path, "01-first.json", RECORD)
    assert records.main([str(tmp_path), "--check"]) == 1
    assert "is not what the records give" in capsys.readouterr().err
    assert rows((tmp_path / "COMPARISON.md").read_text("utf-8"), "Models") == []


def test_a_real_record_has_what_the_table_needs(records: ModuleType) -> None:
    """The keys are those that tests/test_bench.py finds in records of `larql bench`."""
    from test_bench import DECODE_KEYS, PREFILL_KEYS

    assert set(RESULT["decode"]) <= DECODE_KEYS
    assert set(RESULT["prefill"]) <= PREFILL_KEYS
    assert list(records.speed_rows("01", RECORD))
