"""Engines' answers as Anthropic tells them: one message, or events. Does no I/O."""

from typing import Any

import orjson
from typing_extensions import override

from gateway.errors import Refusal
from gateway.surfaces import answers
from gateway.surfaces.answers import Answer, Calls, Choice, Usage
from gateway.surfaces.anthropic import errors
from gateway.surfaces.anthropic.blocks import Blocks, event
from gateway.surfaces.anthropic.refusing import Refusing
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
        self._choice = Choice()
        """The one that said why it ended."""
        self._usage = Usage()
        self._is_over = False

    @override
    def whole(self, status: int, headers: Headers, body: bytes) -> tuple[int, Headers, bytes]:
        if status != 200:
            return super().whole(status, headers, body)
        answer = answers.read(body)
        headers = self.begin(headers)
        if answer.error is not None or not answer.choices:
            message = errors.renamed((answer.error or answers.Fault()).message)
            return 502, headers, errors.body(502, message, self.request_id)
        self._note(answer)
        message_id = _message_id(answer.id)
        told = {
            **self._head(message_id),
            "content": self._content(answer.choices[0], message_id),
            **self._stop(),
            "usage": self._used(),
        }
        return 200, headers, orjson.dumps(told)

    @override
    def events(self, data: bytes) -> bytes:
        found = answers.payloads(data)
        if not found:
            # A comment, which says that somebody still works on it.
            return b"" if self._is_over else _PING
        out = b""
        for payload in found:
            if not self._is_over:
                out += self._event(payload)
        return out

    @override
    def broken(self, refusal: Refusal) -> bytes:
        return b"" if self._is_over else super().broken(refusal)

    @override
    def end(self) -> bytes:
        if self._is_over:
            return b""
        self._is_over = True
        return self.error(502, "The engine's stream ended before the answer did.")

    def _event(self, payload: bytes) -> bytes:
        if payload == answers.DONE:
            return self.end() if self._choice.finish_reason is None else self._last()
        answer = answers.read(payload)
        if answer.error is not None:
            self._is_over = True
            return self.error(502, answer.error.message)
        self._note(answer)
        if not answer.choices:
            return b""
        out = self._first(answer)
        assert self._blocks is not None
        said = answer.choices[0].said()
        if said.reasoning_content:
            out += self._blocks.thought(said.reasoning_content if self._shows_thoughts else "")
        if said.content:
            out += self._blocks.text(said.content)
        for call in said.tool_calls or ():
            piece = self._blocks.call(call)
            if piece is None:
                self._is_over = True
                return out + self.error(502, "The engine went back to a call that was complete.")
            out += piece
        return out

    def _note(self, answer: Answer) -> None:
        self._usage = answer.usage or self._usage
        if answer.choices and answer.choices[0].finish_reason is not None:
            self._choice = answer.choices[0]

    def _first(self, answer: Answer) -> bytes:
        """Return what goes before everything else, if nothing went yet."""
        if self._blocks is not None:
            return b""
        message_id = _message_id(answer.id)
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
        self._is_over = True
        out = self._blocks.close() if self._blocks is not None else b""
        return out + event("message_delta", {"delta": self._stop(), "usage": self._used()}) + _STOP

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
        sequence, made = None, self._usage.completion_tokens
        match self._choice.finish_reason:
            case "tool_calls":
                reason = "tool_use"
            case "length":
                # Fewer than were asked for: there was no room for more.
                is_full = 0 < made < self._max_tokens
                reason = "model_context_window_exceeded" if is_full else "max_tokens"
            case _:
                sequence = self._choice.stop_reason
                reason = "end_turn" if sequence is None else "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": sequence}

    def _used(self) -> dict[str, int]:
        usage = self._usage
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
        }


def _message_id(id_: str) -> str:
    return "msg_" + id_.removeprefix("chatcmpl-")
