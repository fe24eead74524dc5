"""llama.cpp as the engine to compare with, in a process of its own (larql/peer_worker.py)."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from larql.errors import LarqlError

NAME = "llama.cpp"
_WORKER = (sys.executable, "-m", "larql.peer_worker")
_BENCH_TIMEOUT = 3600  # seconds for a run of llama-bench


class PeerError(LarqlError):
    """The peer is not there, cannot run the model, or has ended."""


class Peer:
    """llama.cpp with one model and a number of threads; use it in a `with` statement.

    Raises PeerError when it cannot go on, as all methods do.
    """

    def __init__(self, path: Path, *, threads: int, context: int, worker: Sequence[str] = _WORKER) -> None:
        if worker is _WORKER and importlib.util.find_spec("llama_cpp") is None:
            raise PeerError("llama-cpp-python is not installed: pip install llama-cpp-python")
        self._idle_s = self._idle_cpu_s = 0.0  # the peer's, while we worked
        self._our_idle_s = self._our_idle_cpu_s = 0.0  # this process's, while the peer worked
        with ExitStack() as stack:
            self._complaints = stack.enter_context(tempfile.TemporaryFile())
            self._process = stack.enter_context(
                subprocess.Popen(
                    worker, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._complaints, text=True
                )
            )
            stack.callback(self._process.kill)  # what it still does is not worth waiting for
            opened = self._ask("open", path=str(path.resolve()), threads=threads, context=context)
            self._stack = stack.pop_all()
        self.version = f"llama-cpp-python {opened['version']}"
        self.system = str(opened["system"])  # what its build can use of the CPU
        self._idle_s = self._idle_cpu_s = self._our_idle_s = self._our_idle_cpu_s = 0.0  # loading does not count

    def __enter__(self) -> Peer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def decode(self, fill: Sequence[int], ids: Sequence[int], *, flash: bool) -> list[float]:
        """Seconds for each of `ids`, one at a time after `fill`; what was filled stays for the next call."""
        return [float(step) for step in self._ask("decode", flash=flash, fill=list(fill), ids=list(ids))["steps"]]

    def prefill(self, ids: Sequence[int], *, flash: bool) -> float:
        """Seconds for a prompt."""
        return float(self._ask("prefill", flash=flash, ids=list(ids))["seconds"])

    def drop(self, *, flash: bool) -> None:
        """Frees what decoding or prefilling with this setting has allocated."""
        self._ask("drop", flash=flash)

    @property
    def idle_cpu_share(self) -> dict[str, float]:
        """CPUs that each engine kept busy while the other one worked."""
        return {
            "larql": self._our_idle_cpu_s / (self._our_idle_s or 1),
            NAME: self._idle_cpu_s / (self._idle_s or 1),
        }

    def close(self) -> None:
        """Ends the process."""
        with suppress(OSError):  # of a pipe whose other end is gone
            self._stack.close()

    def _ask(self, what: str, **arguments: Any) -> dict[str, Any]:
        assert self._process.stdin
        assert self._process.stdout
        start, cpu_start = time.perf_counter(), time.process_time()
        try:
            self._process.stdin.write(json.dumps({"do": what, **arguments}) + "\n")
            self._process.stdin.flush()
            answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        except (OSError, ValueError) as error:
            raise PeerError(f"its process ended{self._last_words()}") from error
        if "error" in answer:
            raise PeerError(f"{answer['error']}{self._last_words()}")
        self._our_idle_s += time.perf_counter() - start
        self._our_idle_cpu_s += time.process_time() - cpu_start
        self._idle_s += answer["idle_s"]
        self._idle_cpu_s += answer["idle_cpu_s"]
        return answer

    def _last_words(self) -> str:
        """The end of what the process has printed, to follow a message."""
        self._complaints.seek(0)
        lines = self._complaints.read().decode(errors="replace").split("\n")
        words = [line.strip() for line in lines if line.strip()]
        return f" ({words[-1][:200]})" if words else ""


def llama_bench(path: Path, *, threads: int, prompt_tokens: int, tokens: int, depth: int) -> dict[str, Any] | None:
    """tok/s from llama-bench, the better with and without flash attention; None when it is not on the PATH.

    Raises PeerError when it fails.
    """
    program = shutil.which("llama-bench")
    if program is None:
        return None
    command = [program, "-m", str(path), "-t", str(threads), "-ngl", "0", "-fa", "0,1", "-o", "json"]
    prefill = _run_bench([*command, "-p", str(prompt_tokens), "-n", "0"])
    decode = _run_bench([*command, "-p", "0", "-n", str(tokens), *(["-d", str(depth)] if depth else [])])
    return {
        "build": prefill.get("build_commit"),
        "prefill": {"tokens": prompt_tokens, "tok_s": round(float(prefill["avg_ts"]), 2)},
        "decode": {"tokens": tokens, "depth": depth, "tok_s": round(float(decode["avg_ts"]), 2)},
    }


def _run_bench(command: list[str]) -> dict[str, Any]:
    """The fastest of the results."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_BENCH_TIMEOUT)
        results: list[dict[str, Any]] = json.loads(done.stdout)
        return max(results, key=lambda result: float(result["avg_ts"]))
    except (OSError, subprocess.SubprocessError, ValueError, KeyError) as error:
        raise PeerError(f"llama-bench failed: {error}") from error
