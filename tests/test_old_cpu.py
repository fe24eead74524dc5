"""A CPU without AVX2, as an emulator shows it."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tiny_models import write_tiny_model

PROGRAM = ["-c", "from larql.cli import main; main()"]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="emulates an older CPU of the same kind, x86-64")
@pytest.mark.skipif(not shutil.which("qemu-x86_64"), reason="the emulator qemu-x86_64 (qemu-user) is not installed")
def test_a_cpu_without_avx2_gives_the_same(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "tiny.gguf", "gemma3", "Q4_K")
    command = [sys.executable, *PROGRAM, "generate", str(path), "w7 w8", "-n", "6", "--json", "--no-cache"]
    here, there = (
        json.loads(subprocess.run([*emulator, *command], check=True, capture_output=True).stdout)
        for emulator in ([], ["qemu-x86_64", "-cpu", "Nehalem"])
    )
    assert there["isa"] == "scalar"
    assert there["ids"] == here["ids"]
