"""How far the logits of a path are from the f32 reference's, on a text whose tokens are given (teacher-forced).

A path is anything that yields the logits [vocab] after each token in order: an engine, llama.cpp, a trial in a test.
docs/quality-gate.md says how to read the figures.
"""

from __future__ import annotations

import importlib.resources
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from larql._core import Engine
from larql.errors import ContextError, InputError, LarqlError
from larql.model import Model
from larql.progress import Progress
from larql.session import LOGITS_CHUNK
from larql.source import open_model

Row = NDArray[np.float32]  # logits [vocab]

CLEAR_MARGIN = 0.1  # nats between the reference's first and second token: below, rounding may well swap them
_PEER_BATCH = 512  # tokens that llama.cpp takes at once, its default


@dataclass(frozen=True)
class Figures:
    """The distance of one path from the reference. KL is KL(reference || path) of one position, in nats."""

    perplexity: float
    kl_first: float
    kl_mean_after_first: float
    kl_median: float  # this and the next are over all positions
    kl_p99: float
    top1: float  # share of positions whose most likely token is the reference's
    flips: int  # positions where it is not, although the reference's margin is at least CLEAR_MARGIN
    non_finite: int  # positions with a NaN or Inf among the logits, counted as infinitely far away


@dataclass(frozen=True)
class Evaluation:
    """The figures of paths on one text."""

    tokens: int
    reference_perplexity: float
    paths: dict[str, Figures]


@dataclass(frozen=True)
class Report:
    """What `larql eval` tells."""

    evaluation: Evaluation
    threads: int
    isa: str
    peer: str  # which llama.cpp that was, or why it is not among the paths

    def as_data(self) -> dict[str, Any]:
        """For JSON, which has no infinity: null stands for it."""
        paths = {name: _without_infinity(asdict(figures)) for name, figures in self.evaluation.paths.items()}
        return asdict(self.evaluation) | {"paths": paths, "threads": self.threads, "isa": self.isa, "peer": self.peer}

    def as_table(self) -> str:
        """For people."""
        columns = ("perplexity", "KL first", "then mean", "median", "p99", "top-1", "flips", "not finite")
        lines = [f"{self.evaluation.tokens} tokens, {self.threads} threads, {self.isa}", _line("", *columns)]
        lines.append(_line("reference", f"{self.evaluation.reference_perplexity:.4f}"))
        for name, path in self.evaluation.paths.items():
            distances = (path.kl_first, path.kl_mean_after_first, path.kl_median, path.kl_p99)
            shown = (f"{path.perplexity:.4f}", *(f"{distance:.6f}" for distance in distances), f"{path.top1:.4f}")
            lines.append(_line(name, *shown, path.flips, path.non_finite))
        return "\n".join([*lines, self.peer])


def _without_infinity(figures: dict[str, Any]) -> dict[str, Any]:
    return {name: value if math.isfinite(value) else None for name, value in figures.items()}


def _line(name: str, *cells: object) -> str:
    return (f"{name:<11}" + "".join(f"{cell!s:>11}" for cell in cells)).rstrip()


def bundled_text() -> str:
    """The text to evaluate on by default, 1.8 kB, half prose and half code.

    The prose, in the public domain, is how Jane Austen's Pride and Prejudice (1813) and Herman Melville's Moby-Dick
    (1851) begin; the code is our own.
    """
    return (importlib.resources.files("larql") / "data" / "evaluation.txt").read_text("utf-8")


def evaluate(
    model: str | os.PathLike[str],
    text: str | None = None,
    *,
    precision: str = "fast",
    threads: int | None = None,
    cache: bool = True,
    progress: Progress | None = None,
) -> Report:
    """Compares a precision, and llama.cpp when it is installed, to the reference on a text.

    Raises ModelError, InputError for less than two tokens and ContextError for too many.
    """
    file = open_model(model, cache=cache, progress=progress)
    tested = Model(file, precision=precision, threads=threads)
    reference = Model(file, precision="reference", threads=threads)
    ids = tested.encode(bundled_text() if text is None else text)
    _check_length(ids, tested.engine.context)
    with ExitStack() as stack:
        paths: dict[str, Iterable[Row]] = {precision: engine_rows(tested.engine, ids)}
        try:
            peer, paths["llama.cpp"] = stack.enter_context(llama_cpp_rows(file.gguf_path, ids, tested.engine.threads))
        except PeerError as error:
            peer = str(error)
        evaluation = compare(ids, engine_rows(reference.engine, ids), paths)
    return Report(evaluation, tested.engine.threads, tested.engine.isa, peer)


def _check_length(ids: Sequence[int], context: int) -> None:
    if len(ids) < 2:
        raise InputError(f"an evaluation needs at least two tokens (BOS included), not {len(ids)}")
    if len(ids) > context:
        raise ContextError(f"{len(ids)} tokens do not fit in a context of {context}", len(ids), context)


def engine_rows(engine: Engine, ids: Sequence[int]) -> Iterator[Row]:
    """The logits after each id, computed as they are asked for."""
    sequence = engine.new_sequence()
    for start in range(0, len(ids), LOGITS_CHUNK):
        chunk = enumerate(ids[start : start + LOGITS_CHUNK], start)
        yield from engine.forward([(sequence, position, token, True) for position, token in chunk])


# Comparing


def compare(ids: Sequence[int], reference: Iterable[Row], paths: Mapping[str, Iterable[Row]]) -> Evaluation:
    """The figures of each path, which all advance together, one position at a time."""
    truth = _Softmax()
    surprises: list[float] = []
    distances = {name: _Distance() for name in paths}
    following = [*ids[1:], 0]  # nothing follows the last token: `_perplexity` leaves it out
    for target, expected, *rows in zip(following, reference, *paths.values(), strict=True):
        if not np.isfinite(expected).all():
            raise LarqlError(f"the reference's logits at position {len(surprises)} are not finite")
        truth.update(expected)
        surprises.append(-float(truth.log_p[target]))
        for distance, row in zip(distances.values(), rows, strict=True):
            distance.add(truth, row, target)
    figures = {name: distance.figures() for name, distance in distances.items()}
    return Evaluation(len(ids), _perplexity(surprises), figures)


class _Softmax:
    """The probabilities of one row after the other, in f64, since KL is a small difference.

    The arrays stay the same: to get and return their memory for each row would take longer than the arithmetic.
    """

    def __init__(self) -> None:
        self.log_p = self.p = np.empty(0)  # [vocab]
        self.top1 = 0

    def update(self, logits: Row) -> None:
        if len(self.p) != len(logits):
            self.log_p, self.p = np.empty((2, len(logits)))
        self.top1 = int(logits.argmax())
        np.subtract(logits, logits[self.top1], out=self.log_p, dtype=np.float64)
        np.exp(self.log_p, out=self.p)
        total = self.p.sum()
        self.log_p -= np.log(total)
        self.p /= total

    def is_clear(self) -> bool:
        """Whether the margin of the most likely token is at least CLEAR_MARGIN."""
        highest = self.log_p[self.top1]
        second = max(part.max(initial=-np.inf) for part in (self.log_p[: self.top1], self.log_p[self.top1 + 1 :]))
        return bool(highest - second >= CLEAR_MARGIN)


class _Distance:
    """Gathers one path's distance from the reference, position by position."""

    def __init__(self) -> None:
        self.surprises: list[float] = []  # nats, of the token that follows
        self.kl: list[float] = []
        self.same: list[bool] = []
        self.flips = 0
        self.non_finite = 0
        self._softmax = _Softmax()

    def add(self, truth: _Softmax, row: Row, target: int) -> None:
        kl = surprise = math.inf
        if np.isfinite(row).all():
            self._softmax.update(row)
            surprise = -float(self._softmax.log_p[target])
            terms = np.subtract(truth.log_p, self._softmax.log_p, out=self._softmax.log_p)
            terms *= truth.p
            kl = float(terms.sum())
        else:
            self.non_finite += 1
        same = int(row.argmax()) == truth.top1
        self.kl.append(kl)
        self.surprises.append(surprise)
        self.same.append(same)
        self.flips += not same and truth.is_clear()

    @np.errstate(invalid="ignore")  # a percentile between infinities is NaN
    def figures(self) -> Figures:
        return Figures(
            perplexity=_perplexity(self.surprises),
            kl_first=self.kl[0],
            kl_mean_after_first=float(np.mean(self.kl[1:])),
            kl_median=float(np.median(self.kl)),
            kl_p99=float(np.percentile(self.kl, 99)),
            top1=float(np.mean(self.same)),
            flips=self.flips,
            non_finite=self.non_finite,
        )


def _perplexity(surprises: Sequence[float]) -> float:
    return float(np.exp(np.mean(surprises[:-1])))


# llama.cpp


class PeerError(LarqlError):
    """The peer is not installed or cannot run this model."""


@contextmanager
def llama_cpp_rows(path: Path | None, ids: Sequence[int], threads: int) -> Iterator[tuple[str, Iterator[Row]]]:
    """What llama.cpp this is, and its logits after each id, from a process of its own; raises PeerError.

    It computes all of them before the first one arrives, and holds tokens x vocabulary x 4 bytes until the end.
    """
    if find_spec("llama_cpp") is None:
        raise PeerError(
            "llama.cpp is not compared, because llama-cpp-python is not installed: pip install llama-cpp-python"
        )
    if path is None:
        raise PeerError("llama.cpp is not compared, because it needs a .gguf file")
    program = "from larql.evaluate import _send_llama_cpp_rows; _send_llama_cpp_rows()"
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [sys.executable, "-c", program, path, str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
        )
        with process:
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                process.stdin.write(json.dumps(list(ids)).encode())
                process.stdin.close()
                header = process.stdout.readline()
                if not header:
                    process.wait()  # it has yet to say why
                    raise PeerError(f"llama.cpp is not compared, because it failed: {_last_line(errors)}")
                about, vocab = json.loads(header)
                yield about, _read_rows(process.stdout, vocab)
            finally:
                process.kill()


def _last_line(file: BinaryIO) -> str:
    file.seek(0)
    lines = file.read().decode(errors="replace").split("\n")
    return next((line for line in reversed(lines) if line.strip()), "no reason given")


def _read_rows(pipe: Any, vocab: int) -> Iterator[Row]:
    while data := pipe.read(4 * vocab):
        yield np.frombuffer(data, np.float32)


def _send_llama_cpp_rows() -> None:
    """What the process of `llama_cpp_rows` runs: ids from stdin, then a line about the peer and the rows to stdout."""
    path, threads = sys.argv[1:]
    ids = json.load(sys.stdin)
    with os.fdopen(os.dup(1), "wb") as out:
        os.dup2(2, 1)  # the library may print
        peer = importlib.import_module("llama_cpp")
        model = peer.Llama(
            path,
            n_ctx=len(ids),
            n_batch=_PEER_BATCH,
            n_threads=int(threads),
            n_threads_batch=int(threads),
            flash_attn=True,  # as llama.cpp's own programs do
            logits_all=True,
            verbose=False,
        )
        model.eval(ids)
        system = peer.llama_print_system_info().decode().strip(" |")  # its figures differ between instruction sets
        about = f"llama.cpp of llama-cpp-python {peer.__version__}, {system}"
        out.write(json.dumps([about, model.n_vocab()]).encode() + b"\n")
        for row in model.scores[: len(ids)]:
            out.write(row.astype(np.float32).tobytes())
