"""How fast a model decodes when another process keeps one of its cores busy.

usage: python bench/busy_neighbour.py MODEL [--json]

For each number of threads up to the default, the model decodes alone and beside a process that does nothing but count,
in turns. The process is pinned to one of the CPUs that this one may use, which only Linux can do; it ends with its
turn, or with this program. MODEL is what `larql bench` takes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from typing import Any, NamedTuple

from larql.bench import PROMPT, circumstances
from larql.contest import Decoder, Turns
from larql.errors import LarqlError
from larql.figures import ratio, spread
from larql.model import Model
from larql.roofline import default_threads, refuse_debug_build
from larql.source import open_model

FORMAT = 1  # of the record
TURNS = 7
TOKENS = 64  # of a turn: some tenths of a second of a small model, in which the system divides its time many times
# The neighbour. It looks for its parent now and then, which may end without a chance to end it.
SPIN = """
import os, sys
os.sched_setaffinity(0, {int(sys.argv[1])})
print(flush=True)
while os.getppid() == int(sys.argv[2]):
    for _ in range(100_000):
        pass
"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="How fast a model decodes beside a busy process.")
    parser.add_argument("model", metavar="MODEL", help="what larql bench takes")
    parser.add_argument("--json", action="store_true", help="print a record")
    options = parser.parse_args(arguments)
    try:
        record = measure(options.model)
    except LarqlError as error:
        print(f"busy_neighbour.py: {error}", file=sys.stderr)
        return 1
    print(json.dumps(record) if options.json else as_table(record))
    return 0


def measure(name: str) -> dict[str, Any]:
    """A record, ready for JSON. Raises LarqlError."""
    refuse_debug_build()
    if not hasattr(os, "sched_setaffinity"):
        raise LarqlError("only Linux can pin the busy process to a CPU")
    cpu = max(os.sched_getaffinity(0))
    file = open_model(name)
    runs: dict[int, Runs] = {}
    for threads in range(1, default_threads() + 1):
        print(f"decoding on {threads} thread{'s' if threads > 1 else ''}", file=sys.stderr)
        model = Model(file, threads=threads)
        fill = model.encode(PROMPT)
        runs[threads] = take_turns(Decoder(model, fill, TOKENS), cpu)
    return {
        "kind": "neighbour",
        "format": FORMAT,
        "date": datetime.now(timezone.utc).date().isoformat(),
        **circumstances(name, file, model),
        "settings": {"turns": TURNS, "tokens": TOKENS, "depth": len(fill)},
        **summary(runs),
    }


class Runs(NamedTuple):
    """Seconds of each token, for each turn."""

    alone: list[list[float]]
    busy: list[list[float]]


def take_turns(decoder: Decoder, cpu: int) -> Runs:
    """Decodes alone and beside the neighbour, again and again."""
    decoder.run()  # which does not count
    runs = Runs([], [])
    for _ in range(TURNS):
        runs.alone.append(decoder.run())
        with neighbour(cpu):
            runs.busy.append(decoder.run())
    return runs


@contextmanager
def neighbour(cpu: int) -> Iterator[int]:
    """A process that keeps a CPU busy until the block ends; its id. Raises LarqlError when it does not start."""
    command = [sys.executable, "-I", "-S", "-c", SPIN, str(cpu), str(os.getpid())]
    # In a session of its own, Ctrl-C is for this program only, and the neighbour does not complain about it.
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        try:
            assert process.stdout
            if not process.stdout.readline():
                raise LarqlError(f"the busy process did not start on CPU {cpu}")
            yield process.pid
        finally:
            process.kill()


def summary(runs: Mapping[int, Runs]) -> dict[str, Any]:
    """The figures of a record, from the runs of each number of threads; the largest number is the default."""
    sweep = [
        {
            "threads": threads,
            "alone": _rates(taken.alone),
            "busy": _rates(taken.busy),
            "ratio": ratio(Turns(ours=taken.busy, peer=taken.alone)),
        }
        for threads, taken in runs.items()
    ]
    best = {kind: max(sweep, key=lambda row: row[kind]["tok_s"])["threads"] for kind in Runs._fields}
    return {**max(sweep, key=lambda row: row["threads"]), "best_threads": best, "sweep": sweep}


def as_table(record: dict[str, Any]) -> str:
    """A record for people."""
    settings, best = record["settings"], record["best_threads"]
    lines = [
        f"{record['model']['name']}: tok/s of {settings['turns']} turns of {settings['tokens']} tokens",
        "",
        f"{'threads':<8}{'alone':>10}{'busy':>10}   busy to alone",
    ]
    for row in record["sweep"]:
        pairs = row["ratio"]
        speeds = f"{row['alone']['tok_s']:>10.1f}{row['busy']['tok_s']:>10.1f}"
        lines.append(f"{row['threads']:<8}{speeds}   {pairs['median']:.2f} [{pairs['min']:.2f} to {pairs['max']:.2f}]")
    lines += ["", f"default {record['threads']}, best alone {best['alone']}, best beside the neighbour {best['busy']}"]
    return "\n".join(lines)


def _rates(runs: list[list[float]]) -> dict[str, float]:
    return spread("tok_s", [len(run) / sum(run) for run in runs])


if __name__ == "__main__":
    sys.exit(main())
