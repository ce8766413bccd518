"""Explanations of prompts that were read again: what differs from the most similar earlier prompt. Pure; event loop only.

The parts of the last prompts stay in memory, of a conversation only its last turn. Explanations name fields and
places, never text of a prompt.
"""

import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import orjson

from engine.cache.block_tree import TOKEN_BYTES, count_common, encode_tokens
from engine.cache.interface import BLOCK_TOKENS
from models.footprint import CHECKPOINT_STEP

_MOST_PROMPTS: Final = 64
_MOST_BYTES: Final = 16 << 20
_LONGEST_PROMPT: Final = 4 << 20
# Models with recurrent layers continue at checkpoints, which are this far apart (models/footprint.py) or farther.
_SLACK_TOKENS: Final = CHECKPOINT_STEP + BLOCK_TOKENS
# Prompts that share less are of different programs.
_LEAST_SHARED: Final = 64
_LOOKED_AT: Final = 4096
_LONGEST_NAME: Final = 64
_NOT_IN_NAMES: Final = re.compile(r"[^\w.$-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptParts:
    """One chat prompt: what its text follows from, and its tokens."""

    adapter: str
    salt: str
    settings: Mapping[str, bytes]
    """Variables of the chat template, as JSON, as all parts."""
    tools: tuple[bytes, ...]
    messages: tuple[bytes, ...]
    tokens: bytes

    @property
    def scope(self) -> tuple[str, str]:
        """Prompts of different scopes share nothing."""
        return self.adapter, self.salt

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return len(self.tokens) + sum(map(len, (*self.tools, *self.messages)))


def read_parts(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    settings: Mapping[str, Any],
    tokens: Sequence[int],
    *,
    adapter: str,
    salt: str,
) -> PromptParts:
    """Return the parts of a prompt."""
    return PromptParts(
        adapter=adapter,
        salt=salt,
        settings={name: orjson.dumps(value, default=str) for name, value in settings.items()},
        tools=tuple(orjson.dumps(tool, default=str) for tool in tools),
        messages=tuple(orjson.dumps(message, default=str) for message in messages),
        tokens=encode_tokens(tokens),
    )


@dataclass(slots=True)
class PromptLineages:
    """The last prompts, oldest first, within a budget of bytes."""

    _prompts: OrderedDict[int, tuple[PromptParts, int]] = field(default_factory=OrderedDict)
    """Each with the evictions of the prefix cache before it."""
    _count: int = 0
    _bytes: int = 0

    def explain(self, prompt: PromptParts, *, cached_tokens: int, evictions: int) -> str:
        """Return why tokens of a prompt were read, and add the prompt; empty if it goes on where an earlier one ended.

        `evictions`: those of the prefix cache so far.
        """
        number, reason = self._find_reason(prompt, cached_tokens, evictions)
        if prompt.nbytes <= _LONGEST_PROMPT:
            if number is not None and not reason:
                self._bytes -= self._prompts.pop(number)[0].nbytes  # the turn before
            self._count += 1
            self._prompts[self._count] = prompt, evictions
            self._bytes += prompt.nbytes
            while self._bytes > _MOST_BYTES or len(self._prompts) > _MOST_PROMPTS:
                self._bytes -= self._prompts.popitem(last=False)[1][0].nbytes
        if not reason:
            return ""
        count = len(prompt.tokens) // TOKEN_BYTES
        return f"{count - cached_tokens:,} of {count:,} tokens were {reason}"

    def _find_reason(
        self, prompt: PromptParts, cached_tokens: int, evictions: int
    ) -> tuple[int | None, str]:
        """Return the number of the most similar prompt, None without one, and the reason; empty if nothing was lost."""
        similar = [
            (earlier.scope == prompt.scope, shared, number)
            for number, (earlier, _) in self._prompts.items()
            if (shared := _shared_bytes(earlier, prompt)) >= _LEAST_SHARED
        ]
        if not similar:
            was_read = len(prompt.tokens) // TOKEN_BYTES - cached_tokens >= _SLACK_TOKENS
            return (
                None,
                "read: no prompt since the engine's start begins like it" if was_read else "",
            )
        number = max(similar)[2]
        earlier, evictions_then = self._prompts[number]
        if earlier.scope != prompt.scope:
            is_adapter = earlier.adapter != prompt.adapter
            what = "adapter differs" if is_adapter else "API key or cache_salt differ"
            return number, f"read again: the {what}"
        common = count_common(earlier.tokens, prompt.tokens)
        if common * TOKEN_BYTES < len(earlier.tokens):
            differences, is_again = _differences(earlier, prompt)
            if differences:
                return number, f"read{' again' if is_again else ''}: {'; '.join(differences)}"
        if common - cached_tokens < _SLACK_TOKENS:
            return number, ""
        was_evicted = evictions > evictions_then
        return number, f"read again: they were {'evicted' if was_evicted else 'not in the cache'}"


def _shared_bytes(earlier: PromptParts, prompt: PromptParts) -> int:
    """Return the size of the parts that two prompts share at the same place, and of the beginning of the first other."""
    size = 0
    for ours, theirs in ((prompt.messages, earlier.messages), (prompt.tools, earlier.tools)):
        has_differed = False
        for new, old in zip(ours, theirs, strict=False):
            if new == old:
                size += len(new)
            elif not has_differed:
                has_differed = True
                size += _first_difference(new[:_LOOKED_AT], old[:_LOOKED_AT])
    return size


def _first_difference(one: bytes | str, other: bytes | str) -> int:
    """Return the number of equal bytes or characters at the beginning, by bisection."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[:middle] == other[:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _differences(earlier: PromptParts, prompt: PromptParts) -> tuple[list[str], bool]:
    """Return the settings, the tool and the message in which a prompt first differs, and whether equal parts follow."""
    names = sorted({*earlier.settings, *prompt.settings})
    differences = [
        f"{_name(name)} differs"
        for name in names
        if earlier.settings.get(name) != prompt.settings.get(name)
    ]
    differences += _tool_difference(earlier.tools, prompt.tools)
    is_again = bool(differences)
    pairs = list(zip(earlier.messages, prompt.messages, strict=False))
    for at, (earlier_message, message) in enumerate(pairs):
        if earlier_message != message:
            old, new = orjson.loads(earlier_message), orjson.loads(message)
            role = _name(str(new.get("role")))
            is_system = role == "system" and not at
            label = "system message" if is_system else f"message {at} ({role})"
            differences.append(f"{label}: {_place(old, new)}")
            is_again = is_again or is_system or any(a == b for a, b in pairs[at:])
            break
    return differences, is_again


def _tool_difference(old: Sequence[bytes], new: Sequence[bytes]) -> list[str]:
    if old == new:
        return []
    old_tools, new_tools = (
        {_tool_name(tool := orjson.loads(raw)): tool for raw in raws} for raws in (old, new)
    )
    if added := [name for name in new_tools if name not in old_tools]:
        return [f"tool {added[0]} was added"]
    if removed := [name for name in old_tools if name not in new_tools]:
        return [f"tool {removed[0]} was removed"]
    for name, tool in new_tools.items():
        if tool != old_tools[name]:
            return [f"tool {name}: {_place(old_tools[name], tool)}"]
    return ["the tools are in another order"]


def _tool_name(tool: Mapping[str, Any]) -> str:
    function = tool.get("function")
    return _name(str((function if isinstance(function, dict) else tool).get("name")))


def _name(text: str) -> str:
    """Return a client's name of something, without anything else that could stand in a header."""
    return _NOT_IN_NAMES.sub("_", text.encode("ascii", "replace").decode())[:_LONGEST_NAME]


def _place(old: object, new: object) -> str:
    """Return the path of the first value in which two JSON values differ, and the character of a text."""
    path = ""
    while True:
        if isinstance(old, dict) and isinstance(new, dict):
            keys = [key for key in {**old, **new} if old.get(key) != new.get(key)]
            if not keys:
                return f"the order of fields{path and f' of {path}'} differs"
            key = keys[0]
            path += ("." if path else "") + _name(str(key))
            if key not in old or key not in new:
                return f"{path} was {'added' if key in new else 'removed'}"
            old, new = old[key], new[key]
        elif isinstance(old, list) and isinstance(new, list):
            size = min(len(old), len(new))
            at = next((at for at in range(size) if old[at] != new[at]), size)
            if at == size:
                return f"the length of {path} differs"
            path += f"[{at}]"
            old, new = old[at], new[at]
        elif isinstance(old, str) and isinstance(new, str):
            return f"{path} differs at character {_first_difference(old, new)}"
        else:
            return f"{path} differs"
