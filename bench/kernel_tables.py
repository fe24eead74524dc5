"""The figures of bench_kernels.py as tables, one for each instruction set and number of threads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

COLUMNS = (
    *("type", "N = 1: GB/s (of reads)", "cost of 2", "cost of 4", "cost of 8"),
    *("N = 64: GMAC/s (of the peak)", "N = 512: GMAC/s (of the peak)"),
)

Cells = tuple[str, ...]


def kernel_tables(rows: Iterable[dict[str, Any]]) -> Iterator[tuple[str, list[Cells]]]:
    """Titles, and the lines below COLUMNS, in the order of the rows; what was not measured is an empty cell."""
    tables: dict[tuple[str, int], dict[str, dict[int, dict[str, Any]]]] = {}
    for row in rows:
        table = tables.setdefault((row["isa"], row["threads"]), {})
        table.setdefault(row["type"], {})[row["n"]] = row
    for (isa, threads), table in tables.items():
        title = f"{isa}, {threads} thread{'s' if threads > 1 else ''}"
        yield title, [_line(weight_type, by_n) for weight_type, by_n in table.items()]


def _line(weight_type: str, by_n: dict[int, dict[str, Any]]) -> Cells:
    def with_share(n: int, key: str, digits: int) -> str:
        return f"{by_n[n][key]:.{digits}f} ({100 * by_n[n]['share']:.0f} %)" if n in by_n else ""

    costs = (f"{by_n[n]['cost']:.2f}" if n in by_n else "" for n in (2, 4, 8))
    wide = (with_share(n, "gmac_s", 0) for n in (64, 512))
    return weight_type, with_share(1, "gb_s", 1), *costs, *wide
