"""The table of records: what it shows, what it refuses, and that the one in the repository is up to date."""

from __future__ import annotations

import copy
import importlib
import json
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
KERNELS: dict[str, Any] = {
    "kind": "kernels",
    "date": "2026-02-03",
    "machine": {"cpu": "Some CPU"},
    "build": {"version": "0.1.0", "commit": "abc123"},
    "rows": [
        {"type": "F16", "isa": "avx2", "threads": 1, "n": 1, "gb_s": 20.04, "gmac_s": 10.0, "share": 0.916},
        {"type": "F16", "isa": "avx2", "threads": 1, "n": 2, "gb_s": 19.0, "gmac_s": 19.0, "cost": 1.054},
        {"type": "F16", "isa": "avx2", "threads": 2, "n": 512, "gb_s": 0.1, "gmac_s": 99.6, "share": 1.0},
        {"type": "Q4_0", "isa": "avx2", "threads": 1, "n": 64, "gb_s": 1.0, "gmac_s": 150.4, "share": 0.4},
    ],
}
NEIGHBOUR = {
    "kind": "neighbour",
    "date": "2026-02-03",
    "machine": {"cpu": "Some CPU"},
    "build": {"version": "0.1.0", "commit": "abc123"},
    "model": {"name": "tiny"},
    "threads": 2,
    "alone": {"tok_s": 100.04},
    "busy": {"tok_s": 60.0},
    "ratio": {"median": 0.6, "min": 0.55, "max": 0.654, "pairs": 7},
    "best_threads": {"alone": 2, "busy": 1},
}


LADDER: dict[str, Any] = {
    "kind": "ladder",
    "date": "2026-02-03",
    "machine": {"cpu": "Some CPU"},
    "build": {"version": "0.1.0", "commit": "abc123", "isa": "avx2"},
    "model": {"name": "tiny"},
    "roofline_gb_s": 20.04,
    "rungs": [
        {"rung": "naive", "tok_s": 0.5, "gain": None, "gb_s": 0.1, "share": 0.005, "prompt_tok_s": 9.0}
        | {"agreeing": 3, "tokens": 3},
        {"rung": "cache", "tok_s": 5.0, "gain": 10.0, "gb_s": 1.0, "share": 0.05, "prompt_tok_s": 9.0}
        | {"agreeing": 7, "tokens": 8},
    ],
}


@pytest.fixture(scope="module")
def records() -> ModuleType:
    """bench/records.py, which is a program and belongs to no package."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "bench")
        return importlib.import_module("records")


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


def test_kernels_become_a_table_for_each_instruction_set_and_number_of_threads(
    records: ModuleType, tmp_path: Path
) -> None:
    write(tmp_path, "01-first.kernels.json", KERNELS)
    text = records.comparison(tmp_path)
    section = text.split("## Kernels\n")[1]
    assert "### Some CPU, 01-first\n\n2026-02-03, abc123\n" in section
    _, one, two = section.split(" thread")
    assert one.startswith(":\n")
    assert section.count("\navx2, 1 thread:\n") == section.count("\navx2, 2 threads:\n") == 1
    assert "| F16 | 20.0 (92 %) | 1.05 |  |  |  |  |\n| Q4_0 |  |  |  |  | 150 (40 %) |  |\n" in one
    assert two.endswith("| F16 |  |  |  |  |  | 100 (100 %) |\n")


def test_kernels_are_of_the_newest_step_of_each_machine(records: ModuleType, tmp_path: Path) -> None:
    for name, cpu in (("01-a", "Some CPU"), ("03-c", "Some CPU"), ("02-b", "Some CPU"), ("02-d", "Another")):
        write(tmp_path, f"{name}.kernels.json", KERNELS | {"machine": {"cpu": cpu}})
    headings = [line for line in records.comparison(tmp_path).splitlines() if line.startswith("### ")]
    assert headings == ["### Another, 02-d", "### Some CPU, 03-c"]


def test_ladders_become_a_table_for_each_machine_and_model(records: ModuleType, tmp_path: Path) -> None:
    write(tmp_path, "01-first.tiny.ladder.json", LADDER)
    write(tmp_path, "02-next.tiny.ladder.json", LADDER)
    write(tmp_path, "01-first.other.ladder.json", LADDER | {"model": {"name": "other"}})
    section = records.comparison(tmp_path).split("## Ladders\n")[1].split("\n## ")[0]
    headings = [line for line in section.splitlines() if line.startswith("### ")]
    assert headings == ["### Some CPU, other, 01-first", "### Some CPU, tiny, 02-next"]
    assert "2026-02-03, abc123, avx2; memory gave 20.0 GB/s\n" in section
    assert section.count("| naive | 0.50 |  | 0.1 | 0 % | 9.0 | 3 of 3 |\n") == 2
    assert section.count("| cache | 5.00 | 10.00 | 1.0 | 5 % | 9.0 | 7 of 8 |\n") == 2


def test_a_busy_neighbour_becomes_a_row(records: ModuleType, tmp_path: Path) -> None:
    write(tmp_path, "01-first.tiny.neighbour.json", NEIGHBOUR)
    assert rows(records.comparison(tmp_path), "Busy neighbour") == [
        ["Some CPU", "tiny", "2", "01-first", "100.0", "60.0", "0.60 [0.55 to 0.65]", "1", "2026-02-03", "abc123"]
    ]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({key: value for key, value in RECORD.items() if key != "decode"}, "bad.json has no 'decode'"),
        ({"kind": "poem"}, "bad.json is of the unknown kind 'poem'"),
        ([], "bad.json is no record"),
        (RECORD | {"build": "new"}, "bad.json is no record"),
        (KERNELS | {"rows": [KERNELS["rows"][0] | {"n": 2}]}, "bad.json has no 'cost'"),
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
