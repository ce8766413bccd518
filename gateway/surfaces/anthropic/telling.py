"""Engines' answers as Anthropic tells them: one message, or events. Does no I/O."""

from typing import Any

import orjson
from typing_extensions import override

from gateway.errors import Refusal
from gateway.surfaces import answers
from gateway.surfaces.answers import Calls, Choice, Fault, Said
from gateway.surfaces.anthropic import errors
from gateway.surfaces.anthropic.blocks import Blocks, event
from gateway.surfaces.anthropic.refusing import Refusing
from gateway.surfaces.heard import COMPLETE, Heard, Piece
from gateway.upstream.exchange import Headers

_PING = b'event: ping\ndata: {"type":"ping"}\n\n'
_STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'


class Messaging(Refusing):
    """Tells one answer."""

    def __init__(self, model: str, max_tokens: int, *, shows_thoughts: bool) -> None:
        """`model`: as the client calls it."""
        self._model = model
        self._max_tokens = max_tokens
        self._shows_thoughts = shows_thoughts
        self._blocks: Blocks | None = None
        self._heard = Heard()

    @override
    def whole(self, status: int, headers: Headers, body: bytes) -> tuple[int, Headers, bytes]:
        if status != 200:
            return super().whole(status, headers, body)
        choice = self._heard.whole(body)
        if isinstance(choice, Fault):
            return self.told(502, headers, errors.renamed(choice.message))
        headers = self.begin(headers)
        message_id = self._message_id()
        told = {
            **self._head(message_id),
            "content": self._content(choice, message_id),
            **self._stop(),
            "usage": self._used(),
        }
        return 200, headers, orjson.dumps(told)

    @override
    def events(self, data: bytes) -> bytes:
        found = answers.payloads(data)
        if not found:
            # A comment, which says that somebody still works on it.
            return b"" if self._heard.is_over else _PING
        return b"".join(map(self._event, self._heard.pieces(found)))

    @override
    def broken(self, refusal: Refusal) -> bytes:
        return b"" if self._heard.is_over else super().broken(refusal)

    @override
    def end(self) -> bytes:
        return b"" if self._heard.is_over else self._event(self._heard.cut())

    def _event(self, piece: Piece) -> bytes:
        if isinstance(piece, Fault):
            return self.error(502, piece.message)
        return self._last() if piece == COMPLETE else self._said(piece.said())

    def _said(self, said: Said) -> bytes:
        out = self._first()
        assert self._blocks is not None
        if said.reasoning_content:
            out += self._blocks.thought(said.reasoning_content if self._shows_thoughts else "")
        if said.content:
            out += self._blocks.text(said.content)
        for call in said.tool_calls or ():
            piece = self._blocks.call(call)
            if piece is None:
                self._heard.is_over = True
                return out + self.error(502, "The engine went back to a call that was complete.")
            out += piece
        return out

    def _first(self) -> bytes:
        """Return what goes before everything else, if nothing went yet."""
        if self._blocks is not None:
            return b""
        message_id = self._message_id()
        self._blocks = Blocks(message_id)
        # What the prompt cost comes with the last event: engines tell it at the end.
        message = {
            **self._head(message_id),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._used(),
        }
        return event("message_start", {"message": message})

    def _last(self) -> bytes:
        out = self._blocks.close() if self._blocks is not None else b""
        return out + event("message_delta", {"delta": self._stop(), "usage": self._used()}) + _STOP

    def _message_id(self) -> str:
        return "msg_" + self._heard.id.removeprefix("chatcmpl-")

    def _head(self, message_id: str) -> dict[str, Any]:
        return {"id": message_id, "type": "message", "role": "assistant", "model": self._model}

    def _content(self, choice: Choice, message_id: str) -> list[dict[str, Any]]:
        said, found = choice.said(), list[dict[str, Any]]()
        if said.reasoning_content:
            thinking = said.reasoning_content if self._shows_thoughts else ""
            found.append({"type": "thinking", "thinking": thinking, "signature": message_id})
        if said.content:
            found.append({"type": "text", "text": said.content})
        calls = Calls()
        calls.take_all(said.tool_calls or ())
        for id_, name, arguments in calls.complete():
            found.append({"type": "tool_use", "id": id_, "name": name, "input": arguments})
        return found

    def _stop(self) -> dict[str, str | None]:
        sequence, made = None, self._heard.usage.completion_tokens
        match self._heard.last.finish_reason:
            case "tool_calls":
                reason = "tool_use"
            case "length":
                # Fewer than were asked for: there was no room for more.
                is_full = 0 < made < self._max_tokens
                reason = "model_context_window_exceeded" if is_full else "max_tokens"
            case _:
                sequence = self._heard.last.stop_reason
                reason = "end_turn" if sequence is None else "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": sequence}

    def _used(self) -> dict[str, int]:
        usage = self._heard.usage
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
        }
