"""A model's file that changes while it is in use, and memory that runs out."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import larql
from larql.convert import convert
from larql.errors import ModelError
from larql.gguf_file import GgufFile

PROMPT = "Once upon a time"
CHANGED = "weights.bin: the file has changed while it was in use; open the model again"


@pytest.fixture(scope="module")
def original(smollm_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("changed") / "smollm.vindex"
    convert(GgufFile(smollm_path), folder)
    return folder


@pytest.fixture
def vindex(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "copy.vindex"))


@pytest.mark.skipif(sys.platform == "win32", reason="Windows does not cut a mapped file short")
def test_a_file_that_is_cut_short_is_an_error(vindex: Path, original: Path) -> None:
    model = larql.load(vindex, threads=2)
    stream = model.stream(PROMPT, max_tokens=50)
    next(stream)
    os.truncate(vindex / "weights.bin", 1 << 20)
    with pytest.raises(ModelError, match=CHANGED):
        list(stream)
    with pytest.raises(ModelError, match=CHANGED):
        model.generate(PROMPT)
    # It was the file's fault; others go on.
    assert larql.load(original, threads=2).generate(PROMPT, max_tokens=3).text


def test_a_file_that_is_overwritten_is_an_error(vindex: Path) -> None:
    model = larql.load(vindex, threads=2)
    session = model.session()
    session.feed([1, 2, 3])
    with (vindex / "weights.bin").open("r+b") as file:
        file.write(b"other weights")
    os.utime(vindex / "weights.bin", ns=(0, 0))
    with pytest.raises(ModelError, match=CHANGED):
        session.feed([4])
    assert session.ids == [1, 2, 3]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows does not remove a mapped file")
def test_a_file_that_is_replaced_or_removed_is_none(vindex: Path) -> None:
    model = larql.load(vindex, threads=2)
    want = model.generate(PROMPT, max_tokens=5).text
    (vindex / "new").write_bytes(b"another file")
    (vindex / "new").replace(vindex / "weights.bin")
    assert model.generate(PROMPT, max_tokens=5).text == want
    shutil.rmtree(vindex)
    assert model.generate(PROMPT, max_tokens=5).text == want


# Sets the limit only when everything but the K/V cache has its memory.
OUT_OF_MEMORY = """
import resource, sys
import larql

def leave(megabytes):
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + megabytes * 1_000_000, resource.RLIM_INFINITY))

model = larql.load(sys.argv[1], threads=1)
session = model.session()
session.feed([7] * 512)
leave(8)
try:
    session.feed([7] * 3000)
except larql.InputError as error:
    print(error)
leave(2000)
assert len(session) == 512
session.feed([7] * 512)
print(len(session))
leave(300)
try:
    larql.load(sys.argv[1], threads=1, context=8192, precision="reference")
except larql.InputError as error:
    print(error)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space as Linux does")
def test_memory_that_runs_out_is_an_error(original: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", OUT_OF_MEMORY, str(original)], capture_output=True, text=True, check=False
    )
    assert result.stdout.splitlines() == [
        "there is no memory for the keys and values of more tokens: shorten the text",
        "1024",
        "a context of 8192 tokens takes 0.4 GB, which cannot be had: choose a smaller one",
    ], result.stderr
