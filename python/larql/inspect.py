"""What a model file holds and how it would run here, as data and as a table."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from larql._core import Engine
from larql.model_file import ModelFile
from larql.vindex import VindexFolder


def describe(file: ModelFile, engine: Engine) -> dict[str, Any]:
    """Everything that `larql inspect` tells, ready for JSON; sizes in bytes, lengths in tokens."""
    config, tokenizer = file.config, file.tokenizer
    windows = [layer.window for layer in config.layers if layer.window is not None]
    return {
        "path": str(file.path),
        "name": file.name,
        "architecture": file.architecture,
        "parameters": sum(math.prod(tensor.shape) for tensor in file.tensors.values()),
        "layers": len(config.layers),
        "windowed_layers": len(windows),
        "window": max(windows, default=None),
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "heads": config.n_heads,
        "kv_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "tied_head": config.tied_head,
        "context_length": config.context_length,
        "tensors": _tensor_mix(file),
        "vindex": _packed(file) if isinstance(file, VindexFolder) else None,
        "tokenizer": {
            "model": tokenizer.facts.model,
            "pre": tokenizer.facts.pre,
            "vocab_size": tokenizer.vocab_size,
            "bos_id": tokenizer.bos_id,
            "end_ids": sorted(tokenizer.end_ids),
        },
        "weight_bytes_per_token": engine.weight_bytes,
        "threads": engine.threads,
        "isa": engine.isa,
    }


def as_table(facts: dict[str, Any]) -> str:
    """The result of `describe` for people."""
    return "\n".join(f"{label:<12}{value}" for label, value in as_rows(facts))


def as_rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """The rows of the table, each a label and a value."""
    tokenizer = facts["tokenizer"]
    window = f", {facts['windowed_layers']} of them see {facts['window']} tokens" if facts["window"] else ""
    head = "tied to the embedding" if facts["tied_head"] else "its own matrix"
    name = f"{facts['name'] or 'unnamed'} ({facts['architecture']})"
    splitting = f"{tokenizer['model']}/{tokenizer['pre']}"
    return [
        ("file", facts["path"]),
        *_packed_rows(facts["vindex"]),
        ("model", f"{name}, {facts['parameters'] / 1e6:.0f} M parameters"),
        ("layers", f"{facts['layers']}{window}"),
        ("width", f"{facts['hidden_size']}, feed-forward {facts['intermediate_size']}"),
        ("heads", f"{facts['heads']} of {facts['head_dim']}, {facts['kv_heads']} for keys and values"),
        ("vocabulary", f"{facts['vocab_size']}, output head: {head}"),
        ("context", f"{facts['context_length']} tokens"),
        ("tokenizer", f"{splitting}, BOS {tokenizer['bos_id']}, ends {tokenizer['end_ids']}"),
        ("runs with", f"{facts['threads']} threads, {facts['isa']}"),
        ("per token", f"{facts['weight_bytes_per_token'] / 1e6:.1f} MB of weights"),
        *(("weights", f"{t['type']:<5}{t['bytes'] / 1e6:>9.1f} MB in {t['count']} tensors") for t in facts["tensors"]),
    ]


def _packed_rows(packed: dict[str, Any] | None) -> list[tuple[str, str]]:
    if packed is None:
        return []
    made = f"version {packed['version']}, made {packed['source']['made']} from {packed['source']['name']}"
    return [("packed in", packed["path"]), ("", made)]


def _packed(model: VindexFolder) -> dict[str, Any]:
    """The .vindex that is used."""
    return {"path": str(model.folder), "version": model.index.version, "source": asdict(model.index.source)}


def _tensor_mix(file: ModelFile) -> list[dict[str, Any]]:
    """Count and bytes of each weight type, the largest first."""
    types: dict[str, dict[str, Any]] = {}
    for tensor in file.tensors.values():
        entry = types.setdefault(tensor.type, {"type": tensor.type, "count": 0, "bytes": 0})
        entry["count"] += 1
        entry["bytes"] += tensor.n_bytes
    return sorted(types.values(), key=lambda entry: -int(entry["bytes"]))
