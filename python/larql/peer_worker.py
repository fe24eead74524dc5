"""llama.cpp in a process of its own, run as `python -m larql.peer_worker`.

It reads one JSON object a line from stdin and answers each with one line on stdout: `open`, `decode`, `prefill`,
`drop` (a context), and an end of input ends it. Times are seconds around the low-level calls, so that Python's own
work in llama-cpp-python does not count. The larger program is larql/peer.py.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

BATCH = 512  # tokens of one call, llama.cpp's own default for n_ubatch


class Worker:
    """One model, and at most one context with and one without flash attention."""

    def __init__(self) -> None:
        self._api: Any = None
        self._model: Any = None
        self._options: dict[str, Any] = {}
        self._contexts: dict[bool, Any] = {}
        self._fills: dict[bool, list[int]] = {}  # what a context holds before the decoded tokens

    def open(self, path: str, threads: int, context: int) -> dict[str, Any]:
        """Loads a model; `context` is the tokens that must fit."""
        self._api = api = importlib.import_module("llama_cpp")
        api.llama_backend_init()
        parameters = api.llama_model_default_params()
        parameters.n_gpu_layers = 0
        self._model = api.llama_model_load_from_file(os.fsencode(path), parameters)
        if not self._model:
            raise RuntimeError("it cannot load this file")
        self._options = {"n_threads": threads, "n_threads_batch": threads, "n_ctx": -(-context // 256) * 256}
        return {"version": api.__version__, "system": api.llama_print_system_info().decode().strip(" |")}

    def decode(self, flash: bool, fill: list[int], ids: list[int]) -> dict[str, Any]:
        """Fills the context, evaluates the last token of `fill` untimed and then one token of `ids` at a time."""
        context = self._context(flash)
        if self._fills.get(flash) != fill or not self._rewind(context, len(fill) - 1):
            self._clear(flash)
            self._evaluate(context, fill[:-1])
            self._fills[flash] = fill
        self._evaluate(context, fill[-1:])
        return {"steps": [self._timed(context, [token]) for token in ids]}

    def prefill(self, flash: bool, ids: list[int]) -> dict[str, Any]:
        """Evaluates a prompt from an empty context."""
        context = self._context(flash)
        self._clear(flash)
        return {"seconds": self._timed(context, ids)}

    def drop(self, flash: bool) -> dict[str, Any]:
        """Frees a context."""
        self._fills.pop(flash, None)
        if context := self._contexts.pop(flash, None):
            self._api.llama_free(context)
        return {}

    def _context(self, flash: bool) -> Any:
        if flash not in self._contexts:
            parameters = self._api.llama_context_default_params()
            options = {"n_batch": BATCH, "n_ubatch": BATCH, "n_seq_max": 1, "offload_kqv": False, "op_offload": False}
            # Local layers keep their window only, as llama.cpp's own programs do: less to read at depth.
            options |= {"swa_full": False, "no_perf": True, **self._options}
            options["flash_attn_type" if hasattr(parameters, "flash_attn_type") else "flash_attn"] = int(flash)
            for name, value in options.items():
                if hasattr(parameters, name):  # versions differ
                    setattr(parameters, name, value)
            context = self._api.llama_init_from_model(self._model, parameters)
            if not context:
                raise RuntimeError(f"it cannot run with flash attention {'on' if flash else 'off'}")
            self._contexts[flash] = context
        return self._contexts[flash]

    def _clear(self, flash: bool) -> None:
        self._fills.pop(flash, None)
        self._api.llama_memory_clear(self._api.llama_get_memory(self._contexts[flash]), False)

    def _rewind(self, context: Any, length: int) -> bool:
        """Drops positions from `length` on; whether that can be done."""
        return bool(self._api.llama_memory_seq_rm(self._api.llama_get_memory(context), 0, length, -1))

    def _timed(self, context: Any, ids: list[int]) -> float:
        start = time.perf_counter()
        self._evaluate(context, ids)
        return time.perf_counter() - start

    def _evaluate(self, context: Any, ids: list[int]) -> None:
        """Appends tokens and waits for the logits after the last one."""
        for start in range(0, len(ids), BATCH):
            chunk = ids[start : start + BATCH]
            tokens = (self._api.llama_token * len(chunk))(*chunk)
            status = self._api.llama_decode(context, self._api.llama_batch_get_one(tokens, len(chunk)))
            if status:
                raise RuntimeError(f"llama_decode returned {status}")
        self._api.llama_synchronize(context)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the larger program decides what an interrupt ends
    # Answers go to the pipe; what libraries print to stdout goes to stderr.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    serve(Worker(), answers.write, answers.flush)


def serve(worker: Worker, write: Callable[[str], Any], flush: Callable[[], Any]) -> None:
    """Answers requests until the input ends; each answer says what the wait for its request cost in CPU time."""
    idle_from, cpu_from = time.perf_counter(), time.process_time()
    for line in sys.stdin:
        idle = {"idle_s": time.perf_counter() - idle_from, "idle_cpu_s": time.process_time() - cpu_from}
        request = json.loads(line)
        try:
            answer = getattr(worker, request.pop("do"))(**request)
        except Exception as error:
            answer = {"error": str(error) or type(error).__name__}
        idle_from, cpu_from = time.perf_counter(), time.process_time()
        write(json.dumps(answer | idle) + "\n")
        flush()


if __name__ == "__main__":
    main()
