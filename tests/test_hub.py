"""Models of the Hub, from a server on this machine: what is chosen, resumed, kept, and what is said when it fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hub_server import HubServer
from tiny_models import write_tiny_model

# A download goes on behind its last whole block, which is larger than the models here.
PROGRAM = [
    sys.executable,
    "-c",
    "from huggingface_hub import constants; constants.DOWNLOAD_CHUNK_SIZE = 4096; from larql.cli import main; main()",
]
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def model_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A model that runs."""
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write_tiny_model(path, "llama", "Q4_0")
    return path.read_bytes()


@pytest.fixture
def hub(model_bytes: bytes) -> Iterator[HubServer]:
    repos = {
        "owner/many": {"README.md": b"", "m-Q8_0.gguf": b"x", "m-Q4_K_M.gguf": model_bytes, "mmproj-Q4_K_M.gguf": b"x"},
        "owner/unclear": {"a.gguf": b"x", "b.gguf": b"x"},
        "owner/none": {"model.safetensors": b"x"},
        "owner/split": {f"m-0000{i}-of-00002.gguf": b"x" for i in (1,)},
        "owner/gated": {},
    }
    with HubServer(repos) as server:
        server.gated.add("owner/gated")
        yield server


@pytest.fixture
def run(hub: HubServer, tmp_path: Path) -> Run:
    """Runs `larql` with this hub and a Hub cache of its own."""

    def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        settings = {
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(tmp_path / "hf"),
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_XET": "1",
            "NO_PROXY": "127.0.0.1",
        }
        return subprocess.run(
            [*PROGRAM, *arguments],
            env=os.environ | settings | environment,
            capture_output=True,
            encoding="utf-8",
            timeout=120,
            check=False,
        )

    return run


def ids(done: subprocess.CompletedProcess[str]) -> list[int]:
    """What `larql tokenize --json` found."""
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    found: list[int] = json.loads(done.stdout)["ids"]
    return found


def says(done: subprocess.CompletedProcess[str], text: str) -> None:
    """The program ended with one line on stderr that has a text."""
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("larql: ")
    assert done.stderr.count("\n") == 1
    assert text in done.stderr


def test_the_usual_file_is_loaded_once_and_then_found_offline(run: Run, hub: HubServer, tmp_path: Path) -> None:
    first = ids(run("tokenize", "hf://owner/many", "abc", "--json"))
    assert len(hub.ranges) == 1
    assert list((tmp_path / "hf").rglob("m-Q4_K_M.gguf"))
    assert ids(run("tokenize", "hf://owner/many", "abc", "--json")) == first
    assert len(hub.ranges) == 1
    n_requests = len(hub.requests)
    for name in ("hf://owner/many", "hf://owner/many/m-Q4_K_M.gguf"):
        assert ids(run("tokenize", name, "abc", "--json", HF_HUB_OFFLINE="1")) == first
    assert len(hub.requests) == n_requests


def test_a_named_file_of_a_revision(run: Run, hub: HubServer) -> None:
    assert ids(run("tokenize", "hf://owner/many@v1.0/m-Q4_K_M.gguf", "abc", "--json"))
    assert any("/v1.0/" in request for request in hub.requests)


def test_a_broken_download_goes_on_where_it_was(run: Run, hub: HubServer, model_bytes: bytes) -> None:
    third = len(model_bytes) // 3
    hub.break_after = [third, third]
    assert ids(run("tokenize", "hf://owner/many", "abc", "--json"))
    starts = [int(wanted.removeprefix("bytes=").rstrip("-")) if wanted else 0 for wanted in hub.ranges]
    assert starts[0] == 0
    assert len(starts) == 3
    assert 0 < starts[1] <= third < starts[2]


def test_a_connection_that_breaks_again_and_again(run: Run, hub: HubServer, tmp_path: Path) -> None:
    hub.break_after = [0] * 100
    says(run("tokenize", "hf://owner/many", "abc"), "could not be loaded")
    assert not list((tmp_path / "hf").rglob("*.gguf"))
    hub.break_after = []
    assert ids(run("tokenize", "hf://owner/many", "abc", "--json"))


def test_a_file_of_another_size_is_refused(run: Run, hub: HubServer) -> None:
    hub.announce = 10
    says(run("tokenize", "hf://owner/many", "abc"), "could not be loaded")


@pytest.mark.parametrize(
    ("model", "text"),
    [
        ("hf://owner", "hf://owner names no model; write hf://owner/repo"),
        ("hf://owner/nothing", "there is no {url}/owner/nothing, or it is private"),
        ("hf://owner/gated/m.gguf", "wants its terms accepted"),
        ("hf://owner/none", "owner/none has no .gguf file"),
        ("hf://owner/unclear", "choose one, as hf://owner/unclear/FILE: a.gguf, b.gguf"),
        ("hf://owner/many/other.gguf", "{url}/owner/many has no such file"),
        ("hf://owner/split", "owner/split lacks m-00002-of-00002.gguf"),
        ("hf://owner/many/m-Q8_0.gguf", "m-Q8_0.gguf: "),
    ],
)
def test_what_is_wrong_is_said_in_one_line(run: Run, hub: HubServer, model: str, text: str) -> None:
    says(run("tokenize", model, "abc"), text.format(url=hub.url))


def test_without_a_connection(run: Run) -> None:
    says(run("tokenize", "hf://owner/many", "abc", HF_HUB_OFFLINE="1"), "offline")
    unreachable = {"HF_ENDPOINT": "http://127.0.0.1:9"}
    done = run("tokenize", "hf://owner/many/m-Q4_K_M.gguf", "abc", **unreachable)
    says(done, "cannot be reached, and the file is not in the Hub's cache")
