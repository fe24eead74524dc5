"""Models for the tests.

Gemma 3 270M and SmolLM2 135M are test dependencies, installed as packages. The Qwen models are large: tests that need
one look for NAME.gguf in the folder that LARQL_TEST_MODELS names, and are skipped without it.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from larql.source import resolve

# A job in a shell's background ignores SIGINT, and so would the programs that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


def model_path(name: str) -> Path:
    """The file of a packaged model; skips the test when a large one is not at hand."""
    folder = os.environ.get("LARQL_TEST_MODELS")
    if folder and (path := Path(folder) / f"{name}.gguf").is_file():
        return path
    if name.startswith("qwen"):
        pytest.skip(f"{name}.gguf is not in the folder that LARQL_TEST_MODELS names")
    return resolve(name)


@pytest.fixture(scope="session", autouse=True)
def session_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache for this run, also for the programs that it starts, instead of the user's own."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("LARQL_CACHE", str(folder))
        yield
        shutil.rmtree(folder)


@pytest.fixture
def cache_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache for one test, which is not there yet."""
    path = tmp_path / "cache"
    monkeypatch.setenv("LARQL_CACHE", str(path))
    return path


@pytest.fixture(scope="session")
def gemma_path() -> Path:
    return model_path("gemma3-270m")


@pytest.fixture(scope="session")
def smollm_path() -> Path:
    return model_path("smollm2-135m")


@pytest.fixture(scope="session")
def qwen05_path() -> Path:
    return model_path("qwen2.5-coder-0.5b")


@pytest.fixture(scope="session")
def qwen15_path() -> Path:
    return model_path("qwen2.5-coder-1.5b")
