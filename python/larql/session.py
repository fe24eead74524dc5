"""A token sequence that grows: its ids and its K/V cache, always in step."""

from __future__ import annotations

import copy
import itertools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from larql.errors import ContextError, InputError
from larql.progress import Progress

if TYPE_CHECKING:
    from larql import _core

Batch = list[tuple["_core.Sequence", int, int, bool]]  # (sequence, position, token, want_logits)
T = TypeVar("T")

PREFILL_CHUNK = 512  # tokens in one forward: enough to fill the matrix kernels, few enough to keep buffers small
LOGITS_CHUNK = 64  # tokens whose logits are all computed at once: 67 MB for a vocabulary of 262,144


class Session:
    """The tokens fed so far. A call that fails leaves it as it was. For one thread at a time."""

    def __init__(self, engine: _core.Engine) -> None:
        self._engine = engine
        self._sequence = engine.new_sequence()
        self._ids: list[int] = []
        self._logits: NDArray[np.float32] | None = None

    @classmethod
    def from_state(cls, engine: _core.Engine, ids: list[int], cache: NDArray[np.uint8]) -> Session:
        """The session that gave this `state`, for an engine of the same model and precision; raises InputError."""
        session = cls(engine)
        session._sequence = engine.sequence_from_bytes(len(ids), cache)
        session._ids = ids
        return session

    def state(self) -> tuple[list[int], NDArray[np.uint8]]:
        """The tokens fed, and the bytes of their K/V cache."""
        return self.ids, self._sequence.to_bytes()

    def belongs_to(self, engine: _core.Engine) -> bool:
        """Whether the session was made for this engine."""
        return self._engine is engine

    def __len__(self) -> int:
        """Tokens fed."""
        return len(self._ids)

    @property
    def ids(self) -> list[int]:
        """The tokens fed (a copy)."""
        return list(self._ids)

    @property
    def context(self) -> int:
        """Tokens that the session may hold."""
        return self._engine.context

    @property
    def logits(self) -> NDArray[np.float32]:
        """The logits [vocab] after the last token, read-only. Raises InputError when no token was fed."""
        if self._logits is None:
            if not self._ids:
                raise InputError("there are no logits before the first token")
            last = len(self._ids) - 1
            sequence = self._rewound(last)
            self._logits = _only_row(self._engine.forward(_batch(sequence, last, self._ids[last:])))
            self._sequence = sequence
        return self._logits

    def feed(self, ids: Iterable[int], progress: Progress | None = None) -> None:
        """Appends tokens. Many are fed in several forwards, and `progress` is called before the first and after each.

        Raises ContextError when they do not fit, and InputError for an id that the model does not have. What `progress`
        raises ends the call, too.
        """
        if new := plain_ids(ids):
            self._logits = _only_row(self._advance(new, self._engine.forward, progress))

    def sample(self, ids: Iterable[int], sampler: _core.Sampler, progress: Progress | None = None) -> int:
        """Appends at least one token, and samples the one that comes next, which is not appended.

        `progress` and what is raised are as for `feed`.
        """
        new = plain_ids(ids)
        if not new:
            raise InputError("there is no token to continue from")
        return self._advance(new, lambda batch: self._engine.forward_sample(batch, [sampler]), progress)[0]

    def keep_common(self, ids: Iterable[int]) -> int:
        """Keeps the tokens with which `ids` begin, too, and forgets the others; returns how many are kept.

        Never all of `ids`: the last one stays to be fed, so that there are logits after it. A sliding window that has
        moved past what is needed can make it fewer than the two have in common.
        """
        wanted = plain_ids(ids)[:-1]
        pairs = zip(self._ids, wanted, strict=False)
        common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        if common < len(self._ids):
            sequence = self._sequence.fork()
            kept = sequence.truncate(common)
            self._sequence, self._ids, self._logits = sequence, self._ids[:kept], None
        return len(self._ids)

    def truncate(self, length: int) -> None:
        """Keeps the first `length` tokens; what a sliding window has dropped of them is computed again."""
        if not 0 <= length <= len(self._ids):
            raise InputError(f"cannot truncate to {length} tokens; the session has {len(self._ids)}")
        if length < len(self._ids):
            self._sequence, self._ids, self._logits = self._rewound(length), self._ids[:length], None

    def __repr__(self) -> str:
        return f"<Session of {len(self)} tokens in a context of {self.context}>"

    def fork(self) -> Session:
        """A session with the same tokens that goes its own way from here; what they have in common is shared."""
        other = copy.copy(self)
        other._sequence = self._sequence.fork()
        other._ids = list(self._ids)
        return other

    def _advance(self, new: list[int], last_forward: Callable[[Batch], T], progress: Progress | None) -> T:
        """Appends `new` in chunks; `last_forward` runs the last one, with logits wanted after its last token."""
        held = len(self._ids)
        self._check_room(len(new))
        if len(new) > 1:
            # A prompt begins: where people come back to, so truncating to here should stay cheap.
            self._sequence.snapshot()
        n_body = (len(new) - 1) // PREFILL_CHUNK * PREFILL_CHUNK
        # One forward changes nothing when it fails; of several, the first ones work on a copy.
        sequence = self._sequence.fork() if n_body else self._sequence
        try:
            tell = (lambda done: progress(done, len(new))) if progress else _nothing
            tell(0)
            self._fill(sequence, held, new[:n_body], tell)
            result = last_forward(_batch(sequence, held + n_body, new[n_body:]))
            tell(len(new))
        except BaseException:
            # An interrupt can arrive when the forward is done but its result is not here yet.
            if len(self._sequence) != held:
                self._sequence = self._rewound(held)
            raise
        self._sequence, self._logits = sequence, None
        self._ids += new
        return result

    def _check_room(self, n_new: int) -> None:
        needed = len(self._ids) + n_new
        if needed > self.context:
            raise ContextError(f"{needed} tokens do not fit in a context of {self.context}", needed, self.context)

    def _rewound(self, length: int) -> _core.Sequence:
        """A copy of the sequence with its first `length` tokens."""
        sequence = self._sequence.fork()
        kept = sequence.truncate(length)
        self._fill(sequence, kept, self._ids[kept:length], _nothing)
        return sequence

    def _fill(self, sequence: _core.Sequence, start: int, ids: list[int], tell: Callable[[int], object]) -> None:
        for i in range(0, len(ids), PREFILL_CHUNK):
            chunk = ids[i : i + PREFILL_CHUNK]
            self._engine.forward([(sequence, start + i + j, token, False) for j, token in enumerate(chunk)])
            tell(i + len(chunk))


def sample_together(sessions: Sequence[Session], tokens: Sequence[int], samplers: Sequence[_core.Sampler]) -> list[int]:
    """Appends a token to each of some sessions of one engine, and samples what comes next in each, in one forward.

    Raises ContextError when one is full; then nothing is appended.
    """
    if not sessions:
        return []
    for session in sessions:
        session._check_room(1)
    batch = [
        (session._sequence, len(session._ids), token, True) for session, token in zip(sessions, tokens, strict=True)
    ]
    sampled = sessions[0]._engine.forward_sample(batch, samplers)
    for session, token in zip(sessions, tokens, strict=True):
        session._ids.append(token)
        session._logits = None
    return sampled


def _nothing(_done: int) -> None:
    pass


def plain_ids(ids: Iterable[int]) -> list[int]:
    """Token ids as plain integers. Raises InputError for what is none in any vocabulary."""
    try:
        plain = [] if isinstance(ids, bytes) else [operator.index(token) for token in ids]
    except TypeError:
        raise InputError(f"token ids are whole numbers in a list or the like, not a {type(ids).__name__}") from None
    if isinstance(ids, bytes):
        raise InputError("bytes are no token ids; give a text as str")
    for token in plain:
        if not 0 <= token < 2**32:
            raise InputError(f"token id {token} is out of range")
    return plain


def _batch(sequence: _core.Sequence, start: int, ids: list[int]) -> Batch:
    """`ids` from position `start` on, with logits wanted after the last one."""
    last = len(ids) - 1
    return [(sequence, start + i, token, i == last) for i, token in enumerate(ids)]


def _only_row(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    row: NDArray[np.float32] = logits[0]
    row.flags.writeable = False
    return row
