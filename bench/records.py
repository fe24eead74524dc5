"""Writes COMPARISON.md from the records beside it.

usage: python bench/records.py [FOLDER] [--check]

FOLDER is bench/baselines/cpu by default. With --check nothing is written, and the exit code is 1 when the file is not
what would be written. A record is what `larql bench --output-file`, `larql ladder --output-file` or `larql roofline
--json` has written, or
bench_kernels.py or busy_neighbour.py of this folder; the name of its file begins with the step, and a dot ends that:
03-prefetch.gemma3-270m.json.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from kernel_tables import COLUMNS as KERNEL_COLUMNS
from kernel_tables import kernel_tables

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
NEIGHBOUR_COLUMNS = (
    *("machine", "model", "threads", "step", "alone tok/s", "busy tok/s", "busy to alone", "best threads when busy"),
    *("date", "build"),
)
LADDER_COLUMNS = ("rung", "tok/s", "gain", "GB/s", "of the roofline", "prompt tok/s", "same ids")
LADDERS_NOTE = """\
Of each machine and model the newest climb of `larql ladder`: a decoder that is made fast one rung at a time. A gain is
over the rung before; `same ids` counts the tokens that f32 arithmetic would have chosen, too."""
KERNELS_NOTE = """\
Each machine's newest step. Shares are of what its memory and its arithmetic gave in turn with the product; `cost of 8`
is the time of a product with eight columns over that with one."""
NOTHING = "There are no records yet."

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
    neighbours: list[Row] = []
    machines: list[Row] = []
    kernels: list[tuple[str, str, str]] = []  # machine, step, text
    ladders: list[tuple[str, str, str]] = []  # machine and model, step, text
    for path in sorted(folder.glob("*.json")):
        step = step_of(path)
        try:
            record = json.loads(path.read_text("utf-8"))
            if record["kind"] == "bench":
                speeds += speed_rows(step, record)
            elif record["kind"] == "neighbour":
                neighbours.append(neighbour_row(step, record))
            elif record["kind"] == "roofline":
                machines += machine_rows(step, record)
            elif record["kind"] == "kernels":
                kernels.append((record["machine"]["cpu"], step, kernel_text(step, record)))
            elif record["kind"] == "ladder":
                where = f"{record['machine']['cpu']}, {record['model']['name']}"
                ladders.append((where, step, ladder_text(where, step, record)))
            elif record["kind"] != "instructions":  # those have their table in docs/kernels.md
                raise RecordError(f"{path.name} is of the unknown kind {record['kind']!r}")
        except KeyError as error:
            raise RecordError(f"{path.name} has no {error}") from error
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise RecordError(f"{path.name} is no record: {error}") from error
    text = HEADING
    for title, columns, rows in (
        ("Models", SPEED_COLUMNS, sorted(speeds, key=_order)),
        ("Busy neighbour", NEIGHBOUR_COLUMNS, sorted(neighbours)),
        ("Machines", MACHINE_COLUMNS, machines),
    ):
        lines = table(columns, rows) if rows else [NOTHING]
        text += f"\n## {title}\n\n" + "\n".join(lines) + "\n"
    text += f"\n## Ladders\n\n{LADDERS_NOTE if ladders else NOTHING}\n" + "".join(newest(ladders))
    return f"{text}\n## Kernels\n\n{KERNELS_NOTE if kernels else NOTHING}\n" + "".join(newest(kernels))


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


def neighbour_row(step: str, record: dict[str, Any]) -> Row:
    """What a record of busy_neighbour.py says of the default number of threads, and which number is best."""
    pairs, build = record["ratio"], record["build"]
    return (
        record["machine"]["cpu"],
        record["model"]["name"],
        str(record["threads"]),
        step,
        f"{record['alone']['tok_s']:.1f}",
        f"{record['busy']['tok_s']:.1f}",
        f"{pairs['median']:.2f} [{pairs['min']:.2f} to {pairs['max']:.2f}]",
        str(record["best_threads"]["busy"]),
        record["date"],
        build["commit"] or build["version"],
    )


def kernel_text(step: str, record: dict[str, Any]) -> str:
    """The tables of a record of bench_kernels.py, below a heading."""
    build = record["build"]
    text = f"\n### {record['machine']['cpu']}, {step}\n\n{record['date']}, {build['commit'] or build['version']}\n"
    for title, rows in kernel_tables(record["rows"]):
        text += f"\n{title}:\n\n" + "\n".join(table(KERNEL_COLUMNS, rows)) + "\n"
    return text


def ladder_text(where: str, step: str, record: dict[str, Any]) -> str:
    """The table of a record of `larql ladder`, below a heading."""
    build = record["build"]
    rows = [
        (
            row["rung"],
            f"{row['tok_s']:.2f}",
            "" if row["gain"] is None else f"{row['gain']:.2f}",
            f"{row['gb_s']:.1f}",
            f"{100 * row['share']:.0f} %",
            f"{row['prompt_tok_s']:.1f}",
            f"{row['agreeing']} of {row['tokens']}",
        )
        for row in record["rungs"]
    ]
    return (
        f"\n### {where}, {step}\n\n"
        f"{record['date']}, {build['commit'] or build['version']}, {build['isa']}; memory gave "
        f"{record['roofline_gb_s']:.1f} GB/s\n\n" + "\n".join(table(LADDER_COLUMNS, rows)) + "\n"
    )


def newest(texts: Iterable[tuple[str, str, str]]) -> Iterator[str]:
    """Of texts of (what, step), those of each one's last step."""
    last = {what: step for what, step, _ in sorted(texts)}
    for what, step, text in sorted(texts):
        if step == last[what]:
            yield text


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
