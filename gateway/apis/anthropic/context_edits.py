"""Anthropic's `context_management`: clears old tool results and old thinking from a conversation before it is read. Pure.

Tokens are estimated by characters: the gateway has no tokenizer, and the thresholds of clients are round numbers.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
import orjson

Block: TypeAlias = dict[str, Any]
AppliedEdit: TypeAlias = dict[str, str | int]
_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]

_CHARACTERS_PER_TOKEN: Final = 4
_CLEARED: Final = "[This tool result was cleared to save context.]"
_THINKING: Final = ("thinking", "redacted_thinking")


class ToolUses(msgspec.Struct, frozen=True, tag="tool_uses", forbid_unknown_fields=True):
    """A number of tool calls."""

    value: _Count


class InputTokens(msgspec.Struct, frozen=True, tag="input_tokens", forbid_unknown_fields=True):
    """A number of prompt tokens."""

    value: _Count


class ThinkingTurns(msgspec.Struct, frozen=True, tag="thinking_turns", forbid_unknown_fields=True):
    """A number of the assistant's turns with thinking."""

    value: _Count


class AllThinking(msgspec.Struct, frozen=True, tag="all", forbid_unknown_fields=True):
    """All thinking."""


class ClearToolUses(msgspec.Struct, tag="clear_tool_uses_20250919", forbid_unknown_fields=True):
    """Clears the results of old tool calls. The defaults are Anthropic's."""

    trigger: InputTokens | ToolUses = InputTokens(100_000)
    keep: ToolUses = ToolUses(3)
    clear_at_least: InputTokens | None = None
    exclude_tools: list[str] | None = None
    clear_tool_inputs: bool | list[str] | None = None


class ClearThinking(msgspec.Struct, tag="clear_thinking_20251015", forbid_unknown_fields=True):
    """Clears the thinking of old turns. The default is Anthropic's."""

    keep: ThinkingTurns | AllThinking | Literal["all"] = ThinkingTurns(1)


class ContextManagement(msgspec.Struct, forbid_unknown_fields=True):
    """The edits of a request, in their order."""

    edits: list[ClearToolUses | ClearThinking] = []


def apply(
    management: ContextManagement, contents: Sequence[tuple[str, Any]], other_size: int
) -> list[AppliedEdit]:
    """Change the blocks of a conversation; return what was done.

    `contents`: role and content of each message. `other_size`: the characters of system and tools.
    """
    turns = [
        (role, [block for block in content if isinstance(block, dict)])
        for role, content in contents
        if isinstance(content, list)
    ]
    size = other_size + sum(_size(content) for _, content in contents)
    applied: list[AppliedEdit] = []
    for edit in management.edits:
        if isinstance(edit, ClearThinking):
            done, cleared = _clear_thinking(edit, contents)
            count_name = "cleared_thinking_turns"
            kind = "clear_thinking_20251015"
        else:
            done, cleared = _clear_tool_uses(edit, turns, size)
            count_name = "cleared_tool_uses"
            kind = "clear_tool_uses_20250919"
        size -= cleared
        if done:
            tokens = cleared // _CHARACTERS_PER_TOKEN
            applied.append({"type": kind, count_name: done, "cleared_input_tokens": tokens})
    return applied


def _clear_tool_uses(
    edit: ClearToolUses, turns: Sequence[tuple[str, list[Block]]], size: int
) -> tuple[int, int]:
    """Return the number of results that were cleared, and their characters."""
    calls = [
        block
        for role, blocks in turns
        for block in blocks
        if role == "assistant" and block.get("type") == "tool_use"
    ]
    trigger = edit.trigger
    reached = len(calls) if isinstance(trigger, ToolUses) else size // _CHARACTERS_PER_TOKEN
    if reached <= trigger.value:
        return 0, 0
    results = {
        str(block.get("tool_use_id")): block
        for role, blocks in turns
        for block in blocks
        if role == "user" and block.get("type") == "tool_result"
    }
    excluded = frozenset(edit.exclude_tools or ())
    chosen = [
        (call, result)
        for call in calls[: max(0, len(calls) - edit.keep.value)]
        if str(call.get("name")) not in excluded
        and (result := results.get(str(call.get("id")))) is not None
        and result.get("content") != _CLEARED
    ]
    inputs = edit.clear_tool_inputs
    with_input = [
        call
        for call, _ in chosen
        if (call.get("name") in inputs if isinstance(inputs, list) else bool(inputs))
    ]
    cleared = sum(max(0, _size(result.get("content")) - len(_CLEARED)) for _, result in chosen)
    cleared += sum(_size(call.get("input")) for call in with_input)
    least = edit.clear_at_least
    if least is not None and cleared // _CHARACTERS_PER_TOKEN < least.value:
        return 0, 0
    for _, result in chosen:
        result["content"] = _CLEARED
    for call in with_input:
        call["input"] = {}
    return len(chosen), cleared


def _clear_thinking(edit: ClearThinking, contents: Sequence[tuple[str, Any]]) -> tuple[int, int]:
    """Return the number of turns whose thinking was cleared, and its characters."""
    if not isinstance(edit.keep, ThinkingTurns):
        return 0, 0
    thinking = [
        content
        for role, content in contents
        if role == "assistant" and isinstance(content, list) and any(map(_is_thinking, content))
    ]
    old = thinking[: max(0, len(thinking) - edit.keep.value)]
    cleared = 0
    for content in old:
        cleared += sum(_size(block.get("thinking")) for block in content if _is_thinking(block))
        content[:] = [block for block in content if not _is_thinking(block)]
    return len(old), cleared


def _is_thinking(block: object) -> bool:
    return isinstance(block, dict) and block.get("type") in _THINKING


def _size(value: object) -> int:
    """Return the characters of a value, nearly."""
    if value is None:
        return 0
    return len(value) if isinstance(value, str) else len(orjson.dumps(value))
