"""Writes COMPARISON.md from the records beside it.

usage: python bench/records.py [FOLDER] [--check]

FOLDER is bench/baselines/cpu by default. With --check nothing is written, and the exit code is 1 when the file is not
what would be written. A record is what `larql bench --output-file` or `larql roofline --json` has written; the name of
its file begins with the step, and a dot ends that: 03-prefetch.gemma3-270m.json.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent / "baselines" / "cpu"
HEADING = """\
# Comparison

Written by `python bench/records.py` from the records in this folder; [README.md](README.md) says how they are made and
named. Rates are medians. A ratio is our speed over the peer's on the same file, in turns, as median [lowest to
highest]: above 1, ours is faster.
"""
SPEED_COLUMNS = (
    *("machine", "model", "threads", "depth", "step", "ISA", "decode tok/s", "GB/s", "of the roofline"),
    *("prefill tok/s", "decode to peer", "prefill to peer", "date", "build", "note"),
)
MACHINE_COLUMNS = (
    *("machine", "cores", "threads", "plain GB/s", "prefetched GB/s", "saturated", "f32 GMAC/s", "int8 GMAC/s"),
    "record",
)

Row = tuple[str, ...]


class RecordError(Exception):
    """A file that is no record; the text names it."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Writes COMPARISON.md from the records beside it.")
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when the file is not up to date")
    options = parser.parse_args(arguments)
    target = options.folder / "COMPARISON.md"
    try:
        text = comparison(options.folder)
    except RecordError as error:
        print(f"records.py: {error}", file=sys.stderr)
        return 1
    if not options.check:
        target.write_text(text, "utf-8")
    elif not target.is_file() or target.read_text("utf-8") != text:
        print(f"records.py: {target} is not what the records give; run python bench/records.py", file=sys.stderr)
        return 1
    return 0


def comparison(folder: Path) -> str:
    """The text of COMPARISON.md. Raises RecordError."""
    speeds: list[Row] = []
    machines: list[Row] = []
    for path in sorted(folder.glob("*.json")):
        try:
            record = json.loads(path.read_text("utf-8"))
            if record["kind"] == "bench":
                speeds += speed_rows(step_of(path), record)
            elif record["kind"] == "roofline":
                machines += machine_rows(step_of(path), record)
            else:
                raise RecordError(f"{path.name} is of the unknown kind {record['kind']!r}")
        except KeyError as error:
            raise RecordError(f"{path.name} has no {error}") from error
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise RecordError(f"{path.name} is no record: {error}") from error
    text = HEADING
    for title, columns, rows in (
        ("Models", SPEED_COLUMNS, sorted(speeds, key=_order)),
        ("Machines", MACHINE_COLUMNS, machines),
    ):
        lines = table(columns, rows) if rows else ["There are no records yet."]
        text += f"\n## {title}\n\n" + "\n".join(lines) + "\n"
    return text


def step_of(path: Path) -> str:
    """What stands before the first dot of the file's name."""
    return path.name.partition(".")[0]


def speed_rows(step: str, record: dict[str, Any]) -> Iterator[Row]:
    """One row for each number of threads in a record of `larql bench`."""
    build, settings = record["build"], record["settings"]
    model = record["model"]["name"] + ("" if settings["precision"] == "fast" else f" ({settings['precision']})")
    for result in record.get("sweep", [record]):
        decode, prefill = result["decode"], result["prefill"]
        ratio = result.get("ratio", {})
        yield (
            record["machine"]["cpu"],
            model,
            str(result["threads"]),
            str(decode["depth"]),
            step,
            build["isa"],
            f"{decode['tok_s']:.1f}",
            f"{decode['gb_s']:.1f}",
            f"{100 * decode['roofline_share']:.0f} %",
            f"{prefill['tok_s']:.1f} ({prefill['tokens']})",
            _ratio(ratio.get("decode"), result.get("peer")),
            _ratio(ratio.get("prefill"), result.get("peer")),
            record["date"],
            build["commit"] or build["version"],
            record["note"] or "",
        )


def machine_rows(step: str, record: dict[str, Any]) -> Iterator[Row]:
    """One row for each number of threads in a record of `larql roofline`."""
    machine, saturation = record["machine"], record["saturation"]
    peaks = {peak["threads"]: peak for peak in record["peaks"]}
    for row in record["read"]:
        peak = peaks.get(row["threads"])
        yield (
            machine["cpu"],
            str(machine["cores"]),
            str(row["threads"]),
            f"{row['plain']['median']:.1f}",
            f"{row['prefetched']['median']:.1f}",
            "yes" if row["threads"] >= saturation["threads"] else "",
            f"{peak['f32_gmac_s']:.0f}" if peak else "",
            f"{peak['int8_gmac_s']:.0f}" if peak else "",
            step,
        )


def table(columns: Row, rows: Iterable[Row]) -> Iterator[str]:
    """A Markdown table."""
    yield "| " + " | ".join(columns) + " |"
    yield "|" + "---|" * len(columns)
    for row in rows:
        yield "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in row) + " |"


def _ratio(figures: dict[str, Any] | None, peer: dict[str, Any] | None) -> str:
    if not figures or not peer:
        return ""
    return f"{figures['median']:.2f} [{figures['min']:.2f} to {figures['max']:.2f}] {peer['name']}"


def _order(row: Row) -> tuple[str, str, int, int, str]:
    machine, model, threads, depth, step = row[:5]
    return machine, model, int(threads), int(depth), step


if __name__ == "__main__":
    sys.exit(main())
