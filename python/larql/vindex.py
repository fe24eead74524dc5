"""A .vindex: a folder with a model that is ready to run.

- index.json: what there is (Index), and its own SHA-256
- weights.bin: packed tensors, mapped and used in place (rust/vindex.rs)
- tokenizer.json: the tokenizer, as Hugging Face's `tokenizers` package writes it
- chat_template.jinja: if the source has one
- generation.json: sampling options that the source suggests, if it does, named as in GenerationConfig
"""

from __future__ import annotations

import hashlib
import json
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

from larql._core import Vindex
from larql.config import ModelConfig
from larql.errors import ModelError
from larql.families.keys import TensorInfo
from larql.files import hash_file
from larql.tokenizer import Tokenizer, TokenizerFacts
from larql.typed_json import decode

FORMAT = "larql-vindex"
# Raise it whenever `convert` writes something else, be it the layout, the config or the tokenizer: folders of another
# version do not open, and those in the cache are made again.
VERSION = 2

INDEX = "index.json"
WEIGHTS = "weights.bin"
TOKENIZER = "tokenizer.json"
CHAT_TEMPLATE = "chat_template.jinja"
GENERATION = "generation.json"


@dataclass(frozen=True)
class FileFacts:
    """What a file of the folder must be."""

    length: int  # bytes
    sha256: str


@dataclass(frozen=True)
class Origin:
    """The model file that a .vindex was made from."""

    name: str
    sha256: str  # as GgufFile.sha256
    made: str  # when, ISO 8601


@dataclass(frozen=True)
class PackedTensor:
    """A row of the tensor table, which rust/vindex.rs writes and checks; offset and length in bytes."""

    name: str
    type: str
    shape: tuple[int, ...]
    offset: int
    length: int


@dataclass(frozen=True)
class Index:
    """What index.json says."""

    format: str
    version: int
    name: str | None  # what the model calls itself
    architecture: str
    source: Origin
    config: ModelConfig
    tokenizer: TokenizerFacts
    files: dict[str, FileFacts]
    tensors: tuple[PackedTensor, ...]

    def to_json(self) -> str:
        """The text of index.json."""
        data = asdict(self)
        return json.dumps({**data, "sha256": _checksum(data)}, indent=1) + "\n"


class VindexFolder:
    """An open .vindex. The file that it was made from is named when it is at hand.

    Opening it, and whatever reads it, raises ModelError when it cannot be used.
    """

    def __init__(self, folder: Path, gguf_path: Path | None = None) -> None:
        self.folder = folder
        self.path = gguf_path or folder
        self.gguf_path = gguf_path
        self.index = _read_index(folder / INDEX)
        self._check_files()
        self.weights = Vindex(folder / WEIGHTS, json.dumps([asdict(tensor) for tensor in self.index.tensors]))

    @property
    def name(self) -> str | None:
        """What the model calls itself."""
        return self.index.name

    @property
    def architecture(self) -> str:
        """The family's name."""
        return self.index.architecture

    @property
    def config(self) -> ModelConfig:
        """The model as the engine runs it."""
        return self.index.config

    @property
    def sha256(self) -> str:
        """The checksum of the file that it was made from."""
        return self.index.source.sha256

    @cached_property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """All tensors by the engine's names."""
        return {row.name: TensorInfo(row.type, row.shape, row.length) for row in self.index.tensors}

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer."""
        path = self.folder / TOKENIZER
        data = _read(path)
        if hashlib.sha256(data).hexdigest() != self.index.files[TOKENIZER].sha256:
            _raise_damaged(path)
        try:
            return Tokenizer.from_json(data, self.index.tokenizer)
        except ModelError as error:
            raise ModelError(f"{path}: {error}") from error

    @cached_property
    def chat_template(self) -> str | None:
        """The model's chat template, if it has one."""
        facts = self.index.files.get(CHAT_TEMPLATE)
        if facts is None:
            return None
        path = self.folder / CHAT_TEMPLATE
        data = _read(path)
        if hashlib.sha256(data).hexdigest() != facts.sha256:
            _raise_damaged(path)
        return data.decode()

    def check_contents(self) -> None:
        """Reads every file and compares it with the index."""
        for name, facts in self.index.files.items():
            try:
                found = hash_file(self.folder / name)
            except OSError as error:
                _raise_unreadable(self.folder / name, error)
            if found != facts.sha256:
                _raise_damaged(self.folder / name)

    def _check_files(self) -> None:
        files = self.index.files
        for name in (WEIGHTS, TOKENIZER):
            if name not in files:
                raise ModelError(f"{self.folder / INDEX}: {name} is not among the files")
        for name, facts in files.items():
            path = self.folder / name
            if name not in (WEIGHTS, TOKENIZER, CHAT_TEMPLATE, GENERATION):
                raise ModelError(f"{self.folder / INDEX}: {name!r} is no file of a .vindex")
            try:
                status = path.stat()
            except OSError as error:
                _raise_unreadable(path, error)
            if not stat.S_ISREG(status.st_mode) or status.st_size != facts.length:
                raise ModelError(
                    f"{path}: has {status.st_size} bytes, not {facts.length} as it should; "
                    "remove the folder and convert the model again"
                )


def _read_index(path: Path) -> Index:
    try:
        return _parse_index(json.loads(_read(path)), path)
    except (ValueError, RecursionError):
        raise ModelError(f"{path}: is not JSON; remove the folder and convert the model again") from None


def _parse_index(data: Any, path: Path) -> Index:
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ModelError(f'{path}: does not have "format": "{FORMAT}", so the folder is no .vindex')
    version = data.get("version")
    if version != VERSION:
        raise ModelError(
            f"{path}: is of version {version!r:.20}, and this LARQL reads version {VERSION}; "
            "remove the folder and convert the model again, or use the LARQL that did"
        )
    if data.pop("sha256", None) != _checksum(data):
        _raise_damaged(path)
    return decode(Index, data, str(path))


def _checksum(data: dict[str, Any]) -> str:
    """The SHA-256 of an index, however its JSON is laid out."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        _raise_unreadable(path, error)


def _raise_unreadable(path: Path, error: OSError) -> NoReturn:
    raise ModelError(
        f"{path}: cannot be read: {error.strerror or error}; remove the folder and convert the model again"
    ) from error


def _raise_damaged(path: Path) -> NoReturn:
    raise ModelError(
        f"{path}: has changed since it was written (another SHA-256); remove the folder and convert the model again"
    )
