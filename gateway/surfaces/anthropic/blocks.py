"""The content blocks of one streamed message: opened, filled and closed one after another. Pure."""

from collections.abc import Mapping
from typing import Any

import orjson

from gateway.surfaces.answers import Call


def event(kind: str, members: Mapping[str, Any]) -> bytes:
    """Return one server-sent event."""
    return f"event: {kind}\ndata: ".encode() + orjson.dumps({"type": kind, **members}) + b"\n\n"


class Blocks:
    """At most one block is open, and none is opened twice."""

    def __init__(self, signature: str) -> None:
        """`signature`: what thoughts are signed with. Clients want one to send a thought back; nobody reads it."""
        self._signature = signature
        self._index = -1
        self._kind = ""
        self._calls: set[int] = set()
        self._call = -1
        self._prefix = b""

    def text(self, piece: str) -> bytes:
        """Add to what is said."""
        out = b""
        if self._kind != "text":
            out = self._open("text", {"type": "text", "text": ""}, "text_delta", "text")
        return out + self._delta(piece)

    def thought(self, piece: str) -> bytes:
        """Add to what is thought."""
        out = b""
        if self._kind != "thinking":
            block = {"type": "thinking", "thinking": "", "signature": ""}
            out = self._open("thinking", block, "thinking_delta", "thinking")
        return out + (self._delta(piece) if piece else b"")

    def call(self, piece: Call) -> bytes | None:
        """Add to a call; None if it was complete, since another block came after it."""
        out = b""
        if self._kind != "tool_use" or self._call != piece.index:
            if piece.index in self._calls:
                return None
            block = {
                "type": "tool_use",
                "id": piece.id or "",
                "name": piece.function.name or "",
                "input": {},
            }
            out = self._open("tool_use", block, "input_json_delta", "partial_json")
            self._calls.add(piece.index)
            self._call = piece.index
        arguments = piece.function.arguments
        return out + (self._delta(arguments) if arguments else b"")

    def close(self) -> bytes:
        """Close the block that is open, if one is."""
        kind, self._kind = self._kind, ""
        if not kind:
            return b""
        out = b""
        if kind == "thinking":
            delta = {"type": "signature_delta", "signature": self._signature}
            out = event("content_block_delta", {"index": self._index, "delta": delta})
        return out + event("content_block_stop", {"index": self._index})

    def _open(self, kind: str, block: Mapping[str, Any], delta: str, member: str) -> bytes:
        out = self.close()
        self._kind = kind
        self._index += 1
        # All but the text itself is the same in every piece of the block.
        self._prefix = (
            b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":"%b","%b":'
            % (self._index, delta.encode(), member.encode())
        )
        return out + event("content_block_start", {"index": self._index, "content_block": block})

    def _delta(self, piece: str) -> bytes:
        return self._prefix + orjson.dumps(piece) + b"}}\n\n"
