"""Engines for tests: opened without a tokenizer, fed in the ways that tests compare."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from larql._core import Engine, Sequence
from larql.families import read_model
from larql.gguf_file import GgufFile

Array = NDArray[np.float32]


def open_engine(path: Path, precision: str, threads: int | None = None, context: int | None = None) -> Engine:
    file = GgufFile(path)
    config, names = read_model(file)
    return Engine((file.gguf, names), config.to_json(), precision=precision, threads=threads, context=context)


def feed(engine: Engine, sequence: Sequence, ids: Seq[int], piece: int | None = None) -> Array:
    """Appends `ids` in pieces; logits [len(ids), vocab]."""
    piece = piece or len(ids)
    rows = []
    for start in range(0, len(ids), piece):
        first = len(sequence)
        batch = [(sequence, first + i, token, True) for i, token in enumerate(ids[start : start + piece])]
        rows.append(engine.forward(batch))
    return np.concatenate(rows)


def logits_at(engine: Engine, ids: Seq[int], positions: Seq[int]) -> Array:
    """Logits [len(positions), vocab] after the ids at `positions`, from a fresh sequence fed at once."""
    sequence = engine.new_sequence()
    return engine.forward([(sequence, i, token, i in positions) for i, token in enumerate(ids)])
