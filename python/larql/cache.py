"""The folder where LARQL keeps what it has made from model files, and the checksums it remembers."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from pathlib import Path

from larql.errors import ModelError
from larql.files import hash_file, new_file


def cache_folder() -> Path:
    """LARQL_CACHE, or `larql` in the user's cache folder of this platform; raises ModelError when it has no place."""
    if chosen := os.environ.get("LARQL_CACHE"):
        return _expanded(chosen)
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or "~/AppData/Local"
    elif sys.platform == "darwin":
        base = "~/Library/Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return _expanded(base) / "larql"


def _expanded(folder: str) -> Path:
    try:
        return Path(folder).expanduser()
    except RuntimeError:
        raise ModelError(
            f"the cache cannot be in {folder}, because that home folder is unknown; LARQL_CACHE chooses another "
            "folder, and with --no-cache (in Python, cache=False) none is used"
        ) from None


def file_sha256(path: Path) -> str:
    """SHA-256 of a file in hex; remembered for as long as size, modification time and inode stay the same."""
    stamp = _stamp(path)
    with contextlib.suppress(OSError, ModelError, ValueError, KeyError, TypeError):
        known = json.loads(_note(path).read_text("utf-8"))
        if known["stamp"] == stamp:
            return str(known["sha256"])
    sha256 = hash_file(path)
    remember_sha256(path, sha256)
    return sha256


def remember_sha256(path: Path, sha256: str) -> None:
    """Notes the checksum of a file as it is now; a cache that cannot be written costs only time."""
    with contextlib.suppress(OSError, ModelError), new_file(_note(path)) as file:
        file.write(json.dumps({"sha256": sha256, "stamp": _stamp(path)}).encode())


def _stamp(path: Path) -> list[str | int]:
    status = path.stat()
    return [str(path.resolve()), status.st_size, status.st_mtime_ns, status.st_ino]


def _note(path: Path) -> Path:
    key = hashlib.sha256(os.fsencode(path.resolve())).hexdigest()
    return cache_folder() / "checksums" / f"{key[:32]}.json"
