"""What bench_kernels.py needs of pytest: options, the tables at the end, and the record."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

import larql
from kernel_tables import COLUMNS, Cells, kernel_tables
from larql.errors import LarqlError
from larql.files import new_file
from larql.machine import cache_sizes, machine_facts, source_commit
from larql.roofline import ReadProbe, refuse_debug_build

FORMAT = 1  # of the record
CACHES = 4  # times the largest cache that a matrix should hold: of a smaller one, caches keep much between products
ROWS = pytest.StashKey[list[dict[str, Any]]]()
PROBE = pytest.StashKey[ReadProbe]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("kernels")
    group.addoption("--matrix-mib", type=int, default=256, help="MiB of a matrix for N <= 8 (default: 256)")
    group.addoption("--record", type=Path, metavar="FILE", help="write the figures there, as one JSON object")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("matrix_mib") < 1:
        raise pytest.UsageError("--matrix-mib must be at least 1")
    try:
        refuse_debug_build()
    except LarqlError as error:
        raise pytest.UsageError(str(error)) from error
    config.option.benchmark_quiet = True  # pytest-benchmark's own table has a line for each of hundreds of cases
    config.stash[ROWS] = []


@pytest.fixture(scope="session")
def kernel_rows(pytestconfig: pytest.Config) -> list[dict[str, Any]]:
    """The figures of the cases so far."""
    return pytestconfig.stash[ROWS]


@pytest.fixture(scope="session")
def read_probe(pytestconfig: pytest.Config) -> ReadProbe:
    """Made when the first case asks for it: its buffer is large."""
    return pytestconfig.stash.setdefault(PROBE, ReadProbe())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config) -> None:
    rows, mib = config.stash[ROWS], config.getoption("matrix_mib")
    say = terminalreporter.write_line
    if rows:
        terminalreporter.section("kernels")
    for title, lines in kernel_tables(rows):
        say(title)
        for line in aligned([COLUMNS, *lines]):
            say(line)
        say("")
    if any(row["isa"] == "scalar" for row in rows):
        say("scalar is slow and has smaller matrices, which caches may hold")
    if rows and mib << 20 < CACHES * max(cache_sizes().values(), default=0):
        say(f"matrices of {mib} MiB are in part held by caches; --matrix-mib makes them larger")
    if (probe := config.stash.get(PROBE, None)) and (shortage := probe.shortage()):
        say(shortage)
    if path := config.getoption("record"):
        if exitstatus or not rows:
            say(f"{path} was not written: a record needs figures, and all answers right", red=True)
            return
        with new_file(path) as file:
            file.write(json.dumps(record(rows, mib)).encode() + b"\n")
        say(f"written to {path}")


def record(rows: list[dict[str, Any]], matrix_mib: int) -> dict[str, Any]:
    """The figures, and what they were measured on."""
    return {
        "kind": "kernels",
        "format": FORMAT,
        "date": datetime.now(timezone.utc).date().isoformat(),
        "machine": machine_facts(),
        "build": {"version": larql.__version__, "commit": source_commit()},
        "settings": {"matrix_mib": matrix_mib},
        "rows": rows,
    }


def aligned(lines: Sequence[Cells]) -> list[str]:
    """Cells in columns: the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    head = "{:<%d}" + "  {:>%d}" * (len(widths) - 1)
    return [(head % tuple(widths)).format(*line) for line in lines]
