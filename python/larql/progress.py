"""A bar while something takes time: on stderr if that is a terminal, or in the cell of a notebook."""

from __future__ import annotations

import contextlib
import html
import os
import sys
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Protocol

Progress = Callable[[int, int], object]  # is told what is done and what there is in all


@contextlib.contextmanager
def shown(
    progress: Progress | bool | None, title: str, *, unit: str | None = None, after: float = 0.0
) -> Iterator[Progress | None]:
    """What to tell: the given function, nothing, or for True a bar as `ProgressBar` describes it."""
    if isinstance(progress, bool):
        with ProgressBar(title, unit=unit, after=after) if progress else contextlib.nullcontext() as bar:
            yield bar
    else:
        yield progress


class ProgressBar:
    """Told what is done and what there is in all; shown until all is done or the block ends.

    It counts bytes, or what `unit` names, and does not appear in the first `after` seconds.
    """

    def __init__(self, title: str, *, unit: str | None = None, after: float = 0.0) -> None:
        self._title = title
        self._unit = unit
        self._after = after
        self._start: float | None = None
        self._bar: _Bar | None = None

    def __enter__(self) -> ProgressBar:
        return self

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        self._start = now if self._start is None else self._start
        if done >= total:
            self._stop()
        elif now - self._start >= self._after:
            if self._bar is None:
                self._bar = _new_bar(self._title, self._unit)
            self._bar.update(done, total)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._bar is not None:
            with contextlib.suppress(OSError):  # the terminal is gone
                self._bar.stop()
            self._bar = None


class _Bar(Protocol):
    def update(self, done: int, total: int) -> None: ...

    def stop(self) -> None: ...


def _new_bar(title: str, unit: str | None) -> _Bar:
    if _in_notebook():
        return _NotebookBar(title)
    return _TerminalBar(title, unit) if _can_draw() else _NoBar()


def _can_draw() -> bool:
    return sys.stderr is not None and sys.stderr.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


def _in_notebook() -> bool:
    """Whether this program is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and getattr(ipython.get_ipython(), "kernel", None) is not None


class _NoBar:
    def update(self, done: int, total: int) -> None:
        pass

    def stop(self) -> None:
        pass


class _TerminalBar:
    def __init__(self, title: str, unit: str | None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

        count = TextColumn(f"{{task.completed}}/{{task.total}} {unit}") if unit else DownloadColumn()
        columns = (TextColumn("{task.description}", markup=False), BarColumn(), count, TimeRemainingColumn())
        self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task = self._bar.add_task(title)
        self._bar.start()

    def update(self, done: int, total: int) -> None:
        self._bar.update(self._task, completed=done, total=total)

    def stop(self) -> None:
        with contextlib.suppress(OSError):  # the terminal is gone
            self._bar.stop()


class _NotebookBar:
    """HTML that is replaced, at most ten times a second; nothing of it stays."""

    def __init__(self, title: str) -> None:
        display: Any = sys.modules["IPython"].display
        self._html = display.HTML
        self._title = html.escape(title)
        self._next = 0.0
        self._handle = display.display(self._html(self._title), display_id=True)

    def update(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now >= self._next:
            self._next = now + 0.1
            bar = f'<progress value="{done}" max="{total}"></progress>'
            self._handle.update(self._html(f"{self._title} {bar} {done / total:.0%}"))

    def stop(self) -> None:
        self._handle.update(self._html(""))
