"""A session on disk: a NumPy archive (.npz) with its ids, its K/V cache, and what model they are of."""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from larql.errors import ContextError, InputError
from larql.files import new_file
from larql.session import Session

FORMAT = "larql-session-1"


def save(session: Session, path: Path, *, model: str, precision: str) -> None:
    """Writes a session, whole or not at all. `model` is the checksum of the model's file.

    Raises InputError for a place where no file can be, OSError when it cannot be written.
    """
    path = Path(os.path.realpath(path))  # a link stays one
    if os.path.exists(path) and not path.is_file():
        raise InputError(f"{path} is no regular file; choose another name")
    if not path.parent.is_dir():
        raise InputError(f"there is no folder {path.parent}")
    about = json.dumps({"format": FORMAT, "model": model, "precision": precision})
    ids, cache = session.state()
    with new_file(path) as file:
        np.savez(file, about=np.array(about), ids=np.array(ids, np.uint32), cache=cache)


def read(path: Path, *, model: str, precision: str, context: int) -> tuple[list[int], NDArray[np.uint8]]:
    """Ids and K/V cache of the session in a file.

    Raises InputError for a file that cannot be read, is none of `save`, or of another model or precision, and
    ContextError for a session that does not fit.
    """
    arrays = _read_arrays(path)
    try:
        about = json.loads(str(arrays["about"]))
        saved = {key: about[key] for key in ("format", "model", "precision")}
        ids, cache = arrays["ids"], arrays["cache"]
        if ids.ndim != 1 or ids.dtype != np.uint32 or cache.ndim != 1 or cache.dtype != np.uint8:
            raise ValueError
    except (ValueError, KeyError, TypeError) as error:
        raise _not_a_session(path) from error
    if saved["format"] != FORMAT:
        raise InputError(f"{path} is a session of format {saved['format']!r}; this version of LARQL reads {FORMAT!r}")
    if saved["model"] != model:
        raise InputError(f"{path} is a session with another model")
    if saved["precision"] != precision:
        raise InputError(f"{path} is a session in {saved['precision']} precision; the model was loaded as {precision}")
    if len(ids) > context:
        raise ContextError(f"{path} holds {len(ids)} tokens; the context holds {context}", len(ids), context)
    return ids.tolist(), cache


def _read_arrays(path: Path) -> dict[str, NDArray[Any]]:
    try:
        with path.open("rb") as file, np.load(file) as archive:
            return {name: archive[name] for name in ("about", "ids", "cache")}
    except FileNotFoundError as error:
        raise InputError(f"there is no file {path}") from error
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from error
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        EOFError,
        NotImplementedError,
        zipfile.BadZipFile,
    ) as error:
        raise _not_a_session(path) from error


def _not_a_session(path: Path) -> InputError:
    return InputError(f"{path} is not a saved session, or it is broken")
