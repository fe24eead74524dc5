"""Writes chat_templates.json: what Hugging Face's transformers make of templates and messages.

usage: python tests/golden/chat/make_chat_templates.py FOLDER   (with smollm2-135m.gguf and qwen2.5-coder-0.5b.gguf)

Needs `pip install transformers gguf`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jinja2
from gguf import GGUFReader
from transformers.utils.chat_template_utils import render_jinja_template

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

# Templates of ours, each for some rules of the language as these libraries set it up.
TEMPLATES = {
    "blocks": """\
  {% if messages %}
    {% for message in messages %}
  {{ message.role }}: {{ message['content'] }}
    {% endfor %}
  {% endif %}
 {%- if add_generation_prompt -%}
   assistant:
 {%- endif %}

end
""",
    "control": """\
{% for message in messages %}{% if message.role == 'system' %}{% continue %}{% endif %}
{%- if loop.index > 4 %}{% break %}{% endif %}
{{- bos_token ~ message.role }}|{% generation %}{{ message.content | trim }}{% endgeneration %}{{ eos_token }}
{% endfor %}{{ undefined_name }}{{ missing.name if missing is defined else 'no' }}""",
    "json": """\
{%- if tools is not none %}{% for tool in tools %}
{{ tool | tojson }}
{{ tool | tojson(indent=4) }}
{{ tool | tojson(separators=(',', ':'), sort_keys=true) }}
{% endfor %}{% else %}no tools{% endif %}{{ messages[-1] | tojson }} {{ documents is none }}""",
    "strict": """\
{%- if messages[0].role != 'user' %}{{ raise_exception('the first message must be from the user') }}{% endif %}
{%- set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + m.content | length %}{% endfor %}{{ ns.n }}
{{- messages | map(attribute='role') | join(',') }}{{ 'x'.startswith('x') }}{{ messages[0].content.split(' ')[-1] }}""",
    "time": "{{ strftime_now('%%') }}{{ messages[0].content[:2] }}{{ messages | length }}",
}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one": [{"role": "user", "content": 'Hello <b>there</b> & "you", it\'s\n  café 日本 😀  '}],
    "system": [{"role": "system", "content": "  Be brief. "}, {"role": "user", "content": "What is 2 + 2?"}],
    "turns": [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": " Hello! How can I help? "},
        {"role": "user", "content": "Nothing\n\nat all"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "Bye"},
    ],
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather in a <city> & its 'surroundings'",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]


def model_templates(folder: Path) -> dict[str, tuple[str, dict[str, str]]]:
    """The templates of models in a folder, and the texts of their tokens."""
    found = {}
    for name in ("smollm2-135m", "qwen2.5-coder-0.5b"):
        fields = GGUFReader(folder / f"{name}.gguf").fields
        tokens = fields["tokenizer.ggml.tokens"]
        texts = {
            f"{kind}_token": tokens.contents(fields[key].contents())
            for kind in ("bos", "eos")
            if (key := f"tokenizer.ggml.{kind}_token_id") in fields
        }
        found[name] = (fields["tokenizer.chat_template"].contents(), texts)
    return found


def case(template: str, names: dict[str, str], key: dict[str, Any]) -> dict[str, Any]:
    """One rendering; `key` names what is rendered."""
    try:
        texts, _ = render_jinja_template(
            [CONVERSATIONS[key["messages"]]],
            tools=TOOLS if key["tools"] else None,
            chat_template=template,
            add_generation_prompt=key["add_generation_prompt"],
            **names,
        )
    except jinja2.TemplateError as error:
        return key | {"refused": str(error)}
    return key | {"text": texts[0]}


def main() -> None:
    """Writes the file beside this one."""
    cases = []
    templates = {name: (text, TOKENS) for name, text in TEMPLATES.items()}
    models = model_templates(Path(sys.argv[1]))
    for name, (text, names) in (templates | models).items():
        for messages in CONVERSATIONS:
            for tools, prompt in ((False, True), (False, False), (True, True)):
                key = {"template": name, "messages": messages, "tools": tools, "add_generation_prompt": prompt}
                cases.append(case(text, names, key))
    data = {"tokens": TOKENS, "templates": TEMPLATES, "conversations": CONVERSATIONS, "tools": TOOLS, "cases": cases}
    text = json.dumps(data, ensure_ascii=False, indent=1) + "\n"
    (Path(__file__).parent / "chat_templates.json").write_text(text, "utf-8")


if __name__ == "__main__":
    main()
