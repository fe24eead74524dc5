"""A bar on stderr while something takes time, if stderr is a terminal that can draw one."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress


class ProgressBar:
    """Told what is done and what there is in all; shown until all is done or the block ends.

    It counts bytes, or what `unit` names, and does not appear in the first `after` seconds.
    """

    def __init__(self, title: str, *, unit: str | None = None, after: float = 0.0) -> None:
        self._title = title
        self._unit = unit
        self._after = after
        self._start: float | None = None
        self._bar: Progress | None = None

    def __enter__(self) -> ProgressBar:
        return self

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        self._start = now if self._start is None else self._start
        if done >= total:
            self._stop()
        elif now - self._start >= self._after and _can_draw():
            if self._bar is None:
                self._bar = _new_bar(self._unit)
                self._bar.add_task(self._title)
                self._bar.start()
            self._bar.update(self._bar.task_ids[0], completed=done, total=total)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._bar is not None:
            with contextlib.suppress(OSError):  # the terminal is gone
                self._bar.stop()
            self._bar = None


def _can_draw() -> bool:
    return sys.stderr is not None and sys.stderr.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


def _new_bar(unit: str | None) -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    count = TextColumn(f"{{task.completed}}/{{task.total}} {unit}") if unit else DownloadColumn()
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), count, TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)
