"""From the messages of a conversation to the token ids that a model continues."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from larql.chat_template import STANDARD_TEMPLATES, ChatTemplate, Message, check_messages
from larql.errors import InputError
from larql.tokenizer import Tokenizer

# Characters that Unicode keeps for a program's own use and that no text should have; should all be there, private ones.
_MARKS = (*range(0xFDD0, 0xFDF0), *range(0xF0000, 0xF0100))


class ChatFormat:
    """A model's chat template and its tokenizer. Raises ModelError for a template that cannot be read."""

    def __init__(self, tokenizer: Tokenizer, source: str | None = None) -> None:
        self._tokenizer = tokenizer
        self._source = source
        self._template = None if source is None else self._compile(source)

    @property
    def has_template(self) -> bool:
        """Whether the model brings a template; those that do not are base models as a rule."""
        return self._source is not None

    @property
    def template(self) -> ChatTemplate:
        """The model's template, or the usual one of models with such a vocabulary.

        Raises InputError when there is none.
        """
        if self._template is None:
            self._template = self._compile(_standard_template(self._tokenizer))
        return self._template

    def encode(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        answers: Mapping[int, Sequence[int]] | None = None,
    ) -> list[int]:
        """The ids of a conversation, up to where the answer begins.

        Text of control tokens inside messages stays text. `answers` has the ids of messages that were generated, by
        their index, which stand for their content. Raises as `ChatTemplate.render` does.
        """
        check_messages(messages)
        answers = answers or {}
        found = json.dumps([dict(message) for message in messages], ensure_ascii=False, default=str)
        literal, slot = islice((mark for mark in map(chr, _MARKS) if mark not in found), 2)
        marked = []
        for i, message in enumerate(messages):
            if i in answers:
                marked.append({**message, "content": f"{slot}{i}{slot}"})
            else:
                marked.append({key: self._broken(value, literal) for key, value in message.items()})
        text = self.template.render(marked, tools=tools)
        ids: list[int] = []
        for i, part in enumerate(re.split(f"{slot}([0-9]+){slot}", text)):
            if i % 2:
                ids += answers[int(part)]
            elif part:
                ids += self._tokenizer.encode(part, bos=None if i == 0 else False, literal=literal)
        return ids

    def _compile(self, source: str) -> ChatTemplate:
        tokenizer = self._tokenizer
        texts = [
            "" if token_id is None else tokenizer.token_text(token_id)
            for token_id in (tokenizer.bos_id, tokenizer.facts.eos_id)
        ]
        return ChatTemplate(source, bos_token=texts[0], eos_token=texts[1])

    def _broken(self, value: Any, literal: str) -> Any:
        """The value with `literal` inside the text of control tokens, so that they are not found."""
        if isinstance(value, str):
            return self._tokenizer.break_controls(value, literal)
        if isinstance(value, Mapping):
            return {key: self._broken(item, literal) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._broken(item, literal) for item in value]
        return value


def _standard_template(tokenizer: Tokenizer) -> str:
    for token, template in STANDARD_TEMPLATES.items():
        # Llama 2 and the first Mistral write their marks as ordinary text.
        if tokenizer.is_control_text(token) or (token == "[INST]" and tokenizer.is_control_text("</s>")):
            return template
    raise InputError("the model has no chat template, and its vocabulary is not that of a known kind of chat")
