"""A conversation with a model: its messages, and a session so that each turn computes only what is new."""

from __future__ import annotations

from typing import Any

from larql.generate import Generation, GenerationConfig, TextStream, generate
from larql.model import Model
from larql.progress import Progress


class Chat:
    """A conversation. What the model has said is kept as the tokens that it chose.

    `system` is a message that goes before all others; a change counts from the next answer on.
    """

    def __init__(self, model: Model, *, system: str | None = None) -> None:
        self.system = system
        self._model = model
        self._session = model.session()
        self._turns: list[tuple[str, TextStream]] = []  # what was said, and the answer as far as it came

    @property
    def messages(self) -> list[dict[str, str]]:
        """The conversation so far, as `Model.chat` takes it."""
        messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        for said, answer in self._turns:
            if _has_begun(answer):
                messages.append({"role": "user", "content": said})
                messages.append({"role": "assistant", "content": answer.text})
        return messages

    def send(self, text: str, config: GenerationConfig | None = None, **options: Any) -> Generation:
        """Says something; the answer becomes part of the conversation. Options and errors are those of `Model.chat`."""
        return generate(self.stream(text, config, **options))

    def stream(
        self,
        text: str,
        config: GenerationConfig | None = None,
        *,
        progress: Progress | bool | None = None,
        **options: Any,
    ) -> TextStream:
        """Like `send`, but yields pieces of the answer.

        What came of an answer before an interrupt is part of the conversation; a message without any answer is not.
        """
        self._turns = [turn for turn in self._turns if _has_begun(turn[1])]
        messages = self.messages
        spoken = [answer.ids for _, answer in self._turns]
        answers = dict(zip(range(len(messages) - 2 * len(spoken) + 1, len(messages), 2), spoken, strict=True))
        prompt = self._model.chat_format.encode([*messages, {"role": "user", "content": text}], answers=answers)
        stream = self._model.stream(prompt, config, session=self._session, progress=progress, **options)
        self._turns.append((text, stream))
        return stream

    def reset(self) -> None:
        """Forgets all messages but the system's."""
        self._turns = []


def _has_begun(answer: TextStream) -> bool:
    return bool(answer.ids) or answer.finish_reason in ("stop", "length")
