"""A pseudo-terminal with a program in it."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time

# Makes the terminal on stdin that of the session, so that Ctrl-C in it is a signal, and becomes the program.
IN_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
)


class Terminal:
    """A program in a terminal of its own."""

    def __init__(self, command: list[str]) -> None:
        import pty

        self._file, inner = pty.openpty()
        command = [sys.executable, "-c", IN_TERMINAL, *command]
        self._program = subprocess.Popen(command, stdin=inner, stdout=inner, stderr=inner, start_new_session=True)
        os.close(inner)
        self.seen = ""
        self._read = 0  # of what was seen

    def expect(self, text: str, seconds: float = 60) -> None:
        """Reads until a text comes, after the one that was expected before."""
        deadline = time.monotonic() + seconds
        while (at := self.seen.find(text, self._read)) < 0:
            left = deadline - time.monotonic()
            assert left > 0, f"{text!r} did not come; seen: {self.seen!r}"
            if select.select([self._file], [], [], left)[0]:
                self.seen += os.read(self._file, 4096).decode(errors="replace")
        self._read = at + len(text)

    def type(self, text: str) -> None:
        """Presses keys."""
        os.write(self._file, text.encode())

    def exit_code(self, pressing: str = "") -> int:
        """Waits for the end, and sees all that comes until then.

        Keys are pressed again each second: a signal that comes just before a program waits for input does not wake it.
        """
        self.type(pressing)
        try:
            while True:
                if not select.select([self._file], [], [], 1)[0]:
                    self.type(pressing)
                elif read := os.read(self._file, 4096):
                    self.seen += read.decode(errors="replace")
                else:
                    break
        except OSError:  # how the end of a terminal looks on Linux
            pass
        os.close(self._file)
        return self._program.wait(timeout=60)
