"""The climb from a naive decoder to LARQL's, one measured step at a time, on this machine.

Each rung is a decoder that runs for real (rust/ladder.rs) and has what the ones before it have. What it says is
compared to what f32 arithmetic would say.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from larql import _core
from larql.bench import circumstances
from larql.errors import InputError
from larql.figures import rounded
from larql.machine import usable_cores
from larql.model import Model
from larql.plots import load_plotting, save_figure
from larql.progress import Progress
from larql.roofline import ReadProbe, default_threads, refuse_debug_build
from larql.source import open_gguf, open_model

FORMAT = 1  # of the record
PROMPT = (
    "A computer reads every weight of a language model once for each token that it writes. So the time of a token is "
    "the size of the model, divided by"
)
PROMPT_TOKENS = 32
TOKENS = 32  # that a rung writes, when it is fast enough
SECONDS = 6.0  # after which a slow rung writes no more
_ROUNDS = 2  # more, of the fast rungs
_CLOSE = 1.0  # how far below the best logit of f32 arithmetic an id may be, in nats

Say = Callable[[str], None]

# Of each rung what it does, and why that helps.
WHY = {
    "naive": "Every token computes the whole text again, and decodes every weight to f32 first.",
    "cache": "Keys and values of earlier tokens are kept, so a token costs one pass for itself only.",
    "stored-bytes": "A token is multiplied by the stored blocks: no f32 copy of a matrix is written and read again.",
    "simd": "Eight products at a time instead of one.",
    "quantised-head": "The output head, in f32 so far, is read as the file has it: a fraction of the bytes.",
    "accumulators": "Four sums that do not wait for each other hide the latency of an addition.",
    "integers": "Activations in int8 (a scale for each 256): 32 products at a time, and no weight becomes a float.",
    "chunks": "A task is 64 rows, not one, so threads compute instead of asking for work.",
    "threads": "As many threads as the memory can feed, by this machine's measurement.",
    "prefill": "A prompt, too, is multiplied by the stored blocks: each is unpacked once for all its tokens.",
    "fine-scales": "A scale for each 32 activations, the two largest in f32: for the quality, not for speed.",
    "panels": "Weights lie in panels of 16 rows: one load feeds many rows, and no sum goes across a register.",
    "team": "Threads enter once for a token and spin; an operation begins by one atomic store.",
    "prefetch": "Kernels ask for memory 8 KiB before they use it.",
    "engine": "LARQL itself: products of one input are one operation; attention and norms are spread over threads.",
}


@dataclass(frozen=True)
class Step:
    """What a rung did. Rates are tokens per second."""

    rung: str
    threads: int
    prompt_tok_s: float
    tok_s: float  # median of the tokens after the first
    tokens: int  # that it wrote
    agreeing: int  # of them, those that f32 arithmetic finds most likely, too
    lowest: float  # logit of its worst choice, from the best of f32 arithmetic, in nats; 0 is the best
    gain: float | None  # tok_s over that of the rung before
    gb_s: float  # stored weights of a token, times tok_s
    share: float  # of what memory gave


class _Run:
    """What was measured of a rung, in one climb or several."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.ids: list[int] = []
        self.prompt_s: list[float] = []  # of each climb
        self.step_s: list[float] = []  # of each token after the first, of all climbs
        self.seconds = 0.0  # of the last climb

    @property
    def tok_s(self) -> float:
        """Of the median token."""
        return 1 / statistics.median(self.step_s)

    def climb(self, ladder: _core.Ladder, rung: str, prompt: list[int], tokens: int, seconds: float) -> None:
        """Once more."""
        self.ids, prompt_s, step_s = ladder.climb(rung, prompt, tokens, seconds, self.threads)
        self.prompt_s.append(prompt_s)
        self.step_s += step_s
        self.seconds = prompt_s + sum(step_s)


def climb(
    model: str | os.PathLike[str],
    *,
    tokens: int = TOKENS,
    seconds: float = SECONDS,
    say: Say = lambda _: None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """The record of a climb, ready for JSON; `say` hears how long it will take, and each rung's result.

    `model` is as for `larql.load`, but no .vindex; `progress` follows its conversion. A rung writes `tokens` tokens, or
    fewer where that takes more than `seconds`.

    Raises LarqlError for a debug build, ModelError for the file, and InputError for a .vindex, fewer than two tokens or
    a model whose context is too short.
    """
    refuse_debug_build()
    if tokens < 2:
        raise InputError(f"tokens is {tokens}; a rate needs at least 2")
    file, packed = open_gguf(model), open_model(model, progress=progress)
    reference = Model(packed, precision="reference")
    fast = Model(packed)
    prompt = _prompt(reference)
    if len(prompt) + tokens > reference.engine.context:
        raise InputError(f"{len(prompt) + tokens} tokens do not fit in a context of {reference.engine.context}")
    ladder = _core.Ladder(file.gguf, file.tensor_names, file.config.to_json())
    probe = ReadProbe()
    best = default_threads()
    roofline = statistics.median(probe.best_gb_s(best) for _ in range(3))
    say(f"this takes about {_minutes(_estimate(ladder, prompt, seconds))}")
    gigabytes = fast.engine.weight_bytes / 1e9
    runs = {rung: _Run(best if _reached(rung, "threads") else usable_cores()) for rung in ladder.rungs()}
    for rung, run in runs.items():
        run.climb(ladder, rung, prompt, tokens, seconds)
        say(f"{rung}: {run.tok_s:.2f} tok/s")
    # Fast ones again, all in turn: what disturbs the machine for a while does not hit one of them alone.
    fast_runs = {rung: run for rung, run in runs.items() if run.seconds < seconds / 2}
    for n in range(_ROUNDS if fast_runs else 0):
        say(f"the {len(fast_runs)} fast rungs again, round {n + 1} of {_ROUNDS}")
        for rung, run in fast_runs.items():
            run.climb(ladder, rung, prompt, tokens, seconds)
    steps: list[Step] = []
    for rung, run in runs.items():
        agreeing, lowest = _compare(reference, prompt, run.ids)
        step = Step(
            rung=rung,
            threads=run.threads,
            prompt_tok_s=rounded(len(prompt) / statistics.median(run.prompt_s)),
            tok_s=rounded(run.tok_s),
            tokens=len(run.ids),
            agreeing=agreeing,
            lowest=rounded(lowest),
            gain=rounded(run.tok_s / steps[-1].tok_s) if steps else None,
            gb_s=rounded(gigabytes * run.tok_s),
            share=rounded(gigabytes * run.tok_s / roofline),
        )
        steps.append(step)
    return {
        "kind": "ladder",
        "format": FORMAT,
        "date": datetime.now(timezone.utc).date().isoformat(),
        **circumstances(os.fspath(model), packed, fast),
        "settings": {"prompt_tokens": len(prompt), "tokens": tokens, "seconds": seconds},
        "roofline_gb_s": rounded(roofline),
        "weights_gb_per_token": rounded(gigabytes),
        "rungs": [asdict(step) for step in steps],
    }


def _prompt(model: Model) -> list[int]:
    """PROMPT_TOKENS tokens of the prompt, said again where it is shorter."""
    ids = model.encode(PROMPT)
    while len(ids) < PROMPT_TOKENS:
        ids += model.encode(" " + PROMPT, bos=False)
    return ids[:PROMPT_TOKENS]


def _reached(rung: str, goal: str) -> bool:
    """Whether a rung has what `goal` brings."""
    rungs = _core.Ladder.rungs()
    return rungs.index(rung) >= rungs.index(goal)


def _estimate(ladder: _core.Ladder, prompt: Sequence[int], seconds: float) -> float:
    """Seconds that a climb takes, about: from a short prompt and one token on the second rung."""
    few = 4
    _, short, (single,) = ladder.climb("cache", prompt[:few], 2, 0.0, usable_cores())
    per_token = max(short - single, 0.0) / (few - 1)
    slow = single + per_token * len(prompt)
    # Three rungs without vector instructions, the first of which computes all twice; then six whose prompts still
    # decode all weights, and six fast ones, some of both three times.
    return 4 * slow + 3 * seconds + 6 * (single + slow / 8 + seconds / 2) + 12 * seconds / 2


def _compare(reference: Model, prompt: Sequence[int], ids: Sequence[int]) -> tuple[int, float]:
    """How many ids f32 arithmetic finds most likely, too, and how far below the best the worst choice is, in nats.

    Each is judged after the ids before it, whatever these are.
    """
    logits = reference.logits([*prompt, *ids[:-1]])[len(prompt) - 1 :]
    below = logits[np.arange(len(ids)), ids] - logits.max(axis=1)
    return int((below == 0).sum()), float(below.min())


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} minutes" if seconds >= 90 else f"{seconds:.0f} seconds"


def as_table(record: dict[str, Any]) -> str:
    """A climb for people."""
    model, rungs = record["model"], record["rungs"]
    size = record["weights_gb_per_token"]
    rows = [
        f"{model['name']}: {model['parameters'] / 1e6:.0f} M parameters, {size:.3f} GB of weights for each token; "
        f"memory gives {record['roofline_gb_s']:.1f} GB/s",
        "",
        f"{'rung':<15}{'tok/s':>8}{'gain':>7}{'GB/s':>7}{'share':>7}{'prompt':>8}{'same':>7}  what it does",
    ]
    for row in rungs:
        gain = "" if row["gain"] is None else f"{row['gain']:.2f}"
        mark = "" if row["lowest"] >= -_CLOSE else " !"
        rows.append(
            f"{row['rung']:<15}{row['tok_s']:>8.2f}{gain:>7}{row['gb_s']:>7.2f}{row['share']:>7.0%}"
            f"{row['prompt_tok_s']:>8.1f}{row['agreeing']:>4}/{row['tokens']}{mark}  {WHY[row['rung']]}"
        )
    total = rungs[-1]["tok_s"] / rungs[0]["tok_s"]
    rows += [
        "",
        f"In all {total:.0f} times as fast. prompt: tokens per second of the prompt. same: of the tokens that a rung",
        "chose, those that f32 arithmetic would have chosen, too (! marks a choice that it finds unlikely).",
    ]
    return "\n".join(rows)


def save_plot(record: dict[str, Any], path: Path) -> None:
    """Draws the rates of a climb into a file; its ending chooses the format. Raises InputError."""
    figure = load_plotting().Figure(figsize=(9, 6), layout="constrained")
    draw(record, figure.subplots())
    save_figure(figure, path)


def draw(record: dict[str, Any], axes: Any) -> None:
    """Draws a climb: bars of tok/s, the first rung at the bottom, with gains, against what memory allows."""
    rungs = record["rungs"]
    rates = [row["tok_s"] for row in rungs]
    limit = record["roofline_gb_s"] / record["weights_gb_per_token"]
    positions = range(len(rungs))
    axes.barh(positions, rates, color=["#9db8d9"] * (len(rungs) - 1) + ["#2c5f9e"])
    axes.set_yticks(positions, [row["rung"] for row in rungs])
    axes.set_xscale("log")
    axes.set_xlim(min(rates) / 1.5, max(*rates, limit) * 3)
    for position, row in zip(positions, rungs, strict=True):
        gain = "" if row["gain"] is None else f"  (x {row['gain']:.2f})"
        label = axes.text(row["tok_s"] * 1.05, position, f"{row['tok_s']:.3g}{gain}", va="center", fontsize=9)
        label.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 1.0})
    axes.axvline(limit, color="#b03030", linestyle=":", zorder=0)
    axes.text(limit, len(rungs) - 0.4, f" memory: {limit:.3g}", color="#b03030", va="bottom", ha="center", fontsize=9)
    axes.set_xlabel("tokens per second (logarithmic)")
    total = rates[-1] / rates[0]
    axes.set_title(f"{record['model']['name']} on {record['machine']['cpu']}: {total:.0f} times as fast", pad=18)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
