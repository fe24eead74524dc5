"""Whether a .vindex is still what was written, and holds what its source does."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from larql.errors import ModelError
from larql.gguf_file import GgufFile
from larql.model_file import make_engine
from larql.vindex import VindexFolder


def verify(model: VindexFolder, source: Path | None = None) -> dict[str, Any]:
    """Reads every file of a .vindex, and the GGUF file that it was made from if that is given; what there is, for JSON.

    Raises ModelError naming the first thing that is wrong.
    """
    model.check_contents()
    make_engine(model)
    if source is not None:
        _compare(model, GgufFile(source))
    return {
        "path": str(model.folder),
        "version": model.index.version,
        "files": [{"name": name, **asdict(facts)} for name, facts in model.index.files.items()],
        "source": asdict(model.index.source),
        "compared_with": None if source is None else str(source),
    }


def as_table(facts: dict[str, Any]) -> str:
    """The result of `verify` for people."""
    rows = [(file["name"], f"{file['length']:>15,} bytes, as written") for file in facts["files"]]
    compared = facts["compared_with"]
    rows.append(("source", f"the same weights as {compared}" if compared else "not compared; --source FILE.gguf does"))
    return "\n".join(f"{label:<21}{value}" for label, value in rows)


def _compare(model: VindexFolder, source: GgufFile) -> None:
    if source.sha256 != model.sha256:
        raise ModelError(f"{model.folder} was not made from {source.path}: that has another SHA-256")
    if (source.config, source.tokenizer.facts) != (model.config, model.tokenizer.facts):
        raise ModelError(
            f"{model.folder}: this LARQL reads {source.path} in another way; remove the folder and convert it again"
        )
    model.weights.verify_against(source.gguf, source.tensor_names)
