"""Traits of a model's chat template, and messages for templates that lack a feature.

Traits are read from mlx-lm's tokenizer wrapper, which is passed in; nothing here imports mlx.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from engine.grammar.lark import CallSyntax
from engine.text.reasoning import ThinkingMarkers
from engine.text.tool_calls import HERMES, PLAIN, ToolCallFormat, Tools, parse_json

Message: TypeAlias = dict[str, Any]

# The syntax in which the templates of Mistral's tokenizers from v11 on, and of Kimi K2, show earlier calls.
_MISTRAL = CallSyntax(start="[TOOL_CALLS]", before="", middle="[ARGS]", after="", end="")
_KIMI = CallSyntax(
    start="<|tool_calls_section_begin|>",
    before="<|tool_call_begin|>functions.",
    middle=":0<|tool_call_argument_begin|>",
    after="<|tool_call_end|>",
    end="<|tool_calls_section_end|>",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateTraits:
    """The markers, the tool call format and the variables of one model's chat template."""

    tool_call_format: ToolCallFormat = PLAIN
    thinking: ThinkingMarkers | None = None
    template: str = ""
    """Source of the chat template; empty if the template is code."""
    specials: Mapping[str, int] = field(default_factory=dict)
    """Token ids of the special tokens, by spelling."""

    def mentions(self, variable: str) -> bool:
        """Return whether the chat template contains the name of a variable."""
        return variable in self.template


def read_traits(tokenizer: Any) -> TemplateTraits:
    """Return the traits that mlx-lm and the chat template define."""
    template = _template_text(tokenizer)
    thinking = None
    if tokenizer.has_thinking:
        thinking = ThinkingMarkers(start=tokenizer.think_start, end=tokenizer.think_end)
    return TemplateTraits(
        tool_call_format=_read_tool_call_format(tokenizer, template),
        thinking=thinking,
        template=template,
        specials=_special_tokens(tokenizer),
    )


def _template_text(tokenizer: Any) -> str:
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, str):
        return template
    return "" if template is None else json.dumps(template)


def _read_tool_call_format(tokenizer: Any, template: str) -> ToolCallFormat:
    if not tokenizer.has_tool_calling or "tools" not in template:
        return PLAIN
    kind = tokenizer.init_kwargs.get("tool_parser_type")
    mlx_lm_parser = tokenizer.tool_parser

    def parse(text: str, tools: Tools) -> Any:
        return mlx_lm_parser(text, list(tools))

    return ToolCallFormat(
        start=tokenizer.tool_call_start,
        end=tokenizer.tool_call_end,
        parse=parse_json if kind == "json_tools" else parse,
        syntax=_read_syntax(kind, template),
        is_native=True,
        is_json=kind == "json_tools",
    )


def _read_syntax(kind: object, template: str) -> CallSyntax | None:
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


def add_system_text(messages: Sequence[Message], text: str) -> list[Message]:
    """Return the messages with `text` after the system message, or as a new one."""
    first = messages[0]
    if first["role"] != "system":
        return [{"role": "system", "content": text}, *messages]
    content = f"{first['content']}\n\n{text}" if first["content"] else text
    return [{**first, "content": content}, *messages[1:]]


def add_user_text(messages: Sequence[Message], text: str) -> list[Message]:
    """Return the messages with `text` before the first user message, for templates without a system role."""
    for at, message in enumerate(messages):
        if message["role"] == "user":
            changed = {**message, "content": f"{text}\n\n{message['content']}"}
            return [*messages[:at], changed, *messages[at + 1 :]]
    return add_system_text(messages, text)


def spell_tool_calls(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with calls and results as text, in the format of Hermes' and Qwen's training data."""
    spelled: list[Message] = []
    results: list[str] = []  # of the calls of one turn, which become one message
    for message in messages:
        if message["role"] == "tool":
            results.append(f"<tool_response>\n{message['content']}\n</tool_response>")
            continue
        _end_results(spelled, results)
        if message.get("tool_calls"):
            parts = [message["content"], *(_spell_call(call) for call in message["tool_calls"])]
            rest = {name: value for name, value in message.items() if name != "tool_calls"}
            spelled.append({**rest, "content": "\n".join(part for part in parts if part)})
        else:
            spelled.append(message)
    _end_results(spelled, results)
    return spelled


def _end_results(spelled: list[Message], results: list[str]) -> None:
    if results:
        spelled.append({"role": "user", "content": "\n".join(results)})
        results.clear()


def _spell_call(call: Message) -> str:
    return f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>"
