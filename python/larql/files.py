"""Files and folders that appear under their names only when they are complete and on disk, or not at all."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

_BLOCK = 1 << 22  # bytes read at a time: large enough to hide the cost of a call
STALE_SECONDS = 3600  # a temporary file that nobody has written to for so long belongs to a process that died


def hash_file(path: Path) -> str:
    """SHA-256 of a file in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """A file that appears when the block ends; an error leaves nothing behind. One that it replaces keeps its mode.

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
        with contextlib.suppress(FileNotFoundError):
            shutil.copymode(path, temporary)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder, given under another name beside it, that gets its own when the block ends; an error leaves nothing.

    Several processes that make the same folder do so one after the other. Raises FileExistsError when it is there,
    which may have happened while waiting. What a process that died had begun is removed.
    """
    _refuse_existing(path)
    with _locked(path.with_name(f".{path.name}.lock")):
        _refuse_existing(path)
        temporary = path.with_name(f".{path.name}.partial")
        if temporary.exists():
            shutil.rmtree(temporary)
        temporary.mkdir()
        try:
            yield temporary
            for file in temporary.iterdir():
                _sync(file)
            _sync_folder(temporary)
            temporary.rename(path)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        _sync_folder(path.parent)


def _refuse_existing(path: Path) -> None:
    if os.path.lexists(path):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))


def is_unfinished(path: Path) -> bool:
    """Whether a folder has the name that `new_folder` gives before the end."""
    return path.name.startswith(".") and path.name.endswith(".partial")


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds the lock file at `path`, which the system lets go when the process dies, and removes it in the end."""
    handle = _lock(path)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # Windows keeps open files
            path.unlink()
        os.close(handle)


def _lock(path: Path) -> int:
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            _wait_for_lock(handle)
            # Whoever held the lock before has removed the file, and another may be there by now.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(handle), path.stat()):
                    return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


def _wait_for_lock(handle: int) -> None:
    if sys.platform == "win32":
        import msvcrt

        while True:
            with contextlib.suppress(OSError):
                msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
                return
            time.sleep(0.1)
    else:
        import fcntl

        fcntl.flock(handle, fcntl.LOCK_EX)


def _remove_stale(path: Path) -> None:
    for partial in path.parent.glob(f"{path.name}.*.partial"):
        with contextlib.suppress(OSError):
            if time.time() - partial.stat().st_mtime > STALE_SECONDS:
                partial.unlink()


def _sync(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Makes a rename last through a power cut, where a folder can be opened."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
