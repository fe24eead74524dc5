"""From a GGUF file to a .vindex."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from pathlib import Path

from larql._core import write_weights
from larql.errors import ModelError
from larql.files import hash_file, new_folder
from larql.gguf_file import GgufFile
from larql.model_file import make_engine
from larql.progress import Progress
from larql.typed_json import decode
from larql.vindex import (
    CHAT_TEMPLATE,
    FORMAT,
    GENERATION,
    INDEX,
    TOKENIZER,
    VERSION,
    WEIGHTS,
    FileFacts,
    Index,
    Origin,
    PackedTensor,
    VindexFolder,
)

# What GGUF calls sampling options, to the fields of GenerationConfig.
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repeat_penalty",
}


def convert(source: GgufFile, target: Path, progress: Progress | None = None) -> None:
    """Writes a .vindex, which appears when it is complete, on disk, and known to open.

    Raises ModelError for a source that cannot be used, OSError for a target that cannot be written, FileExistsError for
    one that is there, which another process may have made meanwhile.
    """
    with new_folder(target) as folder:
        if progress:
            progress(0, sum(tensor.n_bytes for tensor in source.tensors.values()))
        texts = _texts(source)
        packed = json.loads(write_weights(source.gguf, source.tensor_names, folder / WEIGHTS, progress))
        files = {WEIGHTS: FileFacts(packed["length"], packed["sha256"])}
        for name, text in texts.items():
            path = folder / name
            path.write_bytes(text.encode())
            files[name] = FileFacts(path.stat().st_size, hash_file(path))
        index = Index(
            format=FORMAT,
            version=VERSION,
            name=source.name,
            architecture=source.architecture,
            source=Origin(source.path.name, source.sha256, datetime.now(timezone.utc).isoformat(timespec="seconds")),
            config=source.config,
            tokenizer=source.tokenizer.facts,
            files=files,
            tensors=tuple(decode(PackedTensor, row, "the tensor table") for row in packed["tensors"]),
        )
        (folder / INDEX).write_bytes(index.to_json().encode())
        make_engine(VindexFolder(folder))


def is_from(folder: Path, source: GgufFile) -> bool:
    """Whether a folder is a .vindex that was made from a file like this one."""
    try:
        return VindexFolder(folder).sha256 == source.sha256
    except ModelError:
        return False


def _texts(source: GgufFile) -> dict[str, str]:
    """The small files but the index, by name."""
    texts = {TOKENIZER: source.tokenizer.hf.to_str()}
    if source.chat_template is not None:
        texts[CHAT_TEMPLATE] = source.chat_template
    options = {ours: source.metadata.get(f"general.sampling.{theirs}") for theirs, ours in _SAMPLING.items()}
    if given := {name: value for name, value in options.items() if value is not None}:
        texts[GENERATION] = json.dumps(given) + "\n"
    return texts
