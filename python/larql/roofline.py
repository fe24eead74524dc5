"""What this machine's memory and arithmetic can do: the limits that a speed is compared to.

numpy is imported when something is measured: a start of the program only reads what an earlier measurement found.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from larql.cache import cache_folder
from larql.errors import InputError, LarqlError
from larql.files import new_file
from larql.machine import available_memory, cache_sizes, cpu_model, machine_facts, usable_cores
from larql.plots import load_plotting, save_figure

VERSION = 1  # of the measurement; results of other versions are not comparable
FULL_BUFFER = 1 << 30  # bytes read at a time: far more than caches hold
_MIN_BUFFER = 1 << 26  # bytes; less says nothing about memory
_CACHES = 4  # times the largest cache that a buffer must hold
_SATURATED = 0.97  # share of the best bandwidth from which on more threads are not worth it; repeats differ by 1-2 %
_PEAK_REPEATS = 3

Say = Callable[[str], None]


def refuse_debug_build() -> None:
    """Raises LarqlError when the core was built without optimisation: its speed would mislead."""
    from larql import _core

    if _core.build_profile != "release":
        raise LarqlError(f"this is a {_core.build_profile} build, whose speed means nothing; build with --release")


class ReadProbe:
    """A buffer that no cache holds, and how fast threads read it.

    It takes 1 GiB (more where caches are huge), or a third of the memory that is available when that is less.
    """

    def __init__(self) -> None:
        import numpy as np

        wanted = max(FULL_BUFFER, _CACHES * max(cache_sizes().values(), default=0))
        available = available_memory()
        self.n_bytes = wanted if available is None else min(wanted, available // 3 // _MIN_BUFFER * _MIN_BUFFER)
        self.is_full = self.n_bytes == wanted
        if self.n_bytes < _MIN_BUFFER:
            raise LarqlError(f"there is not enough memory to measure its speed: {(available or 0) / 1e6:.0f} MB")
        # Every page is written, because all pages that never were are the same one, in the cache.
        self._buffer = np.full(self.n_bytes, 1, np.uint8)

    def gb_s(self, threads: int, *, prefetch: bool) -> float:
        """GB/s of one pass."""
        from larql._core import measure_read

        return self.n_bytes / measure_read(self._buffer, threads=threads, prefetch=prefetch) / 1e9

    def best_gb_s(self, threads: int) -> float:
        """The best GB/s of two plain and two prefetched passes."""
        return max(self.gb_s(threads, prefetch=prefetch) for prefetch in (False, True, False, True))

    def shortage(self) -> str | None:
        """What to say about a buffer that is smaller than it should be."""
        return None if self.is_full else f"memory is short: reads are measured on {self.n_bytes >> 20} MiB only"


def measure(repeats: int = 5, say: Say = lambda _: None) -> dict[str, Any]:
    """Measures reads for each number of threads and multiplications for one and for all; remembers the result.

    GB/s are medians and bests over the repeats, which go round all settings so that a disturbance hits each of them
    alike. Raises LarqlError for a debug build and when memory is short.
    """
    if repeats < 1:
        raise InputError(f"repeat is {repeats}; it must be at least 1")
    refuse_debug_build()
    probe = ReadProbe()
    if shortage := probe.shortage():
        say(shortage)
    counts = range(1, usable_cores() + 1)
    settings = [(threads, prefetch) for threads in counts for prefetch in (False, True)]
    for threads, prefetch in settings:
        probe.gb_s(threads, prefetch=prefetch)  # a first pass that does not count
    passes: dict[tuple[int, bool], list[float]] = {setting: [] for setting in settings}
    for done in range(repeats):
        say(f"reads: round {done + 1} of {repeats}")
        for threads, prefetch in settings:
            passes[threads, prefetch].append(probe.gb_s(threads, prefetch=prefetch))
    say("multiplications")
    rows = [_read_row(threads, passes[threads, False], passes[threads, True]) for threads in counts]
    saturation = _saturation(rows)
    result = {
        "kind": "roofline",
        "version": VERSION,
        "machine": machine_facts(),
        "buffer_bytes": probe.n_bytes,
        "repeats": repeats,
        "read": rows,
        "saturation": saturation,
        "peaks": [_peak_row(threads) for threads in sorted({1, counts[-1]})],
    }
    if probe.is_full:
        _remember(result)
        say(f"from now on {saturation['threads']} threads are the default here; to undo it, remove {_note()}")
    return result


def default_threads() -> int:
    """Threads where none are asked for: those of the core's rule, lowered to what saturates memory if that was measured
    on this machine and LARQL_NUM_THREADS does not say otherwise.
    """
    from larql import _core

    threads = _core.default_threads()
    saturation = None if os.environ.get("LARQL_NUM_THREADS") else cached_saturation()
    return threads if saturation is None else min(threads, saturation)


def cached_saturation() -> int | None:
    """Threads from which on this machine reads memory no faster, when `larql roofline` has measured it."""
    with contextlib.suppress(OSError, LarqlError, ValueError, KeyError, TypeError):
        known = json.loads(_note().read_text("utf-8"))
        if known["key"] == _key() and isinstance(known["saturation"]["threads"], int):
            return int(known["saturation"]["threads"])
    return None


def as_table(result: dict[str, Any]) -> str:
    """The result of `measure` for people."""
    machine, saturation = result["machine"], result["saturation"]
    lines = [
        f"{machine['cpu']}, {machine['cores']} cores, "
        + ", ".join(f"{name} {size >> 10} KiB" for name, size in machine["caches"].items()),
        f"reads of {result['buffer_bytes'] / (1 << 30):.2f} GiB in GB/s: median of {result['repeats']} (best)",
        "",
        f"{'threads':<10}{'plain':>16}{'prefetched':>16}",
        *(f"{row['threads']:<10}{_cell(row['plain']):>16}{_cell(row['prefetched']):>16}" for row in result["read"]),
        "",
        f"saturated by {saturation['threads']} threads: {saturation['gb_s']:.1f} GB/s",
        "",
        f"{'threads':<10}{'f32 GMAC/s':>16}{'int8 GMAC/s':>16}",
        *(f"{row['threads']:<10}{row['f32_gmac_s']:>16.1f}{row['int8_gmac_s']:>16.1f}" for row in result["peaks"]),
    ]
    return "\n".join(lines)


def save_plot(result: dict[str, Any], path: Path) -> None:
    """Draws bandwidth over threads into a file; its ending chooses the format."""
    figure = load_plotting().Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    threads = [row["threads"] for row in result["read"]]
    for kind in ("plain", "prefetched"):
        axes.plot(threads, [row[kind]["median"] for row in result["read"]], marker="o", label=f"{kind} loads")
    axes.axvline(result["saturation"]["threads"], color="grey", linestyle=":", label="saturated")
    axes.set(title=result["machine"]["cpu"], xlabel="threads", ylabel="read bandwidth, GB/s", xticks=threads)
    axes.set_ylim(0, 1.1 * max(row["gb_s"] for row in result["read"]))
    axes.legend(loc="lower right")
    save_figure(figure, path)


def _read_row(threads: int, plain: list[float], prefetched: list[float]) -> dict[str, Any]:
    """One number of threads: the better of both kinds of loads counts."""
    row = {name: _median_and_best(values) for name, values in (("plain", plain), ("prefetched", prefetched))}
    return {"threads": threads, **row, "gb_s": max(kind["median"] for kind in row.values())}


def _median_and_best(values: list[float]) -> dict[str, float]:
    return {"median": round(statistics.median(values), 2), "best": round(max(values), 2)}


def _peak_row(threads: int) -> dict[str, float]:
    from larql._core import measure_peak

    row: dict[str, float] = {"threads": threads}
    for kind in ("f32", "int8"):
        rates = [measure_peak(kind, threads=threads) for _ in range(_PEAK_REPEATS)]
        row[f"{kind}_gmac_s"] = round(statistics.median(rates) / 1e9, 1)
    return row


def _saturation(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The first row that reaches nearly the best bandwidth of all."""
    best = max(row["gb_s"] for row in rows)
    row = next(row for row in rows if row["gb_s"] >= _SATURATED * best)
    return {"threads": row["threads"], "gb_s": row["gb_s"]}


def _cell(kind: dict[str, float]) -> str:
    return f"{kind['median']:.1f} ({kind['best']:.1f})"


def _key() -> list[str | int]:
    """What must be the same for a remembered result to hold."""
    return [cpu_model(), usable_cores(), VERSION]


def _note() -> Path:
    name = hashlib.sha256(json.dumps(_key()).encode()).hexdigest()[:16]
    return cache_folder() / "roofline" / f"{name}.json"


def _remember(result: dict[str, Any]) -> None:
    """Keeps a result; a cache that cannot be written costs only that."""
    with contextlib.suppress(OSError, LarqlError), new_file(_note()) as file:
        file.write(json.dumps({"key": _key(), **result}).encode())
