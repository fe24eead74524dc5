"""Facts about this machine that explain a measurement, and none that tell whose machine it is."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

# Instruction sets that decide which kernels can run, by the names of /proc/cpuinfo.
_FLAGS = (
    *("avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16", "amx_int8"),
    *("asimd", "asimddp", "i8mm", "bf16", "sve", "sve2"),
)
_CPUS = Path("/sys/devices/system/cpu")
_CGROUP = Path("/sys/fs/cgroup")


def machine_facts() -> dict[str, Any]:
    """CPU, caches (bytes of one), memory (bytes), kind of system; None for what cannot be found out."""
    return {
        "cpu": cpu_model(),
        "cores": usable_cores(),
        "caches": cache_sizes(),
        "memory_bytes": _total_memory(),
        "os": platform.system(),
        "arch": platform.machine(),
        "flags": _flags(),
    }


def cpu_model() -> str:
    """The CPU's name, with family and model numbers where it has them: virtual machines shorten the name."""
    info = _cpu_info()
    name = info.get("model name") or info.get("machdep.cpu.brand_string") or platform.processor() or platform.machine()
    if "cpu family" in info:
        return f"{name} (family {info['cpu family']}, model {info['model']})"
    if "CPU part" in info:
        return f"{name} (implementer {info['CPU implementer']}, part {info['CPU part']})"
    return name


def usable_cores() -> int:
    """Physical cores that this process may use: its affinity and the container's quota count."""
    if sys.platform == "darwin":
        return int(_sysctl().get("hw.physicalcpu") or os.cpu_count() or 1)
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    cpus = os.sched_getaffinity(0)
    cores = {_read(_CPUS / f"cpu{cpu}/topology/thread_siblings_list") or str(cpu) for cpu in cpus}
    return max(1, min(len(cores), _quota() or len(cores)))


def cache_sizes() -> dict[str, int]:
    """Bytes of one cache of each kind that serves the first core: L1d, L2, L3."""
    sizes = {}
    for index in sorted(_CPUS.glob("cpu0/cache/index*")):
        kind, size = _read(index / "type"), _read(index / "size")
        if kind and size.endswith("K") and kind != "Instruction":
            sizes[f"L{_read(index / 'level')}{'d' if kind == 'Data' else ''}"] = int(size[:-1]) * 1024
    known = _sysctl()
    for name, key in (("L1d", "hw.l1dcachesize"), ("L2", "hw.l2cachesize"), ("L3", "hw.l3cachesize")):
        if key in known:
            sizes[name] = int(known[key])
    return sizes


def available_memory() -> int | None:
    """Bytes that can be allocated without swapping: the system's and the container's word; None when unknown."""
    known = []
    for line in _read(Path("/proc/meminfo")).splitlines():
        if line.startswith("MemAvailable:"):
            known.append(int(line.split()[1]) * 1024)
    limit, used = _read(_CGROUP / "memory.max"), _read(_CGROUP / "memory.current")
    if limit.isdigit() and used.isdigit():
        known.append(max(0, int(limit) - int(used)))
    return min(known, default=None)


def source_commit() -> str | None:
    """The commit of the checkout that this package runs from, with `-dirty` after it when files differ."""
    root = Path(__file__).resolve().parents[2]
    if not ((root / ".git").exists() and (root / "Cargo.toml").exists()):
        return None
    describe = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    return _output(describe).strip() or None


def _flags() -> list[str]:
    info = _cpu_info()
    present = set((info.get("flags") or info.get("Features") or "").split())
    return [flag for flag in _FLAGS if flag in present]


def _cpu_info() -> dict[str, str]:
    """The first processor's entries of /proc/cpuinfo, or what sysctl tells."""
    info = dict(_sysctl())
    with contextlib.suppress(OSError), Path("/proc/cpuinfo").open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            key, colon, value = line.partition(":")
            if colon:
                info.setdefault(key.strip(), value.strip())
            elif "processor" in info:
                break
    return info


def _sysctl() -> dict[str, str]:
    """What macOS knows; elsewhere nothing."""
    if sys.platform != "darwin":
        return {}
    names = ["machdep.cpu.brand_string", "hw.physicalcpu", "hw.memsize"]
    names += ["hw.l1dcachesize", "hw.l2cachesize", "hw.l3cachesize"]
    pairs = (line.partition(": ") for line in _output(["sysctl", *names]).splitlines())
    return {key: value for key, _, value in pairs}


def _total_memory() -> int | None:
    if size := _sysctl().get("hw.memsize"):
        return int(size)
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None


def _quota() -> int | None:
    """Whole CPUs that the container may use at a time; None when it has no limit."""
    quota, _, period = _read(_CGROUP / "cpu.max").partition(" ")
    return max(1, int(quota) // int(period)) if quota.isdigit() and period.isdigit() else None


def _read(path: Path) -> str:
    """The text of a small file without its line end; empty when it cannot be read."""
    try:
        return path.read_text("utf-8").strip()
    except OSError:
        return ""


def _output(command: list[str]) -> str:
    """What a program prints; nothing when it is missing. It may complain, as sysctl does about unknown names."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=10).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
