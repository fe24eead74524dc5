"""From timed turns to the figures of a record: rates, milliseconds, bytes and shares, as medians with their spread."""

from __future__ import annotations

from statistics import fmean, median
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from larql.config import ModelConfig
    from larql.contest import Turns
    from larql.model import Model

_KV_BYTES = {"fast": 2, "reference": 4}  # of one element of the cache


def kv_bytes_per_token(config: ModelConfig, precision: str, depth: int, tokens: int) -> float:
    """Mean bytes of keys and values that each of `tokens` reads when the first has `depth` before it.

    A token sees itself, and in a layer with a window no more tokens than that.
    """
    row = 2 * config.n_kv_heads * config.head_dim * _KV_BYTES[precision]
    lengths = range(depth + 1, depth + tokens + 1)
    visible = sum(min(length, layer.window or length) for length in lengths for layer in config.layers)
    return row * visible / tokens


def prefill_figures(tokens: int, runs: list[list[float]]) -> dict[str, Any]:
    """Rates of a prompt that was one timed call in each run."""
    return {"tokens": tokens, **spread("tok_s", [tokens / sum(run) for run in runs])}


def decode_figures(depth: int, runs: list[list[float]]) -> dict[str, Any]:
    """Rates are the timed steps of a run over their seconds; the milliseconds are those of all steps."""
    ms = [1e3 * step for run in runs for step in run]
    return {
        "tokens": len(runs[0]),
        "depth": depth,
        **spread("tok_s", [len(run) / sum(run) for run in runs]),
        "ms_mean": rounded(fmean(ms)),
        "ms_p50": rounded(float(np.percentile(ms, 50))),
        "ms_p99": rounded(float(np.percentile(ms, 99))),
    }


def traffic(model: Model, depth: int, decode: Turns) -> dict[str, Any]:
    """Bytes that a token reads, and how near this comes to what memory gave just before."""
    weights = model.engine.weight_bytes / 1e9
    kv = kv_bytes_per_token(model.config, model.engine.precision, depth, len(decode.ours[0])) / 1e9
    rates = [(weights + kv) * len(run) / sum(run) for run in decode.ours]
    shares = [rate / limit for rate, limit in zip(rates, decode.roofline, strict=True)]
    return {
        "gb_per_token": rounded(weights + kv),
        "weights_gb_per_token": rounded(weights),
        "kv_gb_per_token": rounded(kv),
        "gb_s": rounded(median(rates)),
        **spread("roofline_share", shares),
    }


def stage_figures(turns: Turns) -> dict[str, Any]:
    """Milliseconds of one timed call in each stage, and in all; nothing without a profiled run.

    `outside` is what the core's stages leave: the way from Python and back.
    """
    if turns.stages is None:
        return {}
    per_call = 1e3 / len(turns.profiled)
    total = sum(turns.profiled)
    stages = turns.stages | {"outside": total - sum(turns.stages.values())}
    return {
        "stages": {name: rounded(per_call * seconds) for name, seconds in stages.items()},
        "stages_total_ms": rounded(per_call * total),
    }


def ratio(turns: Turns) -> dict[str, Any]:
    """Our speed over the peer's, turn by turn: above 1, ours is faster."""
    pairs = [sum(peer) / sum(ours) for ours, peer in zip(turns.ours, turns.peer, strict=True)]
    return {
        "median": rounded(median(pairs)),
        "min": rounded(min(pairs)),
        "max": rounded(max(pairs)),
        "pairs": len(pairs),
    }


def spread(name: str, values: list[float]) -> dict[str, float]:
    """The median under `name`, the least and the largest under `name_min` and `name_max`."""
    return {
        name: rounded(median(values)),
        f"{name}_min": rounded(min(values)),
        f"{name}_max": rounded(max(values)),
    }


def rounded(value: float) -> float:
    """Five digits: more than any measurement has."""
    return float(f"{value:.5g}")
