"""The busy neighbour: the order of turns, the figures, the record, and that the process always ends. No test looks at
a speed.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import pytest

import larql._core
from larql.contest import Decoder
from larql.errors import LarqlError
from test_roofline import assert_names_no_host
from tiny_models import write_tiny_model

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))
import busy_neighbour
from busy_neighbour import Runs, as_table, main, neighbour, summary, take_turns

BENCH = Path(__file__).parents[1] / "bench"

needs_linux = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="only Linux can pin a process")


def test_turns_are_alone_and_busy_by_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    @contextmanager
    def fake_neighbour(cpu: int) -> Iterator[None]:
        events.append(f"start {cpu}")
        yield
        events.append("end")

    class FakeDecoder:
        def run(self) -> list[float]:
            events.append("run")
            return [len(events)]

    monkeypatch.setattr(busy_neighbour, "neighbour", fake_neighbour)
    monkeypatch.setattr(busy_neighbour, "TURNS", 2)
    runs = take_turns(cast(Decoder, FakeDecoder()), 3)
    assert events == ["run", *2 * ["run", "start 3", "run", "end"]]
    assert runs == Runs(alone=[[2], [6]], busy=[[4], [8]])


def test_the_summary_is_of_the_default_and_knows_the_best() -> None:
    one = Runs(alone=[[0.02, 0.02], [0.02, 0.02], [0.04, 0.04]], busy=[[0.02, 0.03], [0.025, 0.025], [0.04, 0.04]])
    two = Runs(alone=[[0.01, 0.01], [0.01, 0.01], [0.01, 0.01]], busy=[[0.04, 0.04], [0.02, 0.02], [0.05, 0.05]])
    made = summary({1: one, 2: two})
    assert made["threads"] == 2
    assert made["alone"] == {"tok_s": 100, "tok_s_min": 100, "tok_s_max": 100}
    assert made["busy"] == {"tok_s": 25, "tok_s_min": 20, "tok_s_max": 50}
    assert made["ratio"] == {"median": 0.25, "min": 0.2, "max": 0.5, "pairs": 3}
    assert made["best_threads"] == {"alone": 2, "busy": 1}
    assert [(row["threads"], row["busy"]["tok_s"], row["ratio"]["median"]) for row in made["sweep"]] == [
        (1, 40, 0.8),
        (2, 25, 0.25),
    ]
    table = as_table({"model": {"name": "tiny"}, "settings": {"turns": 3, "tokens": 2}, **made})
    assert "\n2            100.0      25.0   0.25 [0.20 to 0.50]\n" in table
    assert table.endswith("\ndefault 2, best alone 2, best beside the neighbour 1")


@needs_linux
def test_the_neighbour_is_pinned_and_gone_after_an_error() -> None:
    cpu = min(os.sched_getaffinity(0))
    ids: list[int] = []

    def fail_beside_it() -> None:
        with neighbour(cpu) as process_id:
            ids.append(process_id)
            assert os.sched_getaffinity(process_id) == {cpu}
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_beside_it()
    with pytest.raises(ProcessLookupError):
        os.kill(ids[0], 0)


@needs_linux
def test_a_neighbour_that_does_not_start_is_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(LarqlError, match="did not start on CPU 100000"), neighbour(100_000):
        pass
    assert "Error" in capfd.readouterr().err


PROGRAM = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from busy_neighbour import neighbour
with neighbour(min(os.sched_getaffinity(0))):
    os.kill(os.getpid(), signal.SIGKILL)
"""


@needs_linux
def test_the_neighbour_ends_with_a_program_that_is_killed() -> None:
    # The neighbour has the same stderr, which ends with the last process that holds it.
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(BENCH)], stderr=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (-9, "")


@needs_linux
def test_a_real_record_becomes_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(larql._core, "build_profile", "release")
    monkeypatch.setenv("LARQL_NUM_THREADS", "2")
    for name, value in (("TURNS", 1), ("TOKENS", 3)):
        monkeypatch.setattr(busy_neighbour, name, value)
    path = write_tiny_model(tmp_path / "tiny.gguf", "llama", "Q4_K")
    assert main([str(path), "--json"]) == 0
    text = capsys.readouterr().out
    assert_names_no_host(text)
    record = json.loads(text)
    assert [row["threads"] for row in record["sweep"]] == [1, 2]
    (tmp_path / "01-first.tiny.neighbour.json").write_text(text, "utf-8")
    comparison = importlib.import_module("records").comparison(tmp_path)
    assert f"| {record['machine']['cpu']} | tiny | 2 | 01-first |" in comparison


def test_elsewhere_it_says_what_it_needs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(larql._core, "build_profile", "release")
    monkeypatch.delattr(os, "sched_setaffinity", raising=False)
    assert main(["gemma3-270m"]) == 1
    assert capsys.readouterr().err == "busy_neighbour.py: only Linux can pin the busy process to a CPU\n"
