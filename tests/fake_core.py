"""The engine's interface in a few lines of Python: a model whose next token is a rule, and a tokenizer of words."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from larql.errors import InputError

Rule = Callable[[list[int]], int]  # all tokens so far to the next one


class FakeSequence:
    """Tokens of one sequence; with a window, going back forgets all since the last snapshot before there."""

    def __init__(self, window: bool) -> None:
        self.ids: list[int] = []
        self.window = window
        self.snapshots = [0]

    def __len__(self) -> int:
        return len(self.ids)

    def fork(self) -> FakeSequence:
        other = FakeSequence(self.window)
        other.ids = list(self.ids)
        other.snapshots = list(self.snapshots)
        return other

    def snapshot(self) -> None:
        self.snapshots.append(len(self.ids))

    def truncate(self, length: int) -> int:
        if length < len(self.ids):
            self.snapshots = [n for n in self.snapshots if n <= length]
            self.ids = self.ids[: self.snapshots[-1] if self.window else length]
        return len(self.ids)


class FakeSampler:
    """The most likely token."""

    last_logprob: float | None = None

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.observed: list[int] = []

    def observe(self, ids: Sequence[int]) -> None:
        self.observed += ids

    def sample(self, logits: NDArray[np.float32]) -> int:
        self.last_logprob = -0.5
        return int(logits.argmax())


class FakeEngine:
    """Predicts rule(tokens so far) with certainty.

    `sizes` records the tokens of each forward. `fail` maps the number of a forward to an error raised instead of it;
    with `late`, after it has taken effect.
    """

    isa = "fake"
    precision = "fast"
    threads = 3
    weight_bytes = 1_000_000

    def __init__(self, rule: Rule, *, vocab: int = 50, context: int = 4096, window: bool = False) -> None:
        self.rule = rule
        self.vocab = vocab
        self.context = context
        self.window = window
        self.sizes: list[int] = []
        self.fail: dict[int, BaseException] = {}
        self.late = False

    def new_sequence(self) -> FakeSequence:
        return FakeSequence(self.window)

    def forward(self, batch: Sequence[tuple[FakeSequence, int, int, bool]]) -> NDArray[np.float32]:
        failure = self.fail.get(len(self.sizes))
        self.sizes.append(len(batch))
        if failure and not self.late:
            raise failure
        for _, _, token, _ in batch:
            if token >= self.vocab:
                raise InputError(f"token id {token} is out of range")
        rows = []
        for sequence, position, token, wanted in batch:
            assert position == len(sequence.ids), "positions continue their sequence"
            sequence.ids.append(token)
            if wanted:
                rows.append(np.eye(self.vocab, dtype=np.float32)[self.rule(sequence.ids)])
        if failure:
            raise failure
        return np.array(rows, np.float32).reshape(len(rows), self.vocab)

    def forward_sample(
        self, batch: Sequence[tuple[FakeSequence, int, int, bool]], samplers: Sequence[FakeSampler]
    ) -> list[int]:
        return [sampler.sample(row) for sampler, row in zip(samplers, self.forward(batch), strict=True)]


class FakeDecoder:
    """Text of ids; bytes of a character may be spread over several."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = pieces
        self.held = b""

    def push(self, token: int) -> str:
        self.held += self.pieces[token]
        try:
            text = self.held.decode()
        except UnicodeDecodeError:
            return ""
        self.held = b""
        return text

    def flush(self) -> str:
        text, self.held = self.held.decode(errors="replace"), b""
        return text


class FakeTokenizer:
    """Token i is pieces[i]; encoding splits at spaces and leaves them out."""

    bos_id = 0

    def __init__(self, pieces: Sequence[str | bytes], end_ids: Iterable[int] = ()) -> None:
        self.pieces = [piece.encode() if isinstance(piece, str) else piece for piece in pieces]
        self.end_ids = frozenset(end_ids)
        self.vocab_size = len(pieces)

    def encode(self, text: str, *, bos: bool | None = None, special: bool = True) -> list[int]:
        ids = [self.pieces.index(word.encode()) for word in text.split()]
        return ids if bos is False or not special else [self.bos_id, *ids]

    def token_text(self, token: int) -> str:
        return self.pieces[token].decode()

    def stream(self, *, special: bool = True, continued: bool = False) -> FakeDecoder:
        assert special
        assert continued
        return FakeDecoder(self.pieces)
