"""What the README shows works."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.main

from larql.cli import app

README = (Path(__file__).parents[1] / "README.md").read_text("utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def command_lines() -> list[str]:
    return [line for block in blocks("sh") for line in block.splitlines() if line.startswith("larql ")]


@pytest.mark.usefixtures("gemma_path", "smollm_path")
def test_the_python_examples_run(tmp_path: Path) -> None:
    (program,) = blocks("python")
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert "Ocean" in result.stdout


@pytest.mark.usefixtures("gemma_path", "smollm_path")
def test_the_recording_is_what_the_program_does() -> None:
    (recording,) = blocks("console")
    for entry in re.split(r"^\$ ", recording, flags=re.MULTILINE)[1:]:
        command, _, shown = entry.partition("\n")
        typed = "".join(re.findall(r"^> (.*\n)", shown, re.MULTILINE))
        program = [sys.executable, "-c", "from larql.cli import main; main()", *shlex.split(command)[1:]]
        done = subprocess.run(program, input=typed, capture_output=True, encoding="utf-8", check=False)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout == re.sub(r"^> .*\n", "", shown, flags=re.MULTILINE)


@pytest.mark.parametrize("line", command_lines())
def test_the_command_lines_are_understood(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, *arguments = shlex.split(line, comments=True)[1:]
    monkeypatch.chdir(tmp_path)
    for file in ("prompt.txt", "path/to/model.gguf"):
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).touch()
    group: Any = typer.main.get_command(app)
    assert group.commands[name].make_context(name, arguments)


def test_the_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert [link for link in links if "://" not in link and not os.path.exists(Path(__file__).parents[1] / link)] == []
