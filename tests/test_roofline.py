"""The measurement of the machine: what is measured and remembered, and how it is shown. No test looks at a speed."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import larql._core
from larql import machine, roofline
from larql.cli import app
from larql.errors import InputError, LarqlError

MIB = 1 << 20


@pytest.fixture(autouse=True)
def small_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Three cores, a small buffer, and a cache of its own."""
    monkeypatch.setenv("LARQL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(larql._core, "build_profile", "release")
    monkeypatch.setattr(roofline, "FULL_BUFFER", 64 * MIB)
    monkeypatch.setattr(roofline, "cache_sizes", dict)
    monkeypatch.setattr(roofline, "available_memory", lambda: None)
    monkeypatch.setattr(roofline, "usable_cores", lambda: 3)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """Reads and multiplications at the speeds of a made-up machine; the list gets threads and prefetch of each read."""
    made: list[tuple[int, bool]] = []
    gb_s = {(1, False): 10, (1, True): 20, (2, False): 30, (2, True): 29.5, (3, False): 30.5, (3, True): 28}

    def measure_read(buffer: np.ndarray[Any, Any], *, threads: int, prefetch: bool) -> float:
        made.append((threads, prefetch))
        return len(buffer) / (gb_s[threads, prefetch] * 1e9)

    def measure_peak(kind: str, *, threads: int) -> float:
        return {"f32": 50e9, "int8": 200e9}[kind] * threads

    monkeypatch.setattr(larql._core, "measure_read", measure_read)
    monkeypatch.setattr(larql._core, "measure_peak", measure_peak)
    return made


@pytest.fixture
def run() -> Callable[..., Any]:
    def run(*arguments: str) -> Any:
        result = CliRunner().invoke(app, ["roofline", *arguments])
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return result

    return run


def test_every_setting_is_measured_in_rounds(reads: list[tuple[int, bool]]) -> None:
    result = roofline.measure(repeats=2)
    settings = [(threads, prefetch) for threads in (1, 2, 3) for prefetch in (False, True)]
    assert reads == 3 * settings  # one pass that does not count
    assert [row["gb_s"] for row in result["read"]] == [20, 30, 30.5]
    assert result["read"][0]["plain"] == {"median": 10, "best": 10}
    assert result["peaks"] == [
        {"threads": 1, "f32_gmac_s": 50, "int8_gmac_s": 200},
        {"threads": 3, "f32_gmac_s": 150, "int8_gmac_s": 600},
    ]
    assert result["buffer_bytes"] == 64 * MIB


def test_saturation_is_where_more_threads_add_next_to_nothing(reads: list[tuple[int, bool]]) -> None:
    assert roofline.cached_saturation() is None
    assert roofline.measure()["saturation"] == {"threads": 2, "gb_s": 30}
    assert reads
    assert roofline.cached_saturation() == 2


@pytest.mark.parametrize(
    ("name", "value"), [("usable_cores", lambda: 4), ("cpu_model", lambda: "another"), ("VERSION", 99)]
)
def test_another_machine_knows_nothing(
    reads: list[tuple[int, bool]], monkeypatch: pytest.MonkeyPatch, name: str, value: Any
) -> None:
    roofline.measure(1)
    assert reads
    assert roofline.cached_saturation() == 2
    monkeypatch.setattr(roofline, name, value)
    assert roofline.cached_saturation() is None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"key": 1, "saturation": {}}'])
def test_a_broken_note_is_no_note(reads: list[tuple[int, bool]], tmp_path: Path, text: str) -> None:
    roofline.measure(1)
    assert reads
    (note,) = (tmp_path / "cache" / "roofline").iterdir()
    note.write_text(text, "utf-8")
    assert roofline.cached_saturation() is None


def test_a_cache_that_cannot_be_written_costs_only_that(
    reads: list[tuple[int, bool]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("LARQL_CACHE", str(tmp_path / "file"))
    assert roofline.measure(1)["saturation"]["threads"] == 2
    assert reads
    assert roofline.cached_saturation() is None


def test_little_memory_makes_a_small_buffer_that_is_not_remembered(
    reads: list[tuple[int, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roofline, "FULL_BUFFER", 256 * MIB)
    monkeypatch.setattr(roofline, "available_memory", lambda: 390 * MIB)
    said: list[str] = []
    assert roofline.measure(1, said.append)["buffer_bytes"] == 128 * MIB
    assert reads
    assert said[0] == "memory is short: reads are measured on 128 MiB only"
    assert roofline.cached_saturation() is None


def test_no_memory_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "available_memory", lambda: 100 * MIB)
    with pytest.raises(LarqlError, match="not enough memory to measure its speed: 105 MB"):
        roofline.ReadProbe()


def test_the_buffer_is_larger_than_any_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "cache_sizes", lambda: {"L2": MIB, "L3": 20 * MIB})
    probe = roofline.ReadProbe()
    assert probe.n_bytes == 80 * MIB
    assert probe.shortage() is None


def test_the_best_read_is_of_both_kinds(reads: list[tuple[int, bool]]) -> None:
    probe = roofline.ReadProbe()
    assert probe.best_gb_s(1) == pytest.approx(20)
    assert probe.best_gb_s(2) == pytest.approx(30)
    assert {prefetch for _, prefetch in reads} == {False, True}


def test_a_debug_build_is_refused(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(larql._core, "build_profile", "debug")
    result = run()
    assert (result.exit_code, result.stdout) == (1, "")
    assert "this is a debug build" in result.stderr


def test_the_real_measurement_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "usable_cores", lambda: 2)
    result = roofline.measure(1)
    assert all(kind["median"] > 0 for row in result["read"] for kind in (row["plain"], row["prefetched"]))
    assert all(row["f32_gmac_s"] > 0 and row["int8_gmac_s"] > 0 for row in result["peaks"])
    assert roofline.cached_saturation() in (1, 2)


# The command


def test_the_table(run: Callable[..., Any], reads: list[tuple[int, bool]]) -> None:
    result = run("--repeat", "2")
    assert reads
    assert result.exit_code == 0
    lines = [line.split() for line in result.stdout.splitlines()]
    assert ["2", "30.0", "(30.0)", "29.5", "(29.5)"] in lines
    assert ["3", "150.0", "600.0"] in lines
    assert "saturated by 2 threads: 30.0 GB/s" in result.stdout
    assert "round 2 of 2" in result.stderr


def test_json_is_one_object(run: Callable[..., Any], reads: list[tuple[int, bool]]) -> None:
    data = json.loads(run("--json").stdout)
    assert reads
    assert list(data) == ["kind", "version", "machine", "buffer_bytes", "repeats", "read", "saturation", "peaks"]
    assert data["kind"] == "roofline"
    assert_names_no_host(json.dumps(data))


def test_no_repeats_is_an_error(run: Callable[..., Any]) -> None:
    result = run("--repeat", "0")
    assert (result.exit_code, result.stderr) == (2, "larql: repeat is 0; it must be at least 1\n")


def test_a_plot_without_matplotlib_is_one_line(
    run: Callable[..., Any], reads: list[tuple[int, bool]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # as if it were not installed
    result = run("--plot", str(tmp_path / "roofline.png"))
    assert result.exit_code == 2
    assert result.stderr == "larql: a plot needs matplotlib: pip install matplotlib\n"
    assert not reads


def test_a_plot_has_both_kinds_of_loads(
    reads: list[tuple[int, bool]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    drawn: dict[str, tuple[list[int], list[float]]] = {}

    class Axes:
        def plot(self, x: list[int], y: list[float], *, label: str, marker: str) -> None:
            assert marker
            drawn[label] = (x, y)

        def __getattr__(self, name: str) -> Callable[..., None]:
            return lambda *_, **__: None

    class Figure:
        def __init__(self, **_: Any) -> None:
            self.subplots = Axes

        def savefig(self, path: Path, dpi: int) -> None:
            assert dpi
            path.write_bytes(b"a picture")

    monkeypatch.setattr(roofline, "load_plotting", lambda: SimpleNamespace(Figure=Figure))
    result = roofline.measure(1)
    assert reads
    roofline.save_plot(result, tmp_path / "roofline.png")
    assert (tmp_path / "roofline.png").read_bytes() == b"a picture"
    assert drawn == {"plain loads": ([1, 2, 3], [10, 30, 30.5]), "prefetched loads": ([1, 2, 3], [20, 29.5, 28])}
    with pytest.raises(InputError, match="cannot write the plot to"):
        roofline.save_plot(result, tmp_path / "no" / "folder.png")


# Facts of the machine


def assert_names_no_host(text: str) -> None:
    names = [platform.node(), os.environ.get("USER", ""), str(Path.home()), str(Path(__file__).parents[1])]
    assert not [name for name in names if len(name) > 4 and name in text]


def test_facts_of_this_machine() -> None:
    facts = machine.machine_facts()
    assert list(facts) == ["cpu", "cores", "caches", "memory_bytes", "os", "arch", "flags"]
    assert facts["cpu"]
    assert facts["cores"] >= 1
    assert all(size > 0 for size in facts["caches"].values())
    assert_names_no_host(json.dumps(facts))


@pytest.mark.parametrize(
    ("info", "name"),
    [
        ({"model name": "AMD EPYC", "cpu family": "25", "model": "1"}, "AMD EPYC (family 25, model 1)"),
        ({"machdep.cpu.brand_string": "Apple M3"}, "Apple M3"),
    ],
)
def test_the_name_of_the_cpu(monkeypatch: pytest.MonkeyPatch, info: dict[str, str], name: str) -> None:
    monkeypatch.setattr(machine, "_cpu_info", lambda: info)
    assert machine.cpu_model() == name


def test_the_name_of_a_cpu_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_cpu_info", lambda: {"CPU implementer": "0x41", "CPU part": "0xd0c"})
    assert machine.cpu_model().endswith(" (implementer 0x41, part 0xd0c)")


def test_a_container_limits_cores_and_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if not hasattr(os, "sched_getaffinity"):
        pytest.skip("containers of Linux")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setattr(machine, "_CPUS", tmp_path / "none")
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    assert machine.usable_cores() == 4
    (tmp_path / "cpu.max").write_text("250000 100000\n")
    (tmp_path / "memory.max").write_text("5000000\n")
    (tmp_path / "memory.current").write_text("3000000\n")
    assert machine.usable_cores() == 2
    assert machine.available_memory() == 2_000_000
    (tmp_path / "cpu.max").write_text("max 100000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert machine.usable_cores() == 4


def test_threads_of_one_core_count_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if not hasattr(os, "sched_getaffinity"):
        pytest.skip("topology of Linux")
    for cpu, siblings in enumerate(["0,2", "1,3", "0,2", "1,3"]):
        (tmp_path / f"cpu{cpu}/topology").mkdir(parents=True)
        (tmp_path / f"cpu{cpu}/topology/thread_siblings_list").write_text(siblings + "\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setattr(machine, "_CPUS", tmp_path)
    monkeypatch.setattr(machine, "_CGROUP", tmp_path / "none")
    assert machine.usable_cores() == 2


def test_the_commit_is_of_this_checkout_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    commit = machine.source_commit()
    assert commit is None or 12 <= len(commit.removesuffix("-dirty")) <= 40
    monkeypatch.setattr(machine, "__file__", str(tmp_path / "lib/site-packages/larql/machine.py"))
    assert machine.source_commit() is None


def test_a_missing_program_prints_nothing() -> None:
    assert machine._output(["no-such-program-of-larql"]) == ""


def test_default_threads_stop_where_memory_saturates(monkeypatch: pytest.MonkeyPatch) -> None:
    from larql import _core

    monkeypatch.delenv("LARQL_NUM_THREADS", raising=False)
    rule = _core.default_threads()
    assert rule >= 1
    for saturation, want in ((None, rule), (1, 1), (rule + 5, rule)):
        monkeypatch.setattr(roofline, "cached_saturation", lambda saturation=saturation: saturation)
        assert roofline.default_threads() == want
    monkeypatch.setenv("LARQL_NUM_THREADS", "3")
    monkeypatch.setattr(roofline, "cached_saturation", lambda: 1)
    assert roofline.default_threads() == 3, "what the user says goes before what was measured"
