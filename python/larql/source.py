"""From a MODEL argument to an open model."""

from __future__ import annotations

import contextlib
import difflib
import os
from pathlib import Path

from larql.cache import cache_folder
from larql.convert import convert
from larql.errors import InputError, ModelError
from larql.files import is_unfinished
from larql.gguf_file import GgufFile
from larql.hub import SCHEME, download
from larql.model_file import ModelFile
from larql.packaged import PACKAGED_MODELS, find_packaged
from larql.progress import Progress
from larql.vindex import INDEX, VERSION, VindexFolder

_ACCEPTED = f"a model is a .gguf file, a .vindex, {SCHEME}owner/repo or one of {', '.join(PACKAGED_MODELS)}"


def open_model(model: str | os.PathLike[str], *, cache: bool = True, progress: Progress | None = None) -> ModelFile:
    """Opens what `model` stands for: the path of a .gguf file or of a .vindex, a model on the Hugging Face Hub, or the
    name of a packaged model.

    A GGUF file is converted once, into the cache, which `progress` is told of; without `cache` it stays as it is, to be
    packed in memory. Raises ModelError.
    """
    path = resolve(model, quiet=progress is None)
    if path.is_dir():
        return VindexFolder(path)
    file = GgufFile(path)
    return _cached(file, progress) if cache else file


def open_gguf(model: str | os.PathLike[str]) -> GgufFile:
    """Opens the GGUF file that `model` stands for. Raises ModelError, and InputError for a .vindex."""
    path = resolve(model, quiet=False)
    if path.is_dir():
        raise InputError(f"{path} is a .vindex; this needs the .gguf file that it was made from")
    return GgufFile(path)


def resolve(model: str | os.PathLike[str], *, quiet: bool = True) -> Path:
    """The path of the file or .vindex that `model` stands for; raises ModelError when there is none.

    Unless `quiet`, a download shows how far it is.
    """
    name = os.fspath(model)
    if not name:
        raise ModelError(f"the model's name is empty; {_ACCEPTED}")
    if name.startswith(SCHEME):
        return download(name, quiet=quiet)
    path = Path(os.path.expanduser(name))
    if os.path.isfile(path) or (os.path.isfile(path / INDEX) and not is_unfinished(path)):
        return path
    if name in PACKAGED_MODELS:
        return find_packaged(name)
    raise ModelError(f"{_what_is_wrong(name, path)}; {_ACCEPTED}")


def _what_is_wrong(name: str, path: Path) -> str:
    if is_unfinished(path):
        return f"{name} is what a conversion left that did not come to its end"
    is_folder = os.path.isdir(path)
    file = path / INDEX if is_folder else path
    try:
        file.stat()
        return f"{file} is no regular file"
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        return f"{file} cannot be read: {error.strerror}"
    if is_folder:
        return f"{name} is a folder without {INDEX}"
    if close := difflib.get_close_matches(name, PACKAGED_MODELS, n=1):
        return f"there is no model {name!r}, did you mean {close[0]!r}"
    return f"there is no model file {name!r}"


def _cached(file: GgufFile, progress: Progress | None) -> VindexFolder:
    """The .vindex of a GGUF file in the cache, which is made when it is not there."""
    folder = cache_folder() / "vindex" / f"{file.sha256[:32]}-v{VERSION}.vindex"
    try:
        if not folder.exists():
            folder.parent.mkdir(parents=True, exist_ok=True)
            _convert_once(file, folder, progress)
    except OSError as error:
        raise ModelError(
            f"{file.path} cannot be converted into the cache {folder.parent}: {error.strerror or error}; "
            "LARQL_CACHE chooses another folder, and with --no-cache (in Python, cache=False) none is used"
        ) from error
    try:
        return VindexFolder(folder, file.path)
    except ModelError as error:
        raise ModelError(f"{error} (it is in the cache: remove {folder})") from error


def _convert_once(file: GgufFile, folder: Path, progress: Progress | None) -> None:
    with contextlib.suppress(FileExistsError):  # another process was quicker
        convert(file, folder, progress)
