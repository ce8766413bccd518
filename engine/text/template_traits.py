"""Traits of a model's chat template, and messages for templates that lack a feature.

Traits are read from the tokenizer, which is passed in; nothing here imports mlx.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from engine.text.formats import registry
from engine.text.formats.answer import AnswerFormat
from engine.text.formats.registry import PLAIN
from engine.text.formats.tools import Tools
from engine.text.infill import InfillFormat, find_infill
from engine.text.reasoning import ThinkingMarkers

Message: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateTraits:
    """The markers, the tool call format and the variables of one model's chat template."""

    answer_format: AnswerFormat = PLAIN
    thinking: ThinkingMarkers | None = None
    template: str = ""
    """Source of the chat template; empty if the template is code."""
    specials: Mapping[str, int] = field(default_factory=dict)
    """Token ids of the special tokens that end no answer, by spelling."""
    infill: InfillFormat | None = None
    """Format of prompts that fill a gap; None if the vocabulary has no tokens for it."""

    def mentions(self, variable: str) -> bool:
        """Return whether the chat template contains the name of a variable."""
        return variable in self.template


def read_traits(tokenizer: Any) -> TemplateTraits:
    """Return the traits that the chat template and the vocabulary show."""
    template = _template_text(tokenizer)
    vocabulary = tokenizer.get_vocab()
    answer_format = registry.find_format(template, vocabulary)
    return TemplateTraits(
        answer_format=answer_format,
        thinking=registry.find_thinking(answer_format, vocabulary),
        template=template,
        specials=_special_tokens(tokenizer),
        infill=find_infill(vocabulary),
    )


def _template_text(tokenizer: Any) -> str:
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, str):
        return template
    return "" if template is None else json.dumps(template)


def _special_tokens(tokenizer: Any) -> Mapping[str, int]:
    added: Mapping[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    ends = getattr(tokenizer, "eos_token_ids", ())
    return {
        token.content: number
        for number, token in added.items()
        # Some vocabularies add runs of blanks; those are ordinary text.
        if number not in ends
        and token.content.strip()
        and (token.special or token.content[0] in "<[")
    }


def tool_instructions(tools: Tools) -> str:
    """Return the description of tools for the prompt, in the wording of Hermes' and Qwen's training data."""
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return (
        "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
        "You are provided with function signatures within <tools></tools> XML tags:\n"
        f"<tools>\n{listed}\n</tools>\n\n"
        "For each function call, return a json object with function name and arguments within "
        "<tool_call></tool_call> XML tags:\n<tool_call>\n"
        '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
    )


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


def quote_arguments(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with the arguments of calls as JSON in a string, for templates that write them as they are."""
    return [
        {**message, "tool_calls": [_quote_call(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def _quote_call(call: Message) -> Message:
    arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": arguments}}


Content: TypeAlias = str | list[dict[str, Any]]
_RESULT, _RESULT_END = "<tool_response>\n", "\n</tool_response>"


def spell_tool_calls(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with calls and results as text, in the format of Hermes' and Qwen's training data."""
    spelled: list[Message] = []
    results: list[Content] = []  # of the calls of one turn, which become one message
    for message in messages:
        if message["role"] == "tool":
            results.append(message["content"])
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


def _end_results(spelled: list[Message], results: list[Content]) -> None:
    """Add the results as a message of the user; a text, or parts if one has images."""
    if not results:
        return
    content: Content = "\n".join(f"{_RESULT}{result}{_RESULT_END}" for result in results)
    if not all(isinstance(result, str) for result in results):
        content = []
        for result in results:
            parts = [{"type": "text", "text": result}] if isinstance(result, str) else result
            opening = f"\n{_RESULT}" if content else _RESULT
            content += [{"type": "text", "text": opening}, *parts]
            content.append({"type": "text", "text": _RESULT_END})
    spelled.append({"role": "user", "content": content})
    results.clear()


def _spell_call(call: Message) -> str:
    return f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>"
