"""Records what an agent says before its user does, as `spec.prefixes` of a deployment takes it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, Final

from gateway.apis import openai
from gateway.apis.anthropic.adapter import MESSAGES, AnthropicAdapter
from gateway.canonical_prompts import canonicalize
from gateway.request import HttpRequest
from machinery.files import write_atomically
from schemas.prefixes import CHAT_FIELDS, RESPONSES_FIELDS
from schemas.wire.errors import RefusedError

_ADAPTERS: Final = {
    MESSAGES: AnthropicAdapter(),
    **dict.fromkeys(("/v1/chat/completions", "/v1/responses"), openai.OpenAiAdapter()),
}


def read_prefix(path: str, headers: Mapping[bytes, bytes], body: bytes) -> dict[str, Any]:
    """Return the system prompt and the tools of a request, translated and canonical as a gateway sends them to engines.

    `headers`: the last value of each. Empty for requests that have neither.
    """
    adapter = _ADAPTERS.get(path)
    if adapter is None:
        return {}
    http_request = HttpRequest(path=path, headers=(), fields=headers, body=body)
    try:
        request, _ = adapter.read(http_request)
    except RefusedError:
        return {}  # the gateway refuses it, too
    canonicalize(request)
    members: dict[str, Any] = json.loads(request.body)
    place, names = ("input", RESPONSES_FIELDS) if "input" in members else ("messages", CHAT_FIELDS)
    turns = members.get(place)
    if not isinstance(turns, list):
        return {}
    members[place] = list(takewhile(_is_system, turns))
    prefix = {name: members[name] for name in names if name in members}
    return prefix if members[place] or prefix.get("tools") or "instructions" in prefix else {}


def _is_system(turn: Any) -> bool:
    return isinstance(turn, dict) and turn.get("role") in ("system", "developer")


@dataclass(slots=True)
class PrefixRecorder:
    """Writes the prefix of an agent's first request to a file, and of its first one with tools instead: a title has none."""

    path: Path
    size: int = 0
    """Bytes of the recorded prefix; 0: none yet."""
    _has_tools: bool = False
    _error: str = ""

    def take(self, path: str, headers: Mapping[bytes, bytes], body: bytes) -> None:
        """Look at one request."""
        if self._error or self._has_tools or not (prefix := read_prefix(path, headers, body)):
            return
        self._has_tools = bool(prefix.get("tools"))
        if self._has_tools or not self.size:
            text = json.dumps(prefix, ensure_ascii=False)
            try:
                write_atomically(self.path, text)
            except OSError as error:
                self._error = f"it cannot be written: {error.strerror}"
                return
            self.size = len(text.encode())

    def summary(self, name: str) -> str:
        """Return what the user does with the file. `name`: of the agent."""
        if self._error or not self.size:
            why = self._error or "the agent sent no request with a system prompt or tools"
            return f"warning: {self.path} has no prefix: {why}"
        # Three bytes a token are fewer than any model's tokenizer needs for English and JSON.
        tokens = max(1, -(-self.size // 3 // 1024)) * 1024
        return (
            f"recorded {name}'s system prompt and tools in {self.path}. Copy it into the models folder of each Mac, "
            f"and declare: prefixes: [{{name: {name}, file: {self.path.name}, tokens: {tokens}}}]"
        )
