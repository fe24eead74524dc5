"""What models are at hand: installed packages, the cache of converted ones, the Hub's cache."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from larql.cache import cache_folder
from larql.files import STALE_SECONDS, is_unfinished
from larql.hub import SCHEME, cached_models
from larql.packaged import PACKAGED_MODELS, is_installed
from larql.vindex import FORMAT, INDEX, VERSION


@dataclass(frozen=True)
class Stored:
    """A model, or what is left of one."""

    model: str  # as a MODEL argument
    kind: str  # package, cache or hub
    n_bytes: int  # 0 for a package that is not installed
    note: str
    useless: bool = False  # nothing will use it again


def stored() -> list[Stored]:
    """All that there is, and the packages that could be."""
    return [*_packages(), *_cache(), *_hub()]


def prune() -> list[Stored]:
    """Removes from LARQL's cache what nothing will use again; returns what was removed. Raises OSError."""
    removed = []
    for item in _cache():
        if item.useless:
            path = Path(item.model)
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
            removed.append(item)
    return removed


def as_data(items: list[Stored]) -> list[dict[str, Any]]:
    """For JSON."""
    return [asdict(item) for item in items]


def as_table(items: list[Stored]) -> str:
    """For people."""
    width = max((len(item.model) for item in items), default=0)
    lines = [f"{item.model:{width}}  {_size(item.n_bytes):>9}  {item.kind:7}  {item.note}".rstrip() for item in items]
    return "\n".join(lines)


def _size(n_bytes: int) -> str:
    return f"{n_bytes / 1e6:.1f} MB" if n_bytes else "-"


def _packages() -> Iterator[Stored]:
    for name, model in PACKAGED_MODELS.items():
        if is_installed(name):
            yield Stored(name, "package", model.size, "installed")
        else:
            yield Stored(name, "package", 0, "not installed; using it says how")


def _cache() -> Iterator[Stored]:
    folder = cache_folder()
    current = {f"{name}-{model.sha256[:12]}.gguf": name for name, model in PACKAGED_MODELS.items()}
    for path in _entries(folder / "models"):
        with contextlib.suppress(FileNotFoundError):  # whoever was writing it has ended
            useless = path.name not in current and not _is_fresh(path)
            note = "left over" if useless else f"put together for {current.get(path.name, 'a package')}"
            yield Stored(str(path), "cache", _bytes_of(path), note, useless)
    for path in _entries(folder / "vindex"):
        with contextlib.suppress(FileNotFoundError):
            if path.is_dir():
                note, useless = _state(path)
                yield Stored(str(path), "cache", _bytes_of(path), note, useless)


def _state(folder: Path) -> tuple[str, bool]:
    """What a folder of the cache is, and whether it is useless."""
    if is_unfinished(folder):
        return ("left over", True) if not _is_fresh(folder) else ("being made", False)
    try:
        index = json.loads((folder / INDEX).read_bytes())
        if index["format"] == FORMAT and index["version"] == VERSION:
            return f"made from {index['source']['name']}", False
    except (OSError, ValueError, LookupError, TypeError):
        return "damaged", True
    return "of another version of LARQL", True


def _hub() -> Iterator[Stored]:
    for repo, file, n_bytes in cached_models():
        yield Stored(f"{SCHEME}{repo}/{file}", "hub", n_bytes, "")


def _is_fresh(path: Path) -> bool:
    """Whether a process may still be writing it."""
    inner = [path, *path.iterdir()] if path.is_dir() else [path]
    return any(time.time() - file.stat().st_mtime < STALE_SECONDS for file in inner)


def _entries(folder: Path) -> list[Path]:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return sorted(folder.iterdir())
    return []


def _bytes_of(path: Path) -> int:
    return sum(file.stat().st_size for file in ([path] if path.is_file() else path.iterdir()))
