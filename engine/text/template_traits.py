"""What one model's tokenizer and chat template say of it: its markers, its dialect, its variables. Values only.

Which dialect and which markers a model has, read off mlx-lm's tokenizer wrapper. The wrapper is given; no mlx here.

Conversations for chat templates that lack a place for what they hold: tools, calls, results, instructions. Pure.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from engine.grammar.lark import CallSyntax
from engine.text.reasoning import ThinkingMarkers
from engine.text.tool_calls import HERMES, PLAIN, ToolCallFormat, Tools, parse_json


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateTraits:
    """How a model speaks."""

    dialect: ToolCallFormat = PLAIN
    thinking: ThinkingMarkers | None = None
    template: str = ""
    """The chat template's text, to look for variables in; empty if it is code."""
    specials: Mapping[str, int] = field(default_factory=dict)
    """The spelling of each token that is no piece of ordinary text."""

    def mentions(self, variable: str) -> bool:
        """Whether the chat template speaks of a variable."""
        return variable in self.template


# As the templates of Mistral's v11 tokenizers and later, and of Kimi K2, write calls back to their models.
_MISTRAL = CallSyntax(start="[TOOL_CALLS]", before="", middle="[ARGS]", after="", end="")
_KIMI = CallSyntax(
    start="<|tool_calls_section_begin|>",
    before="<|tool_call_begin|>functions.",
    middle=":0<|tool_call_argument_begin|>",
    after="<|tool_call_end|>",
    end="<|tool_calls_section_end|>",
)


def read_traits(tokenizer: Any) -> TemplateTraits:
    """Return what mlx-lm and the chat template know of a model."""
    template = _template_text(tokenizer)
    thinking = None
    if tokenizer.has_thinking:
        thinking = ThinkingMarkers(start=tokenizer.think_start, end=tokenizer.think_end)
    return TemplateTraits(
        dialect=_read_tool_call_format(tokenizer, template),
        thinking=thinking,
        template=template,
        specials=_special_tokens(tokenizer),
    )


def _template_text(tokenizer: Any) -> str:
    found = getattr(tokenizer, "chat_template", None)
    if isinstance(found, str):
        return found
    return "" if found is None else json.dumps(found)


def _read_tool_call_format(tokenizer: Any, template: str) -> ToolCallFormat:
    if not tokenizer.has_tool_calling or "tools" not in template:
        return PLAIN
    kind = tokenizer.init_kwargs.get("tool_parser_type")
    own = tokenizer.tool_parser

    def parse(text: str, tools: Tools) -> Any:
        return own(text, list(tools))

    return ToolCallFormat(
        start=tokenizer.tool_call_start,
        end=tokenizer.tool_call_end,
        parse=parse_json if kind == "json_tools" else parse,
        form=_read_form(kind, template),
        is_native=True,
        is_json=kind == "json_tools",
    )


def _read_form(kind: object, template: str) -> CallSyntax | None:
    if kind == "json_tools":
        return HERMES
    if kind == "mistral" and "[ARGS]" in template:
        return _MISTRAL
    return _KIMI if kind == "kimi_k2" else None


def _special_tokens(tokenizer: Any) -> Mapping[str, int]:
    added: Mapping[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    return {
        token.content: number
        for number, token in added.items()
        # Some vocabularies add runs of blanks; those are ordinary text.
        if token.content.strip() and (token.special or token.content[0] in "<[")
    }


Message: TypeAlias = dict[str, Any]


def add_system_text(messages: Sequence[Message], words: str) -> list[Message]:
    """Return the messages with words of ours behind what the system says."""
    first = messages[0]
    if first["role"] != "system":
        return [{"role": "system", "content": words}, *messages]
    said = f"{first['content']}\n\n{words}" if first["content"] else words
    return [{**first, "content": said}, *messages[1:]]


def add_user_text(messages: Sequence[Message], words: str) -> list[Message]:
    """Return the messages with words of ours before what the user says first: for templates without a system."""
    for at, message in enumerate(messages):
        if message["role"] == "user":
            said = {**message, "content": f"{words}\n\n{message['content']}"}
            return [*messages[:at], said, *messages[at + 1 :]]
    return add_system_text(messages, words)


def spell_tool_calls(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with calls and results in words, as Hermes and Qwen were taught to read them."""
    found: list[Message] = []
    for message in messages:
        if message["role"] == "tool":
            result = f"<tool_response>\n{message['content']}\n</tool_response>"
            if found and found[-1].get("content", "").startswith("<tool_response>"):
                result = f"{found.pop()['content']}\n{result}"
            found.append({"role": "user", "content": result})
        elif message.get("tool_calls"):
            parts = [message["content"], *(_spell_call(call) for call in message["tool_calls"])]
            rest = {name: value for name, value in message.items() if name != "tool_calls"}
            found.append({**rest, "content": "\n".join(part for part in parts if part)})
        else:
            found.append(message)
    return found


def _spell_call(call: Message) -> str:
    return f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>"
