"""The list of models at hand, and what is removed from the cache."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

import larql
from larql import store
from larql.cli import app
from larql.vindex import INDEX
from tiny_models import write_tiny_model


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with one converted model."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("LARQL_CACHE", str(folder))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    path = tmp_path / "tiny model é.gguf"
    write_tiny_model(path, "llama", "Q4_0")
    larql.load(path).close()
    return folder


def entries(*arguments: str) -> list[dict[str, object]]:
    done = CliRunner().invoke(app, ["models", "--json", *arguments])
    assert done.exit_code == 0, done.output
    found: list[dict[str, object]] = json.loads(done.stdout)
    return [entry for entry in found if entry["kind"] == "cache"]


def age(path: Path) -> None:
    long_ago = time.time() - 10_000
    for file in [*path.iterdir(), path]:
        os.utime(file, (long_ago, long_ago))


def test_packages_and_converted_models_are_listed(cache: Path) -> None:
    done = CliRunner().invoke(app, ["models"])
    assert done.exit_code == 0
    assert "smollm2-135m" in done.stdout
    [entry] = entries()
    assert entry["note"] == "made from tiny model é.gguf"
    assert not entry["useless"]
    folder = Path(str(entry["model"]))
    assert folder.is_relative_to(cache)
    assert entry["n_bytes"] == sum(file.stat().st_size for file in folder.iterdir())
    assert larql.load(folder).generate("abc", max_tokens=2).ids


def test_only_what_is_useless_is_removed(cache: Path) -> None:
    [good] = (cache / "vindex").glob("*.vindex")
    other = good.with_name("other.vindex")
    shutil.copytree(good, other)
    index = json.loads((other / INDEX).read_text())
    (other / INDEX).write_text(json.dumps(index | {"version": 1}))
    damaged = good.with_name("damaged.vindex")
    damaged.mkdir()
    for name in (".old.vindex.partial", ".new.vindex.partial"):
        shutil.copytree(good, good.with_name(name))
    age(good.with_name(".old.vindex.partial"))

    removed = {Path(str(entry["model"])).name: entry["note"] for entry in entries("--prune")}
    assert removed == {
        "other.vindex": "of another version of LARQL",
        "damaged.vindex": "damaged",
        ".old.vindex.partial": "left over",
    }
    assert {path.name for path in (cache / "vindex").iterdir() if path.is_dir()} == {good.name, ".new.vindex.partial"}
    done = CliRunner().invoke(app, ["models", "--prune"])
    assert (done.exit_code, done.stdout) == (0, "")


def test_an_empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LARQL_CACHE", str(tmp_path / "nothing"))
    assert all(item.kind != "cache" for item in store.stored())
