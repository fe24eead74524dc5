"""Generation in three layers: token ids, then text with timings as it comes, then one result."""

from __future__ import annotations

import html
import time
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Literal

from larql.errors import ContextError, InputError
from larql.progress import Progress, shown
from larql.session import sample_together

if TYPE_CHECKING:
    from larql._core import Sampler
    from larql.session import Session
    from larql.tokenizer import Tokenizer

FinishReason = Literal["stop", "length", "cancelled"]

# For each numeric option: its kind, whether a value makes sense, and what to say when it does not.
_RULES: dict[str, tuple[type, Callable[[Any], bool], str]] = {
    "max_tokens": (Integral, lambda v: v >= 1, "an integer of at least 1"),
    "temperature": (Real, lambda v: 0 <= v < float("inf"), "a number of at least 0"),
    "top_k": (Integral, lambda v: 0 <= v < 2**32, "an integer of at least 0 (off)"),
    "top_p": (Real, lambda v: 0 < v <= 1, "a number above 0 and up to 1 (off)"),
    "min_p": (Real, lambda v: 0 <= v <= 1, "a number from 0 (off) to 1"),
    "repeat_penalty": (Real, lambda v: 0 < v < float("inf"), "a number above 0 (1 is off)"),
    "seed": (Integral, lambda v: 0 <= v < 2**64, "an integer from 0 to 2^64 - 1"),
}


@dataclass(frozen=True)
class GenerationConfig:
    """How to choose tokens and when to end. Raises InputError for a value that makes no sense."""

    max_tokens: int = 128
    temperature: float = 0.0  # 0 takes the most likely token
    top_k: int = 0  # draw from so many tokens; 0 is off
    top_p: float = 1.0  # draw from the most likely tokens that have this probability together; 1 is off
    min_p: float = 0.0  # draw from tokens with at least this share of the highest probability; 0 is off
    repeat_penalty: float = 1.0  # above 1, tokens of the last 64 become less likely; 1 is off
    seed: int | None = None  # None draws differently each time
    stop: str | Sequence[str] = ()  # the text ends before any of these
    logprobs: bool = False  # keep the natural logarithm of the model's probability of each token

    def __post_init__(self) -> None:
        for name, (kind, makes_sense, must) in _RULES.items():
            value = getattr(self, name)
            if name == "seed" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, kind) or not makes_sense(value):
                raise InputError(f"{name} is {value!r}; it must be {must}")
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if not all(isinstance(text, str) and text for text in stop):
            raise InputError(f"stop is {self.stop!r}; it must be one or more strings that are not empty")
        object.__setattr__(self, "stop", stop)  # the class is frozen for everyone else


@dataclass(frozen=True)
class Timings:
    """Where the time went: seconds, and tokens per second."""

    load_s: float  # opening the model
    ttft_s: float  # from the start of the prefill to the first token
    prefill_tok_s: float  # prompt tokens that were not reused
    decode_tok_s: float | None  # tokens after the first; None when there are none


@dataclass(frozen=True)
class Generation:
    """A finished text. The end token is in none of the fields; tokens of a stop string are in `ids`."""

    text: str
    ids: list[int]
    prompt_ids: list[int]
    finish_reason: FinishReason
    timings: Timings
    logprobs: list[float] | None  # one for each id, when asked for
    reused: int = 0  # tokens of the prompt that the session held already

    def _repr_html_(self) -> str:
        timings = html.escape(_summary(self.timings, len(self.prompt_ids) - self.reused, len(self.ids)))
        return f'<div style="white-space: pre-wrap">{html.escape(self.text)}</div><small>{timings}</small>'


def generate_ids(
    session: Session,
    prompt_ids: Sequence[int],
    sampler: Sampler,
    end_ids: Collection[int],
    limit: int,
    progress: Progress | None = None,
) -> Iterator[int]:
    """Feeds the prompt and yields at most `limit` ids; an end token ends them and is left out.

    The last id is not fed to the session. `progress` follows the prompt.
    """
    new = prompt_ids
    for i in range(limit):
        token = session.sample(new, sampler, None if i else progress)
        if token in end_ids:
            return
        yield token
        new = (token,)


class TextStream(Iterator[str]):
    """Yields text as it becomes certain, and knows the rest: text, ids and log-probabilities so far, and at the end why
    it ended and how long it took. What the session holds of the prompt's beginning is not computed again.

    Raises InputError for an empty prompt and ContextError for one that leaves no room for an answer.
    """

    def __init__(
        self,
        session: Session,
        tokenizer: Tokenizer,
        sampler: Sampler,
        prompt_ids: Sequence[int],
        config: GenerationConfig,
        *,
        load_s: float = 0.0,
        progress: Progress | bool | None = None,
    ) -> None:
        if not prompt_ids:
            raise InputError("the prompt has no tokens; give at least one")
        needed = len(prompt_ids) + 1
        if needed > session.context:
            raise ContextError(
                f"the prompt and one token to generate need {needed} tokens; the context holds {session.context}",
                needed,
                session.context,
            )
        self.prompt_ids = list(prompt_ids)
        self.reused = session.keep_common(prompt_ids)
        self.text = ""  # so far
        self.ids: list[int] = []
        self.logprobs: list[float] | None = [] if config.logprobs else None
        self.finish_reason: FinishReason | None = None
        self._session = session
        self._sampler = sampler
        self._end_ids = tokenizer.end_ids
        self._limit = min(config.max_tokens, session.context - needed + 1)
        self._progress = progress
        self._decoder = tokenizer.stream(continued=True)
        self._stops = StopStrings(tuple(config.stop))
        self._load_s = load_s
        self._first_s = self._last_s = 0.0  # since the start
        self._pieces = self._run()

    def __next__(self) -> str:
        piece = next(self._pieces)
        self.text += piece
        return piece

    def _ipython_display_(self) -> None:
        """A notebook's cell that ends with a stream shows the text as it comes."""
        for piece in self:
            print(piece, end="", flush=True)
        print(f"\n[{_summary(self.timings, len(self.prompt_ids) - self.reused, len(self.ids))}]")

    def __aiter__(self) -> TextStream:
        return self

    async def __anext__(self) -> str:
        """The next piece, computed in a thread of the event loop's pool. A cancelled task waits for the step's end."""
        import asyncio  # few need it, and it takes time

        step = asyncio.get_running_loop().run_in_executor(None, next, self, None)
        try:
            piece = await asyncio.shield(step)
        except asyncio.CancelledError:
            await asyncio.wait([step])
            self._pieces.close()
            raise
        if piece is None:
            raise StopAsyncIteration
        return piece

    @property
    def timings(self) -> Timings:
        """The timings so far; complete when the stream has ended."""
        steps, decode_s = len(self.ids) - 1, self._last_s - self._first_s
        return Timings(
            load_s=self._load_s,
            ttft_s=self._first_s,
            prefill_tok_s=(len(self.prompt_ids) - self.reused) / self._first_s if self._first_s else 0.0,
            decode_tok_s=steps / decode_s if steps > 0 and decode_s > 0 else None,
        )

    def _run(self) -> Generator[str]:
        start = time.perf_counter()
        new = self.prompt_ids[self.reused :]
        try:
            with shown(self._progress, "reading the prompt", unit="tokens", after=1.0) as progress:
                for token in generate_ids(self._session, new, self._sampler, self._end_ids, self._limit, progress):
                    text = self._take(token, time.perf_counter() - start)
                    if self._stops.found:
                        break
                    if text:
                        yield text
                else:
                    text = self._flush()
            self._end(time.perf_counter() - start)
            if text:
                yield text
        except (KeyboardInterrupt, GeneratorExit):
            self.finish_reason = self.finish_reason or "cancelled"
            raise

    def _take(self, token: int, at: float) -> str:
        """Adds a token that came `at` seconds after the start; the text that is certain with it."""
        self._last_s = at
        self._first_s = self._first_s or at
        self.ids.append(token)
        if self.logprobs is not None:
            self.logprobs.append(_logprob(self._sampler))
        return self._stops.push(self._decoder.push(token))

    def _flush(self) -> str:
        """The text that was held back in case that a stop string or a character went on."""
        return self._stops.push(self._decoder.flush()) + self._stops.flush()

    def _end(self, at: float) -> None:
        self._first_s = self._first_s or at
        ran_out = len(self.ids) == self._limit and not self._stops.found
        self.finish_reason = "length" if ran_out else "stop"

    def _result(self) -> Generation:
        assert self.finish_reason is not None
        return Generation(
            self.text, self.ids, self.prompt_ids, self.finish_reason, self.timings, self.logprobs, self.reused
        )


def generate(stream: TextStream) -> Generation:
    """Runs a stream to its end."""
    for _ in stream:
        pass
    return stream._result()


def generate_together(streams: Sequence[TextStream]) -> list[Generation]:
    """Runs streams that have not begun, each with a session of its own, to their ends: one step of all at a time."""
    start = time.perf_counter()
    tokens = [stream._session.sample(stream.prompt_ids[stream.reused :], stream._sampler) for stream in streams]
    running = list(streams)
    while running:
        at = time.perf_counter() - start
        running = [stream for stream, token in zip(running, tokens, strict=True) if _goes_on(stream, token, at)]
        sessions, samplers = [stream._session for stream in running], [stream._sampler for stream in running]
        tokens = sample_together(sessions, [stream.ids[-1] for stream in running], samplers)
    return [stream._result() for stream in streams]


def _goes_on(stream: TextStream, token: int, at: float) -> bool:
    """Gives a stream its next token; whether it wants another."""
    ended = token in stream._end_ids
    if not ended:
        stream.text += stream._take(token, at)
        ended = stream._stops.found or len(stream.ids) == stream._limit
    if ended:
        stream.text += "" if stream._stops.found else stream._flush()
        stream._end(at)
    return not ended


class StopStrings:
    """Cuts a text, given piece by piece, before the stop string that is complete first.

    The end of what came so far is held back while it could begin a stop string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.found = False
        self._stops = stops
        self._longest = max(map(len, stops), default=0)
        self._held = ""

    def push(self, text: str) -> str:
        """The text that is now certain to come before any stop string."""
        if not self._stops:
            return text
        text = self._held + text
        ends = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            self.found = True
            self._held = ""
            return text[: min(ends)[1]]
        n_held = self._possible_start(text)
        self._held = text[len(text) - n_held :]
        return text[: len(text) - n_held]

    def flush(self) -> str:
        """The text held back, which turned out to begin no stop string."""
        text, self._held = self._held, ""
        return text

    def _possible_start(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[len(text) - length :]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0


def _summary(timings: Timings, n_read: int, n_new: int) -> str:
    """One line for people."""
    decode = f" at {timings.decode_tok_s:.1f} tok/s" if timings.decode_tok_s else ""
    return f"{n_read} tokens read at {timings.prefill_tok_s:.1f} tok/s, {n_new} written{decode}"


def _logprob(sampler: Sampler) -> float:
    value = sampler.last_logprob
    assert value is not None, "the sampler was made without logprobs"
    return value
