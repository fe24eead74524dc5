"""Measures one model on this machine: prefill and decoding apart, next to what memory allows and next to a peer."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from larql import _core
from larql.contest import Rules, Turns, decode_in_turns, prefill_in_turns
from larql.errors import ContextError, InputError
from larql.figures import decode_figures, prefill_figures, ratio, rounded, spread, stage_figures, traffic
from larql.inspect import describe
from larql.machine import machine_facts, source_commit
from larql.model import Model
from larql.model_file import ModelFile
from larql.peer import NAME, Peer, PeerError, llama_bench
from larql.progress import Progress
from larql.roofline import ReadProbe, refuse_debug_build
from larql.source import open_model

FORMAT = 1  # of the record
PROMPT = "The capital of France is"
_BUSY = 0.05  # share of a CPU that an engine may take when it should be idle
_PAIRS = 5  # turns that a ratio needs for its spread to mean something

Say = Callable[[str], None]


@dataclass(frozen=True)
class BenchSettings:
    """What to measure. Raises InputError for a number that makes no sense."""

    tokens: int = 16  # decoded in each run; end tokens do not end it
    warmup: int = 1  # runs that do not count
    repeat: int = 5  # runs that do
    prompt: str = PROMPT
    prompt_tokens: int = 512  # of the long prefill
    depth: int | None = None  # tokens in the cache when decoding begins; None: those of the prompt
    threads: tuple[int, ...] = ()  # each measured by itself; empty: what suits the machine
    precision: str = "fast"
    profile: bool = False
    compare: bool = False

    def __post_init__(self) -> None:
        for name, least in (("tokens", 1), ("warmup", 0), ("repeat", 1), ("prompt_tokens", 1), ("depth", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise InputError(f"{name} is {value}; it must be at least {least}")


def bench(
    name: str,
    settings: BenchSettings,
    *,
    note: str | None = None,
    say: Say = lambda _: None,
    cache: bool = True,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """One record, ready for JSON. `say` gets a line about what goes on or what is wrong; the rest is as in `load`.

    With several thread counts, the results that are otherwise keys of the record are in a list under `sweep`. Raises
    LarqlError for a debug build, InputError and ContextError for settings that do not fit, ModelError for the file.
    """
    refuse_debug_build()
    file = open_model(name, cache=cache, progress=progress)
    probe = ReadProbe()
    if shortage := probe.shortage():
        say(shortage)
    results: list[dict[str, Any]] = []
    for threads in settings.threads or (None,):
        model = Model(file, threads=threads, precision=settings.precision)
        results.append(_measure(file, model, settings, probe, say))
    record = {
        "kind": "bench",
        "format": FORMAT,
        "date": datetime.now(timezone.utc).date().isoformat(),
        "note": note,
        **circumstances(name, file, model),
        "settings": asdict(settings) | {"threads": [result["threads"] for result in results]},
    }
    return record | (results[0] if len(results) == 1 else {"sweep": results})


def circumstances(name: str, file: ModelFile, model: Model) -> dict[str, Any]:
    """What is measured, and on what: a part of every record of a model. `name` is what the user called it."""
    facts = describe(file, model.engine)
    return {
        "machine": machine_facts(),
        "build": {"version": _core.__version__, "commit": source_commit(), "isa": model.engine.isa},
        "model": {
            "name": file.path.stem if Path(name).expanduser().exists() else name,
            "sha256": file.sha256,
            "parameters": facts["parameters"],
            "quant_mix": facts["tensors"],
        },
    }


def _measure(file: ModelFile, model: Model, settings: BenchSettings, probe: ReadProbe, say: Say) -> dict[str, Any]:
    """The results for one number of threads; a peer that fails is left out."""
    work = _Work(model, settings)
    threads = model.engine.threads
    if not settings.compare:
        return work.take_turns(probe, None, say)
    path = file.gguf_path
    if path is None:
        say(f"{NAME} is not compared: it needs a .gguf file")
        return work.take_turns(probe, None, say)
    try:
        say(f"{_on(threads)}: loading {NAME}")
        with Peer(path, threads=threads, context=work.longest) as peer:
            result = work.take_turns(probe, peer, say)
    except PeerError as error:
        say(f"{NAME} is not compared: {error}")
        result = work.take_turns(probe, None, say)
    try:
        check = llama_bench(
            path,
            threads=threads,
            prompt_tokens=settings.prompt_tokens,
            tokens=settings.tokens,
            depth=settings.depth or 0,
        )
    except PeerError as error:
        say(str(error))
        check = None
    return result | ({"llama_bench": check} if check else {})


class _Work:
    """The token ids of what is measured, for one number of threads.

    Raises InputError for a prompt without tokens, ContextError when something does not fit.
    """

    def __init__(self, model: Model, settings: BenchSettings) -> None:
        self._model, self._settings = model, settings
        self._prompt = model.encode(settings.prompt)
        if not self._prompt:
            raise InputError("the prompt has no tokens; give at least one")
        self._depth = settings.depth or len(self._prompt)
        self.longest = max(self._depth + settings.tokens, settings.prompt_tokens)
        if self.longest > model.engine.context:
            raise ContextError(
                f"{self.longest} tokens do not fit in a context of {model.engine.context}",
                self.longest,
                model.engine.context,
            )

    def take_turns(self, probe: ReadProbe, peer: Peer | None, say: Say) -> dict[str, Any]:
        """Decodes, prefills and prefills the prompt, each in turn with the peer but the last."""
        model, settings, depth = self._model, self._settings, self._depth
        threads = model.engine.threads
        rules = Rules(settings.warmup, settings.repeat, settings.profile)
        say(f"{_on(threads)}: decoding {settings.tokens} tokens from depth {depth}")
        decode, ids = decode_in_turns(
            model, self._text(depth), settings.tokens, rules, lambda: probe.best_gb_s(threads), peer
        )
        say(f"{_on(threads)}: prefilling {settings.prompt_tokens} tokens")
        prefill = prefill_in_turns(model, self._text(settings.prompt_tokens), rules, peer)
        own = prefill_in_turns(model, self._prompt, Rules(settings.warmup, settings.repeat, profile=False), None)
        result: dict[str, Any] = {
            "threads": threads,
            "roofline": {"buffer_bytes": probe.n_bytes, **spread("gb_s", decode.roofline)},
            "prefill": {
                **prefill_figures(settings.prompt_tokens, prefill.ours),
                "prompt": prefill_figures(len(self._prompt), own.ours),
                **stage_figures(prefill),
            },
            "decode": {
                **decode_figures(depth, decode.ours),
                **traffic(model, depth, decode),
                "ids_sha256": hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()[:16],
                **stage_figures(decode),
            },
        }
        return result | (self._compared(decode, prefill, peer, say) if peer else {})

    def _text(self, length: int) -> Sequence[int]:
        """So many tokens: the prompt, said again and again."""
        again = self._model.encode(self._settings.prompt, bos=False) or self._prompt
        return list(itertools.islice(itertools.chain(self._prompt, itertools.cycle(again)), length))

    def _compared(self, decode: Turns, prefill: Turns, peer: Peer, say: Say) -> dict[str, Any]:
        """The peer's figures, and ours over the peer's; says what makes them doubtful."""
        settings = self._settings
        if settings.repeat < _PAIRS:
            say(f"ratios of {settings.repeat} pairs show little of their spread; use --repeat {_PAIRS} or more")
        if "OPENMP = 1" not in peer.system:
            say(f"{NAME} was built without OpenMP: it starts threads for every token, which slows it down")
        for engine, share in peer.idle_cpu_share.items():
            if share > _BUSY:
                say(f"{engine} took {100 * share:.0f} % of a CPU in the other's turns, which disturbs the comparison")
        return {
            "peer": {
                "name": NAME,
                "version": peer.version,
                "system": peer.system,
                "prefill": {
                    **prefill_figures(settings.prompt_tokens, prefill.peer),
                    "flash_attention": prefill.peer_flash,
                },
                "decode": {**decode_figures(self._depth, decode.peer), "flash_attention": decode.peer_flash},
                "idle_cpu_share": {engine: rounded(share) for engine, share in peer.idle_cpu_share.items()},
            },
            "ratio": {"prefill": ratio(prefill), "decode": ratio(decode)},
        }


def _on(threads: int) -> str:
    return f"{threads} thread{'s' if threads > 1 else ''}"
