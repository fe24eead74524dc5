"""A model ready to use: text in, text or numbers out."""

from __future__ import annotations

import html
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from larql import session_file
from larql._core import Sampler
from larql.errors import ContextError, InputError
from larql.generate import Generation, GenerationConfig, TextStream, generate, generate_together
from larql.inspect import as_rows, describe
from larql.model_file import ModelFile, make_engine
from larql.progress import Progress, shown
from larql.session import LOGITS_CHUNK, PREFILL_CHUNK, Session, plain_ids
from larql.source import open_model

if TYPE_CHECKING:
    from larql.chat_format import ChatFormat
    from larql.chat_template import Message
    from larql.trace import Trace


def load(
    model: str | os.PathLike[str],
    *,
    threads: int | None = None,
    context: int | None = None,
    precision: str = "fast",
    cache: bool = True,
    progress: Progress | bool | None = None,
) -> Model:
    """Opens a model: the path of a .vindex or a .gguf file, one on the Hugging Face Hub (hf://owner/repo/file.gguf, or
    hf://owner/repo for its Q4_K_M file), or the name of one that is installed as a package.

    A GGUF file is converted once, into the user's cache folder; `progress` is then told the bytes written and those of
    the whole, or True shows a bar, in a terminal or a notebook. Without `cache` its weights are packed in memory, each
    time anew.

    `threads` is by default what suits the machine, `context` (tokens) what the model was trained for. `precision` is
    `fast`, or `reference` for f32 arithmetic. Raises ModelError, and InputError for an option out of range or a
    context that there is no memory for.
    """
    start = time.perf_counter()
    with shown(progress, f"converting {os.fspath(model)}") as tell:
        file = open_model(model, cache=cache, progress=tell)
    opened = Model(file, threads=threads, context=context, precision=precision)
    opened.load_s = time.perf_counter() - start
    return opened


class Model:
    """Weights, tokenizer and config of one model. Threads may share it."""

    def __init__(
        self,
        file: ModelFile,
        *,
        threads: int | None = None,
        context: int | None = None,
        precision: str = "fast",
    ) -> None:
        for name, value in (("threads", threads), ("context", context)):
            if value is not None and not 1 <= value < 2**32:
                raise InputError(f"{name} is {value}; it must be from 1 to what the machine and the model have")
        self.load_s = 0.0  # seconds that `load` took
        self.config = file.config
        self.tokenizer = file.tokenizer
        self._file: ModelFile | None = file
        self.engine = make_engine(file, threads=threads, context=context, precision=precision)

    def close(self) -> None:
        """Frees the weights; what computes with the model or its sessions afterwards raises InputError.

        Leaving a `with` block does it, too.
        """
        self.engine.close()
        self._file = None

    @property
    def file(self) -> ModelFile:
        """What the model was loaded from."""
        if self._file is None:
            raise InputError("the model was closed")
        return self._file

    def __reduce__(self) -> NoReturn:
        raise TypeError("cannot pickle a Model; give the other process its path to load it from")

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @cached_property
    def chat_format(self) -> ChatFormat:
        """How messages become ids. Raises ModelError for a chat template that cannot be read."""
        from larql.chat_format import ChatFormat  # few need it, and Jinja takes time

        return ChatFormat(self.tokenizer, self.file.chat_template)

    def encode(self, text: str, bos: bool | None = None, special: bool = True) -> list[int]:
        """The ids of `text`. `bos` puts a BOS token in front (None: as the model wants); `special` turns the text of
        control tokens into these tokens.
        """
        return self.tokenizer.encode(text, bos=bos, special=special)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, that of control tokens included."""
        return self.tokenizer.decode(ids)

    def generate(
        self,
        prompt: str | Iterable[int],
        config: GenerationConfig | None = None,
        *,
        session: Session | None = None,
        progress: Progress | bool | None = None,
        **options: Any,
    ) -> Generation:
        """Continues a text or ids. `options` are fields of GenerationConfig and go before those of `config`.

        `session` may hold an earlier prompt and its answer: what it has in common with the beginning of this one is
        not computed again, the rest of it is forgotten, and the text is the same as without it. While the prompt is
        computed, `progress` is told how many of its tokens are done and how many there are; True shows a bar.

        Raises InputError for an empty prompt or a bad option, ContextError for a prompt that is too long.
        """
        return generate(self.stream(prompt, config, session=session, progress=progress, **options))

    def generate_batch(
        self, prompts: Iterable[str | Iterable[int]], config: GenerationConfig | None = None, **options: Any
    ) -> list[Generation]:
        """Continues several prompts together, which costs much less than one after the other.

        Texts, options and errors are those of `generate`; with a seed, each is drawn as it would be alone.
        """
        return generate_together([self.stream(prompt, config, **options) for prompt in prompts])

    def stream(
        self,
        prompt: str | Iterable[int],
        config: GenerationConfig | None = None,
        *,
        session: Session | None = None,
        progress: Progress | bool | None = None,
        **options: Any,
    ) -> TextStream:
        """Like `generate`, but yields pieces of text as they come; the rest is on the stream.

        At the end of a notebook's cell it shows itself.
        """
        config = replace(config or GenerationConfig(), **options)
        prompt_ids = self._ids(prompt)
        sampler = Sampler(
            temperature=config.temperature,
            top_k=config.top_k,
            top_p=config.top_p,
            min_p=config.min_p,
            repeat_penalty=config.repeat_penalty,
            seed=config.seed,
            logprobs=config.logprobs,
        )
        sampler.observe(prompt_ids)
        if session is None:
            session = self.session()
        elif not session.belongs_to(self.engine):
            raise InputError("the session belongs to another model; make one with this model's session()")
        return TextStream(session, self.tokenizer, sampler, prompt_ids, config, load_s=self.load_s, progress=progress)

    def chat(
        self,
        messages: Sequence[Message],
        config: GenerationConfig | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        session: Session | None = None,
        progress: Progress | bool | None = None,
        **options: Any,
    ) -> Generation:
        """Answers the last of some messages, each like {"role": "user", "content": "Hello"}.

        They become text by the chat template of the model or, where it has none, by the usual one of models with such
        a vocabulary; `tools` are for the template. The rest is as for `generate`. `larql.Chat` keeps a conversation.

        Raises InputError for messages that the template refuses, ModelError for a template that fails.
        """
        stream = self.stream_chat(messages, config, tools=tools, session=session, progress=progress, **options)
        return generate(stream)

    def stream_chat(
        self,
        messages: Sequence[Message],
        config: GenerationConfig | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        session: Session | None = None,
        progress: Progress | bool | None = None,
        **options: Any,
    ) -> TextStream:
        """Like `chat`, but yields pieces of the answer as they come."""
        prompt = self.chat_format.encode(messages, tools=tools)
        return self.stream(prompt, config, session=session, progress=progress, **options)

    def logits(self, ids: str | Iterable[int]) -> NDArray[np.float32]:
        """The logits [tokens, vocab] after each token. Raises InputError for no tokens, ContextError for too many."""
        ids = self._ids(ids)
        if not ids:
            raise InputError("there are no tokens to compute logits for")
        logits = np.empty((len(ids), self.config.vocab_size), np.float32)
        for done, rows in self._logits(ids):
            logits[done : done + len(rows)] = rows
        return logits

    def score(self, text: str | Iterable[int]) -> NDArray[np.float64]:
        """The natural log-probability [tokens - 1] of each token after the first, given all before it.

        Where the model wants a BOS token, a text gets one, so that all of its own tokens are scored. Raises InputError
        for less than two tokens, ContextError for too many.
        """
        ids = self._ids(text)
        if len(ids) < 2:
            raise InputError(f"a score needs at least two tokens (BOS included), not {len(ids)}")
        scores = np.empty(len(ids) - 1)
        for done, rows in self._logits(ids[:-1]):
            following = ids[done + 1 : done + 1 + len(rows)]
            scores[done : done + len(rows)] = _log_probabilities(rows, following)
        return scores

    def session(self) -> Session:
        """An empty session: feed tokens, look at the logits, go back, fork."""
        return Session(self.engine)

    def save_session(self, session: Session, path: str | os.PathLike[str]) -> None:
        """Writes a session of this model into a file, from which `load_session` gives it back.

        The file takes about what its K/V cache takes in memory. Raises InputError for a place where no file can be, and
        OSError when it cannot be written.
        """
        if not session.belongs_to(self.engine):
            raise InputError("the session belongs to another model")
        session_file.save(session, Path(path), model=self.file.sha256, precision=self.engine.precision)

    def load_session(self, path: str | os.PathLike[str]) -> Session:
        """The session in a file, with the same tokens and the same bits in its K/V cache.

        Raises InputError for a file that is none of `save_session`, or of another model or precision; ContextError for
        one that does not fit.
        """
        engine = self.engine
        ids, cache = session_file.read(
            Path(path), model=self.file.sha256, precision=engine.precision, context=engine.context
        )
        return Session.from_state(engine, self._ids(ids), cache)

    def trace(self, prompt: str | Iterable[int]) -> Trace:
        """The residual stream of some tokens after the embedding and after each layer, and the logit lens.

        Raises InputError for no tokens, ContextError for too many.
        """
        from larql.trace import Trace  # few need it

        ids = self._ids(prompt)
        if not ids:
            raise InputError("there are no tokens to trace")
        self._check_context(ids)
        sequence = self.engine.new_sequence()
        states = []
        for start in range(0, len(ids), PREFILL_CHUNK):
            chunk = enumerate(ids[start : start + PREFILL_CHUNK], start)
            states.append(self.engine.trace([(sequence, position, token, False) for position, token in chunk])[1])
        return Trace(self.engine, self.tokenizer, ids, np.concatenate(states, axis=1))

    def __repr__(self) -> str:
        if self._file is None:
            return "<Model, closed>"
        facts, precision = describe(self._file, self.engine), self.engine.precision
        name = facts["name"] or self._file.path.stem
        size = f"{facts['parameters'] / 1e6:.0f} M parameters"
        return f"<Model {name}, {size}, {precision}, {facts['threads']} threads, {facts['isa']}>"

    def _repr_html_(self) -> str:
        if self._file is None:
            return html.escape(repr(self))
        rows = [*as_rows(describe(self._file, self.engine)), ("precision", self.engine.precision)]
        cells = (f"<tr><th>{html.escape(label)}</th><td>{html.escape(value)}</td></tr>" for label, value in rows)
        return f"<table>{''.join(cells)}</table>"

    def _check_context(self, ids: list[int]) -> None:
        context = self.engine.context
        if len(ids) > context:
            raise ContextError(f"{len(ids)} tokens do not fit in a context of {context}", len(ids), context)

    def _ids(self, prompt: str | Iterable[int]) -> list[int]:
        ids = self.encode(prompt) if isinstance(prompt, str) else plain_ids(prompt)
        if ids and max(ids) >= self.config.vocab_size:
            raise InputError(f"token id {max(ids)} is out of range; the vocabulary has {self.config.vocab_size}")
        return ids

    def _logits(self, ids: list[int]) -> Iterator[tuple[int, NDArray[np.float32]]]:
        """The logits after each of `ids`, in blocks [tokens of one forward, vocab] with the position of the first."""
        self._check_context(ids)
        sequence = self.engine.new_sequence()
        for start in range(0, len(ids), LOGITS_CHUNK):
            chunk = enumerate(ids[start : start + LOGITS_CHUNK], start)
            yield start, self.engine.forward([(sequence, position, token, True) for position, token in chunk])


def _log_probabilities(logits: NDArray[np.float32], ids: list[int]) -> NDArray[np.float64]:
    """The log-probability [n] of ids[i] under logits[i] [n, vocab]."""
    highest = logits.max(axis=1, keepdims=True)
    log_sums = np.log(np.exp(logits - highest).sum(axis=1, dtype=np.float64))
    chosen = logits[np.arange(len(ids)), ids] - highest[:, 0]
    scores: NDArray[np.float64] = chosen - log_sums
    return scores
