"""Chat templates render as in Hugging Face's libraries, and say what is wrong."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from conftest import model_path
from larql.chat_template import STANDARD_TEMPLATES, ChatTemplate
from larql.errors import InputError, ModelError
from larql.gguf_file import GgufFile

GOLDEN = json.loads((Path(__file__).parent / "golden/chat/chat_templates.json").read_text("utf-8"))
HELLO = [{"role": "user", "content": "Hello"}]
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello!"},
    {"role": "user", "content": "Bye"},
]


def golden_template(name: str) -> ChatTemplate:
    if name in GOLDEN["templates"]:
        return ChatTemplate(GOLDEN["templates"][name], **GOLDEN["tokens"])
    file = GgufFile(model_path(name))
    assert file.chat_template is not None
    bos, eos = (file.tokenizer.token_text(i) for i in (file.tokenizer.bos_id, file.tokenizer.facts.eos_id))
    return ChatTemplate(file.chat_template, bos_token=bos, eos_token=eos)


@pytest.mark.parametrize("name", sorted({case["template"] for case in GOLDEN["cases"]}))
def test_text_is_that_of_transformers(name: str) -> None:
    template = golden_template(name)
    cases = [case for case in GOLDEN["cases"] if case["template"] == name]
    assert len(cases) == 9
    for case in cases:
        arguments: dict[str, Any] = {
            "messages": GOLDEN["conversations"][case["messages"]],
            "tools": GOLDEN["tools"] if case["tools"] else None,
            "add_generation_prompt": case["add_generation_prompt"],
        }
        if "refused" in case:
            with pytest.raises(InputError) as error:
                template.render(**arguments)
            assert case["refused"] in str(error.value)
        else:
            assert template.render(**arguments) == case["text"]


@pytest.mark.parametrize(
    ("mark", "text"),
    [
        (
            "<|im_start|>",
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
            "<|im_start|>assistant\nHello!<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            "<start_of_turn>",
            "<s><start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n<start_of_turn>model\nHello!<end_of_turn>\n"
            "<start_of_turn>user\nBye<end_of_turn>\n<start_of_turn>model\n",
        ),
        (
            "<|start_header_id|>",
            "<s><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\nHello!<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nBye<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        ("[INST]", "<s>[INST] Be brief.\n\nHi [/INST] Hello!</s>[INST] Bye [/INST]"),
    ],
)
def test_standard_templates(mark: str, text: str) -> None:
    template = ChatTemplate(STANDARD_TEMPLATES[mark], bos_token="<s>", eos_token="</s>")
    assert template.render(TALK) == text


@pytest.mark.parametrize("mark", ["<start_of_turn>", "[INST]"])
@pytest.mark.parametrize("roles", [["assistant"], ["user", "user"], ["user", "system"], ["system", "assistant"]])
def test_a_wrong_order_of_roles_is_refused(mark: str, roles: list[str]) -> None:
    template = ChatTemplate(STANDARD_TEMPLATES[mark])
    with pytest.raises(InputError, match="refuses these messages: roles must alternate"):
        template.render([{"role": role, "content": "x"} for role in roles])


def test_the_clock_is_that_of_the_machine() -> None:
    text = ChatTemplate("{{ strftime_now('%Y-%m-%d') }}").render(HELLO)
    assert abs((datetime.now() - datetime.fromisoformat(text)).days) <= 1


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{% if %}", "the chat template has a mistake in line 1"),
        ("line\n{{ 'open", "the chat template has a mistake in line 2"),
    ],
)
def test_a_broken_template_is_named(source: str, says: str) -> None:
    with pytest.raises(ModelError, match=says):
        ChatTemplate(source)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{{ no_such_function(1) }}", "'no_such_function' is undefined"),
        ("{{ messages[0].content.nothing.more }}", "has no attribute 'nothing'"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ().__class__.__mro__ }}", "unsafe"),
        ("{{ messages[0].content + 1 }}", "str"),
    ],
)
def test_a_failing_template_is_named(source: str, says: str) -> None:
    with pytest.raises(ModelError, match="the model's chat template fails: .*" + says):
        ChatTemplate(source).render(HELLO)


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([], "at least one message"),
        (["Hello"], "message 0 is 'Hello'; it must be like"),
        ([{"content": "Hello"}], "message 0 is"),
        ([*HELLO, {"role": "user", "content": 3}], "the content of message 1 is 3; it must be a text"),
    ],
)
def test_what_is_no_message_is_named(messages: Any, says: str) -> None:
    with pytest.raises(InputError, match=says):
        ChatTemplate("").render(messages)
