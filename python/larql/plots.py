"""Pictures by matplotlib, which is an optional extra."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from larql.errors import InputError


def load_plotting(part: str = "figure") -> Any:
    """A part of matplotlib; raises InputError when it is not installed."""
    try:
        return importlib.import_module(f"matplotlib.{part}")
    except ImportError as error:
        raise InputError("a plot needs matplotlib: pip install matplotlib") from error


def save_figure(figure: Any, path: Path) -> None:
    """Writes a figure; the file's ending chooses the format. Raises InputError."""
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise InputError(f"cannot write the plot to {path}: {error}") from error
