"""Engines' answers as Ollama tells them: lines of JSON, or one body. Does no I/O.

Durations are the engine's own measurement (`include_performance`), the total is the gateway's.
"""

from collections.abc import Sequence
from typing import Any

import orjson
from typing_extensions import override

from gateway.errors import Refusal
from gateway.surfaces import answers
from gateway.surfaces.answers import Calls, Choice, Fault
from gateway.surfaces.heard import COMPLETE, Heard, Piece
from gateway.surfaces.ollama.refusing import Refusing, refused
from gateway.upstream.exchange import Headers
from machinery.clock import Clock

_DONE_LINE = b',"done":false}\n'


class Generating(Refusing):
    """Tells one answer to `/api/chat` or `/api/generate`."""

    def __init__(self, model: str, clock: Clock, *, is_chat: bool) -> None:
        """`model`: as the client calls it."""
        self._head = b'{"model":' + orjson.dumps(model) + b',"created_at":"'
        self._clock = clock
        self._began_s = clock.monotonic()
        self._is_chat = is_chat
        self._calls = Calls()
        self._heard = Heard()

    @override
    def whole(self, status: int, headers: Headers, body: bytes) -> tuple[int, Headers, bytes]:
        if status != 200:
            return super().whole(status, headers, body)
        choice = self._heard.whole(body)
        if isinstance(choice, Fault):
            return 502, headers, refused(choice.message)
        self._calls.take_all(choice.said().tool_calls or ())
        return 200, headers, self._last(choice)

    @override
    def events(self, data: bytes) -> bytes:
        return b"".join(map(self._event, self._heard.pieces(answers.payloads(data))))

    @override
    def broken(self, refusal: Refusal) -> bytes:
        return b"" if self._heard.is_over else super().broken(refusal)

    @override
    def end(self) -> bytes:
        return b"" if self._heard.is_over else self._event(self._heard.cut())

    def _event(self, piece: Piece) -> bytes:
        if isinstance(piece, Fault):
            return refused(piece.message) + b"\n"
        return self._last(Choice()) + b"\n" if piece == COMPLETE else self._piece(piece)

    def _piece(self, choice: Choice) -> bytes:
        said = choice.said()
        if said.tool_calls:
            self._calls.take(said.tool_calls)
        calls = self._called() if choice.finish_reason is not None else []
        if not (said.content or said.reasoning_content or calls):
            return b""
        created = self._clock.now().isoformat().encode()
        return self._head + created + b'"' + self._shown(choice, calls) + _DONE_LINE

    def _shown(self, choice: Choice, calls: Sequence[dict[str, Any]]) -> bytes:
        """Return the members that say something, each with a comma before it."""
        said = choice.said()
        text = orjson.dumps(said.content or "")
        more = b""
        if said.reasoning_content:
            more += b',"thinking":' + orjson.dumps(said.reasoning_content)
        if calls:
            more += b',"tool_calls":' + orjson.dumps(calls)
        if self._is_chat:
            shown = b',"message":{"role":"assistant","content":' + text + more + b"}"
        else:
            shown = b',"response":' + text + more
        if choice.logprobs is not None and choice.logprobs.content:
            shown += b',"logprobs":' + choice.logprobs.content
        return shown

    def _called(self) -> list[dict[str, Any]]:
        return [
            {"id": id_, "function": {"index": index, "name": name, "arguments": arguments}}
            for index, (id_, name, arguments) in enumerate(self._calls.complete())
        ]

    def _last(self, choice: Choice) -> bytes:
        """Return what ends an answer, with all of it if it was not streamed."""
        calls = self._called() if choice.finish_reason is not None else []
        created = self._clock.now().isoformat().encode()
        told = {
            "done": True,
            "done_reason": "length" if self._heard.last.finish_reason == "length" else "stop",
            **self._durations(),
        }
        return (
            self._head + created + b'"' + self._shown(choice, calls) + b"," + orjson.dumps(told)[1:]
        )

    def _durations(self) -> dict[str, int]:
        """Return counts, and times in nanoseconds: load is the wait for a place at the engine."""
        usage, took = self._heard.usage, self._heard.performance
        made = usage.completion_tokens
        rate = took.decode_tokens_per_s
        return {
            "total_duration": round((self._clock.monotonic() - self._began_s) * 1e9),
            "load_duration": round((took.queue_s or 0) * 1e9),
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": round((took.prefill_s or 0) * 1e9),
            "eval_count": made,
            # The first token comes with the prompt.
            "eval_duration": round((made - 1) / rate * 1e9) if rate else 0,
        }


class Loaded(Refusing):
    """Tells a client that sent no prompt, which is how Ollama is asked to have a model ready."""

    def __init__(self, model: str, clock: Clock, *, is_chat: bool, is_streamed: bool) -> None:
        """`model`: as the client calls it."""
        self._model = model
        self._clock = clock
        self._is_chat = is_chat
        self._is_streamed = is_streamed

    @override
    def whole(self, status: int, headers: Headers, body: bytes) -> tuple[int, Headers, bytes]:
        if status != 200:
            return super().whole(status, headers, body)
        said = (
            {"message": {"role": "assistant", "content": ""}} if self._is_chat else {"response": ""}
        )
        told = {
            "model": self._model,
            "created_at": self._clock.now().isoformat(),
            **said,
            "done": True,
            "done_reason": "load",
        }
        line = orjson.dumps(told)
        return (
            (200, self.begin(headers), line + b"\n") if self._is_streamed else (200, headers, line)
        )
