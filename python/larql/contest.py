"""The pieces of work that `larql bench` times, on our engine and in turn on a peer.

One is decoding: the cache holds `depth` tokens, then single tokens follow, each fed and the next one chosen. The other
is prefilling: a prompt goes into an empty cache. The peer gets the ids that our engine has chosen, so that both do the
same work; ours also chooses, which the peer is spared.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from larql._core import Sampler
from larql.errors import LarqlError
from larql.peer import PeerError

if TYPE_CHECKING:
    from larql.model import Model
    from larql.peer import Peer

_SETTLE_S = 0.05  # between the turns of two engines: threads that wait by spinning give up within this
_TRIALS = 2  # runs of each of the peer's settings before the turns; the faster one counts

Stages = dict[str, float]  # seconds in each stage of one run


@dataclass
class Turns:
    """What the engines did in turn: for each turn, seconds of each timed call."""

    ours: list[list[float]] = field(default_factory=list)
    peer: list[list[float]] = field(default_factory=list)
    roofline: list[float] = field(default_factory=list)  # GB/s, measured before each turn
    peer_flash: bool | None = None  # whether the peer was faster with flash attention
    profiled: list[float] = field(default_factory=list)  # seconds of the calls of one more run
    stages: Stages | None = None  # where that run spent them


@dataclass(frozen=True)
class Rules:
    """How often each piece is done, and whether a profiled run follows."""

    warmup: int
    repeat: int
    profile: bool


def _nothing() -> None:
    pass


class Decoder:
    """Our engine with a filled cache."""

    def __init__(self, model: Model, fill: Sequence[int], tokens: int) -> None:
        self.ids: list[int] = []  # chosen after `fill`, the same in every run
        self._tokens = tokens
        self._last = fill[-1:]
        self._base = model.session()
        self._base.feed(fill[:-1])

    def run(self, before: Callable[[], None] = _nothing) -> list[float]:
        """Seconds for each token. The last token of the fill is fed untimed, to bring caches up, before `before`."""
        session, sampler = self._base.fork(), Sampler()
        ids = [session.sample(self._last, sampler)]
        before()
        steps = []
        for _ in range(self._tokens):
            start = time.perf_counter()
            chosen = session.sample(ids[-1:], sampler)
            steps.append(time.perf_counter() - start)
            ids.append(chosen)
        if self.ids and self.ids != ids[:-1]:
            raise LarqlError("two runs have chosen different tokens, which must not happen: please report it")
        self.ids = ids[:-1]
        return steps


def decode_in_turns(
    model: Model, fill: Sequence[int], tokens: int, rules: Rules, roofline: Callable[[], float], peer: Peer | None
) -> tuple[Turns, list[int]]:
    """Times single tokens after `fill`; also the ids that were chosen."""
    decoder = Decoder(model, fill, tokens)
    for _ in range(max(1, rules.warmup) if peer else rules.warmup):
        decoder.run()  # which also finds out the ids for the peer
    turns = Turns()
    if peer:
        turns.peer_flash = _better_flash(peer, lambda flash: sum(peer.decode(fill, decoder.ids, flash=flash)))

    def peer_run() -> list[float]:
        assert peer
        return peer.decode(fill, decoder.ids, flash=bool(turns.peer_flash))

    for _ in range(rules.repeat):
        turns.roofline.append(roofline())
        _turn(turns, decoder.run, peer_run if peer else None)
    if rules.profile:
        _profile(model, turns, decoder.run)
    return turns, decoder.ids


def prefill_in_turns(model: Model, ids: Sequence[int], rules: Rules, peer: Peer | None) -> Turns:
    """Times a prompt into an empty cache: one call each turn."""

    def run(before: Callable[[], None] = _nothing) -> list[float]:
        session, sampler = model.session(), Sampler()
        before()
        start = time.perf_counter()
        session.sample(ids, sampler)
        return [time.perf_counter() - start]

    for _ in range(rules.warmup):
        run()
    turns = Turns()
    if peer:
        turns.peer_flash = _better_flash(peer, lambda flash: peer.prefill(ids, flash=flash))

    def peer_run() -> list[float]:
        assert peer
        return [peer.prefill(ids, flash=bool(turns.peer_flash))]

    for _ in range(rules.repeat):
        _turn(turns, run, peer_run if peer else None)
    if rules.profile:
        _profile(model, turns, run)
    return turns


def _turn(turns: Turns, ours: Callable[[], list[float]], peer: Callable[[], list[float]] | None) -> None:
    turns.ours.append(ours())
    if peer:
        time.sleep(_SETTLE_S)
        turns.peer.append(peer())
        time.sleep(_SETTLE_S)


def _profile(model: Model, turns: Turns, run: Callable[[Callable[[], None]], list[float]]) -> None:
    """One more run, whose timed calls are profiled."""
    try:
        turns.profiled = run(lambda: model.engine.set_profiling(True))
        turns.stages = model.engine.profile()
    finally:
        model.engine.set_profiling(False)


def _better_flash(peer: Peer, seconds: Callable[[bool], float]) -> bool:
    """Tries the peer with and without flash attention; the loser's memory is freed."""
    best: dict[bool, float] = {}
    refusal: PeerError | None = None
    for _ in range(1 + _TRIALS):  # the first round warms up
        for flash in (False, True):
            try:
                best[flash] = min(seconds(flash), best.get(flash, float("inf")))
            except PeerError as error:
                refusal = error
    if refusal and not best:
        raise refusal
    chosen = min(best, key=lambda flash: best[flash])
    peer.drop(flash=not chosen)
    return chosen
