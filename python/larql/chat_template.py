"""Chat templates: from messages to the text that a model was trained on.

A template is a Jinja program that comes with a model. It runs in Jinja's sandbox, with the names that Hugging Face's
libraries give to templates: `messages`, `tools`, `add_generation_prompt`, `bos_token` and `eos_token`, the functions
`raise_exception` and `strftime_now`, the filter `tojson` and the tag `generation`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from larql.errors import InputError, ModelError

Message = Mapping[str, Any]  # "role", and what the template wants besides: "content" as a rule

# The usual template of the models whose vocabulary has a control token of this text.
STANDARD_TEMPLATES = {
    "<|im_start|>": """\
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
""",
    "<start_of_turn>": """\
{{- bos_token }}
{%- set start = namespace(text='') %}
{%- if messages[0]['role'] == 'system' %}
    {%- set start.text = messages[0]['content'] | trim + '\\n\\n' %}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- for message in messages %}
    {%- if message['role'] not in ('user', 'assistant') or (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate between user and assistant, after at most one system message') }}
    {%- endif %}
    {{- '<start_of_turn>' + ('model' if message['role'] == 'assistant' else 'user') + '\\n' }}
    {{- (start.text if loop.first else '') + message['content'] | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<start_of_turn>model\\n' }}
{%- endif %}
""",
    "<|start_header_id|>": """\
{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
""",
    "[INST]": """\
{{- bos_token }}
{%- set start = namespace(text='') %}
{%- if messages[0]['role'] == 'system' %}
    {%- set start.text = messages[0]['content'] + '\\n\\n' %}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- for message in messages %}
    {%- if message['role'] not in ('user', 'assistant') or (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate between user and assistant, after at most one system message') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {{- '[INST] ' + (start.text if loop.first else '') + message['content'] + ' [/INST]' }}
    {%- else %}
        {{- ' ' + message['content'] + eos_token }}
    {%- endif %}
{%- endfor %}
""",
}


class ChatTemplate:
    """A compiled template. Raises ModelError for a text that is none."""

    def __init__(self, source: str, *, bos_token: str = "", eos_token: str = "") -> None:
        self.source = source
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(f"the chat template has a mistake in line {error.lineno}: {error.message}") from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The text of a conversation, up to where the answer begins.

        Raises InputError for messages that the template refuses or cannot read, ModelError when the template fails.
        """
        check_messages(messages)
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                tools=None if tools is None else [dict(tool) for tool in tools],
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._tokens,
            )
        except _Refusal as error:
            raise InputError(f"the model's chat template refuses these messages: {error.message}") from error
        except Exception as error:  # whatever a program that is not ours may do
            raise ModelError(f"the model's chat template fails: {error}") from error


class _Refusal(jinja2.TemplateError):
    """What a template raises about its messages."""


class _Generation(Extension):
    """`{% generation %}` marks for training what the assistant says; here its content is just rendered."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Replaces the tag by its content."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's own filter escapes it for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise _Refusal(message)


def check_messages(messages: Sequence[Message]) -> None:
    """Raises InputError for what is no conversation."""
    if not messages:
        raise InputError("a chat needs at least one message")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InputError(f'message {i} is {message!r:.80}; it must be like {{"role": "user", "content": "..."}}')
        if not isinstance(message.get("content"), str | list | None):
            raise InputError(f"the content of message {i} is {message['content']!r:.80}; it must be a text")
