"""The folder where LARQL keeps what it has made from model files, and the checksums it remembers."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

_BLOCK = 1 << 22  # bytes read at a time: large enough to hide the cost of a call
_STALE_SECONDS = 3600  # a temporary file that nobody has written to for so long belongs to a process that died


def cache_folder() -> Path:
    """LARQL_CACHE, or `larql` in the user's cache folder of this platform."""
    if chosen := os.environ.get("LARQL_CACHE"):
        return Path(chosen).expanduser()
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or "~/AppData/Local"
    elif sys.platform == "darwin":
        base = "~/Library/Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "larql"


def file_sha256(path: Path) -> str:
    """SHA-256 of a file in hex; remembered for as long as size, modification time and inode stay the same."""
    stamp = _stamp(path)
    note = _note(path)
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        known = json.loads(note.read_text("utf-8"))
        if known["stamp"] == stamp:
            return str(known["sha256"])
    sha256 = _hash(path)
    remember_sha256(path, sha256)
    return sha256


def remember_sha256(path: Path, sha256: str) -> None:
    """Notes the checksum of a file as it is now; a cache that cannot be written costs only time."""
    note = _note(path)
    with contextlib.suppress(OSError), new_file(note) as file:
        file.write(json.dumps({"sha256": sha256, "stamp": _stamp(path)}).encode())


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """A file that appears under its name only when it is complete and on disk; an error leaves nothing behind.

    Several processes may write the same path: each writes its own temporary file, and the last one to end wins.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_stale(path)
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}.partial")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def _hash(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _stamp(path: Path) -> list[str | int]:
    status = path.stat()
    return [str(path.resolve()), status.st_size, status.st_mtime_ns, status.st_ino]


def _note(path: Path) -> Path:
    key = hashlib.sha256(os.fsencode(path.resolve())).hexdigest()
    return cache_folder() / "checksums" / f"{key[:32]}.json"


def _remove_stale(path: Path) -> None:
    for partial in path.parent.glob(f"{path.name}.*.partial"):
        with contextlib.suppress(OSError):
            if time.time() - partial.stat().st_mtime > _STALE_SECONDS:
                partial.unlink()


def _sync_folder(folder: Path) -> None:
    """Makes a rename last through a power cut, where a folder can be opened."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
