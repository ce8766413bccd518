"""Anthropic's messages as OpenAI's: blocks become texts, calls and results. Pure."""

from collections.abc import Container, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec
import orjson

from gateway.errors import RefusedError, invalid

Block: TypeAlias = dict[str, Any]

# What is between the texts of blocks that become one text.
_BETWEEN = "\n\n"
# The fields of each kind of block; those that are not read have no effect (docs/reference/anthropic.md).
_FIELDS: Mapping[str, frozenset[str]] = {
    "text": frozenset({"type", "text", "cache_control", "citations"}),
    "thinking": frozenset({"type", "thinking", "signature"}),
    "redacted_thinking": frozenset({"type", "data"}),
    "tool_use": frozenset(
        {"type", "id", "name", "input", "cache_control", "caller", "toolset_name"}
    ),
    "tool_result": frozenset(
        {"type", "tool_use_id", "content", "is_error", "cache_control", "toolset_name"}
    ),
}
_TYPES: Mapping[str, type] = {
    "text": str, "thinking": str, "id": str, "name": str, "tool_use_id": str, "input": dict,
}  # fmt: skip
_KINDS = {
    "system": ("text",),
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
}


class Message(msgspec.Struct, forbid_unknown_fields=True):
    """One turn."""

    role: str
    content: str | list[Block]


def system(given: str | list[Block] | None) -> list[dict[str, Any]]:
    """Return the message that comes first; none if there is nothing to say.

    Raises:
        RefusedError: it is something else than text.

    """
    text = given if isinstance(given, str) else _texts(given or (), "system", "system")
    return [{"role": "system", "content": text}] if text else []


def translate(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the turns; neighbours of one role are one turn, as Anthropic has it.

    Raises:
        RefusedError: a block is not known, or not text.

    """
    found: list[dict[str, Any]] = []
    called: set[str] = set()  # the ids of the calls so far
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if message.role not in _KINDS:
            raise invalid(
                f"Invalid '{where}.role': it must be user, assistant or system.",
                param=f"{where}.role",
            )
        blocks = message.content
        if isinstance(blocks, str):
            _add(found, message.role, blocks)
        elif message.role == "assistant":
            turn = _said(blocks, f"{where}.content")
            called.update(call["id"] for call in turn.get("tool_calls", ()))
            _join(found, turn)
        else:
            _heard(found, message.role, blocks, called, f"{where}.content")
    if found and found[-1]["role"] == "assistant":
        raise invalid(
            "The last message is the assistant's, and this fleet's models do not continue a begun answer "
            "(prefill). End with a message of the user.",
            param="messages",
        )
    return found


def _add(found: list[dict[str, Any]], role: str, text: str) -> None:
    _join(found, {"role": role, "content": text})


def _join(found: list[dict[str, Any]], turn: dict[str, Any]) -> None:
    """Append a turn, or join it with the one before."""
    if not found or found[-1]["role"] != turn["role"] or turn["role"] == "tool":
        found.append(turn)
        return
    before = found[-1]
    for name in ("content", "reasoning_content"):
        texts = [text for text in (before.get(name), turn.get(name)) if text]
        if texts or name == "content":
            before[name] = _BETWEEN.join(texts)
    calls = [*before.get("tool_calls", ()), *turn.get("tool_calls", ())]
    if calls:
        before["tool_calls"] = calls


def _heard(
    found: list[dict[str, Any]],
    role: str,
    blocks: Sequence[Block],
    called: Container[str],
    where: str,
) -> None:
    """Add what a user or a system says: each result of a tool is a message of its own."""
    for at, block in enumerate(blocks):
        here = f"{where}[{at}]"
        if _kind(block, role, here) == "tool_result":
            if block["tool_use_id"] not in called:
                raise _no_such_call(block["tool_use_id"], here)
            result = {"role": "tool", "tool_call_id": block["tool_use_id"]}
            found.append({**result, "content": _result(block, here)})
        else:
            _add(found, role, block["text"])


def _result(block: Block, where: str) -> str:
    given = block.get("content")
    text = given if isinstance(given, str) else _texts(given or (), "system", f"{where}.content")
    # Templates have no place for it, and models read it well.
    return f"Error: {text}" if block.get("is_error") else text


def _said(blocks: Sequence[Block], where: str) -> dict[str, Any]:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for at, block in enumerate(blocks):
        kind = _kind(block, "assistant", f"{where}[{at}]")
        if kind == "text":
            texts.append(block["text"])
        elif kind == "thinking":
            thoughts.append(block["thinking"])
        elif kind == "tool_use":
            arguments = orjson.dumps(block["input"]).decode()
            function = {"name": block["name"], "arguments": arguments}
            calls.append({"id": block["id"], "type": "function", "function": function})
    turn: dict[str, Any] = {"role": "assistant", "content": _BETWEEN.join(texts)}
    if thoughts:
        turn["reasoning_content"] = _BETWEEN.join(thoughts)
    if calls:
        turn["tool_calls"] = calls
    return turn


def _texts(blocks: Sequence[Block], role: str, where: str) -> str:
    for at, block in enumerate(blocks):
        _kind(block, role, f"{where}[{at}]")
    return _BETWEEN.join(block["text"] for block in blocks)


def _kind(block: object, role: str, where: str) -> str:
    """Return a block's type.

    Raises:
        RefusedError: it is not one that may stand there, or not as it should be.

    """
    kind = block.get("type") if isinstance(block, dict) else None
    if not isinstance(block, dict) or not isinstance(kind, str) or kind not in _KINDS[role]:
        raise _no_such_block(kind, role, where)
    for name in block.keys() - _FIELDS[kind]:
        raise invalid(f"'{str(name)[:100]}' is not known in a block of type '{kind}'.", param=where)
    for name in _FIELDS[kind] & _TYPES.keys():
        if not isinstance(block.get(name), _TYPES[name]):
            what = "an object" if name == "input" else "a string"
            raise invalid(f"Invalid '{where}.{name}': it must be {what}.", param=f"{where}.{name}")
    return kind


def _no_such_call(call: str, where: str) -> RefusedError:
    """Return the refusal of a result without its call; an engine would refuse it in OpenAI's words."""
    message = (
        f"Invalid '{where}.tool_use_id': a tool_result answers a tool_use of the assistant in a message before "
        f"it, and none has the id {call[:100]!r}; send the message with that tool_use, too."
    )
    return invalid(message, param=f"{where}.tool_use_id")


def _no_such_block(kind: object, role: str, where: str) -> RefusedError:
    if kind in ("image", "document"):
        message = f"The models of this fleet read text only; send the {kind} as text."
    else:
        known = " or ".join(_KINDS[role])
        message = f"A block of type {str(kind)[:100]!r} cannot stand here; it must be {known}."
    return invalid(f"Invalid '{where}': {message}", param=where)
