"""Counts the instructions of matrix products for each weight type, and predicts where memory remains the limit.

usage: python bench/instructions/count.py [RECORD]

Runs `multiply` under QEMU's user emulation with a plug-in that counts: AVX2's kernels on this x86-64 machine, NEON's
on emulated AArch64 CPUs. A count is that of one product more, over its weights and columns: what comes before and
after a product drops out. Without RECORD it prints the table that docs/kernels.md has; with it, it writes the record
there first. Needs Linux on x86-64, qemu-user from 7.2 to 8, a C compiler, and what `tools/arm.py` finds or installs.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
# Bytes of 256 weights.
TYPES = {
    **{"F32": 1024, "F16": 512, "BF16": 512},
    **{"Q4_0": 144, "Q4_1": 160, "Q5_0": 176, "Q5_1": 192, "Q8_0": 272},
    **{"Q4_K": 144, "Q5_K": 176, "Q6_K": 210},
}
ROWS, COLS = 256, 2048
COLUMNS = (1, 4, 64)
WEIGHTS = 256  # that a count is for
# A performance core of an M3 Max: four vector units, about 3.5 GHz under load on all cores. Its memory gives 127 GB/s
# to reads, as the public LARQL reports.
PER_CYCLE, GHZ, MEMORY_GB_S = 4, 3.5, 127
ISAS = ("avx2", "neon", "neon-dotprod")


def main() -> None:
    if len(sys.argv) > 2 or sys.argv[1:2] in (["-h"], ["--help"]):
        sys.exit(__doc__)
    target = Path(sys.argv[1]).resolve() if sys.argv[1:] else None
    record = {"kind": "instructions", "date": date.today().isoformat(), "weights": WEIGHTS, **count()}
    if target:
        target.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    print("\n".join(table(record)))


def count() -> dict[str, Any]:
    """The compiler, and one row for each type and instruction set: instructions for WEIGHTS weights and one column."""
    sys.path.insert(0, str(ROOT / "tools"))
    import arm

    os.chdir(ROOT)
    try:
        arm.set_up([arm.LINKER, arm.EMULATOR])
    except arm.Missing as e:
        raise SystemExit(f"count.py: {e}") from None
    target = arm.target_dir().resolve()
    plugin = target / "count.so"
    build = ["cargo", "build", "--locked", "--release", "--example", "multiply"]
    subprocess.run(build, check=True)
    subprocess.run(["cc", "-shared", "-fPIC", "-O2", str(HERE / "count.c"), "-o", str(plugin)], check=True)
    arm.link_statically()
    subprocess.run([*build, "--target", arm.TARGET], check=True)
    programs = {"avx2": (["qemu-x86_64", "-cpu", "max"], "release")}
    programs |= {isa: ([arm.EMULATOR, "-cpu", cpu], f"{arm.TARGET}/release") for isa, cpu in arm.CPUS.items()}
    rows = []
    for name in TYPES:
        for isa, (emulator, folder) in programs.items():
            command = [*emulator, "-plugin", str(plugin), str(target / folder / "examples" / "multiply")]
            rows.append({"type": name, "isa": isa, **{str(n): instructions(command, isa, name, n) for n in COLUMNS}})
    compiler = subprocess.run([os.environ["RUSTC"], "--version"], capture_output=True, text=True, check=True).stdout
    return {"compiler": compiler.strip(), "rows": rows}


def instructions(command: list[str], isa: str, name: str, columns: int) -> float:
    """Instructions of a product, for WEIGHTS weights and one column."""

    def run(times: int) -> int:
        sizes = [str(size) for size in (ROWS, COLS, columns, times)]
        done = subprocess.run([*command, name, *sizes], capture_output=True, text=True, check=True)
        if done.stdout.split()[0] != isa:
            raise SystemExit(f"{command} multiplies by {done.stdout.split()[0]}, not {isa}")
        return int(re.fullmatch(r"instructions (\d+)\n", done.stderr)[1])  # type: ignore[index]

    return round((run(3) - run(1)) / 2 / (ROWS * COLS / WEIGHTS) / columns, 1)


def table(record: dict[str, Any]) -> list[str]:
    """The Markdown table: counts, and the cores that read one column's weights as fast as memory gives them."""
    counts = {(row["type"], row["isa"]): row for row in record["rows"]}
    lines = [
        "| type | AVX2: N = 1 | 4 | 64 | NEON: N = 1 | 4 | 64 | SDOT: N = 1 | 4 | 64 | cores: NEON | SDOT | N = 4 |",
        "|---|" + "---:|" * 12,
    ]
    for name in TYPES:
        by_isa = [counts[name, isa] for isa in ISAS]
        cells = [f"{row[str(n)]:.0f}" for row in by_isa for n in COLUMNS]
        _, neon, dot = by_isa
        needed = [cores(name, each) for each in (neon["1"], dot["1"], 4 * dot["4"])]
        lines.append(f"| {name} | " + " | ".join([*cells, *(f"{n:.1f}" for n in needed)]) + " |")
    return lines


def cores(name: str, instructions: float) -> float:
    """Cores whose products, at so many instructions for WEIGHTS weights, use up what memory gives."""
    core_gb_s = TYPES[name] * PER_CYCLE * GHZ / instructions
    return MEMORY_GB_S / core_gb_s


if __name__ == "__main__":
    main()
