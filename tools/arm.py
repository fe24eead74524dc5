"""AArch64 from another Linux machine: tests under emulation, and a wheel by cross compilation.

What is missing is installed where that is possible: Rust's library for the target by rustup, or else Debian's compiler
for the web, which has it; the rest by apt-get, as root.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

TARGET = "aarch64-unknown-linux-gnu"
LINKER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
PACKAGES = {LINKER: "gcc-aarch64-linux-gnu libc6-dev-arm64-cross", EMULATOR: "qemu-user"}
DEBIAN_RUSTC = "/usr/bin/rustc"
DEBIAN_RUST_PACKAGES = "rustc-web libstd-rust-web-dev:arm64"
INSTALL_SECONDS = 600
# CPUs that the emulator knows, by the kernels that they get: without and with the dot product.
CPUS = {"neon": "cortex-a57", "neon-dotprod": "neoverse-n1"}
MODELS = ("gemma3-270m", "smollm2-135m")
PROMPT, NEW_TOKENS = "The capital of France is", 8

Run = Callable[[str], object]


class Missing(Exception):
    """What cannot be had on this machine, and why."""


def test(run: Run, run_tests: Run) -> None:
    """Runs the Rust tests and two models under emulation, and compares the models' bits with this machine's."""
    set_up([LINKER, EMULATOR])
    known = subprocess.run([EMULATOR, "-cpu", "help"], capture_output=True, text=True).stdout.split()
    if unknown := [cpu for cpu in CPUS.values() if cpu not in known]:
        raise Missing(f"this {EMULATOR} does not know the CPU {unknown[0]}; QEMU 7.1 and later do")
    link_statically()
    for cpu in CPUS.values():
        os.environ[_cargo("RUNNER")] = f"{EMULATOR} -cpu {cpu}"
        run_tests(f"cargo test --locked --lib --target {TARGET}")
    for target in ("", f" --target {TARGET}"):
        run(f"cargo build --locked --release --example ids{target}")
    for model in MODELS:
        _compare(model, run)


def wheel(run: Run, command: str) -> None:
    """Builds a wheel by a command that would build one for this machine."""
    set_up([LINKER])
    run(f"{command} --target {TARGET}")


def set_up(programs: Iterable[str]) -> None:
    """Finds or installs the programs and a compiler for the target, and tells cargo of them by the environment.

    Variables of the user's that would change which code is built or run are removed. Raises Missing.
    """
    for name in ("LARQL_ISA", "LARQL_PREFETCH", "LARQL_NUM_THREADS", "RUSTFLAGS", "CARGO_ENCODED_RUSTFLAGS"):
        os.environ.pop(name, None)
    for program in programs:
        if not shutil.which(program):
            _apt_install(PACKAGES[program], program)
        if not shutil.which(program):
            raise Missing(f"{program} is missing, also after its packages were installed")
    os.environ["RUSTC"] = _rustc()
    os.environ[_cargo("LINKER")] = LINKER


def link_statically() -> None:
    """With the C library inside, programs do not depend on which one the emulator finds."""
    os.environ[_cargo("RUSTFLAGS")] = "-C target-feature=+crt-static"


def target_dir() -> Path:
    """Where cargo puts what it builds."""
    return Path(os.environ.get("CARGO_TARGET_DIR", "target"))


def _cargo(what: str) -> str:
    """The environment variable with which cargo is told something of the target."""
    return f"CARGO_TARGET_{TARGET.upper().replace('-', '_')}_{what}"


def _rustc() -> str:
    """A compiler that has the target's library."""
    own = os.environ.get("RUSTC", "rustc")
    if _has_library(own):
        return own
    if shutil.which("rustup"):
        _try(["rustup", "target", "add", TARGET])
        if _has_library(own):
            return own
    if not _has_library(DEBIAN_RUSTC) and _is_debian():
        _try(["dpkg", "--add-architecture", "arm64"])
        _apt_install(DEBIAN_RUST_PACKAGES, f"Rust's library for {TARGET}")
    if not _has_library(DEBIAN_RUSTC):
        raise Missing(f"no Rust compiler here has the library for {TARGET}; try: rustup target add {TARGET}")
    return DEBIAN_RUSTC


def _is_debian() -> bool:
    """Whether this is Debian, whose servers have packages for all architectures side by side, and not a relative."""
    release = Path("/etc/os-release")
    return release.exists() and "ID=debian" in release.read_text("utf-8").splitlines()


def _has_library(rustc: str) -> bool:
    try:
        sysroot = subprocess.run([rustc, "--print", "sysroot"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return False
    return any(Path(sysroot.strip(), "lib/rustlib", TARGET, "lib").glob("libstd-*"))


def _apt_install(packages: str, what: str) -> None:
    if not (shutil.which("apt-get") and os.getuid() == 0):
        raise Missing(f"{what} is missing, and only root can install it with apt-get ({packages})")
    install = ["apt-get", "install", "--yes", "-qq", "--no-install-recommends", *packages.split()]
    if not (_try(["apt-get", "update", "-qq"]) and _try(install)):
        raise Missing(f"{what} is missing, and apt-get cannot install {packages}")


def _try(command: list[str]) -> bool:
    """Whether a command could be run and succeeded in time."""
    print(f"\n+ {' '.join(command)}", flush=True)
    try:
        return subprocess.run(command, stdout=subprocess.DEVNULL, timeout=INSTALL_SECONDS).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def _compare(model: str, run: Run) -> None:
    """A model's ids and logits, from one .vindex: Python here, the example program here and on each emulated CPU."""
    vindex = target_dir() / "arm" / f"{model}.vindex"
    shutil.rmtree(vindex, ignore_errors=True)
    vindex.parent.mkdir(parents=True, exist_ok=True)
    run(f"larql convert {model} {vindex}")
    options = ["-n", str(NEW_TOKENS), "--temperature", "0", "--json"]
    want = _json(["larql", "generate", str(vindex), PROMPT, *options])
    here = _ids([], "release", vindex, want["prompt_ids"])
    _check(f"{model} in Python and in the example", want["ids"], here["ids"])
    for isa, cpu in CPUS.items():
        there = _ids([EMULATOR, "-cpu", cpu], f"{TARGET}/release", vindex, want["prompt_ids"])
        _check(f"the kernels of {cpu}", isa, there.pop("isa"))
        _check(f"{model} here and on {cpu}", {k: v for k, v in here.items() if k != "isa"}, there)
        print(f"{model}: ids {there['ids']} and their logits have the same bits by {here['isa']} and {isa}")


def _ids(emulator: list[str], folder: str, vindex: Path, prompt_ids: list[int]) -> dict[str, Any]:
    program = target_dir() / folder / "examples" / "ids"
    return _json([*emulator, str(program), str(vindex), str(NEW_TOKENS), *map(str, prompt_ids)])


def _json(command: list[str]) -> dict[str, Any]:
    line: dict[str, Any] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return line


def _check(what: str, want: object, got: object) -> None:
    if want != got:
        raise SystemExit(f"tools/arm.py: {what} differ: {want} and {got}")
