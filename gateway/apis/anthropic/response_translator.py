"""Translates responses to Anthropic's format: messages, events, token counts, errors and lists of models. Pure."""

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, TypeAlias

import orjson
from typing_extensions import override

from gateway.apis import openai_response
from gateway.apis.adapter import ResponseTranslator
from gateway.apis.anthropic.context_edits import AppliedEdit
from gateway.apis.openai_response import (
    AnswerTranslator,
    EngineError,
    PromptTokenDetails,
    ResponseChoice,
    ResponseUsage,
    ToolCallAssembler,
    ToolCallPiece,
)
from gateway.metrics.response_summary import TokenCounts
from gateway.routing.table import ServedModel
from gateway.upstream.call import Headers
from schemas.wire import headers as wire_headers
from schemas.wire.errors import Refusal, invalid

_REQUEST_ID = wire_headers.REQUEST_ID.encode()

# The engine's names of fields that clients know by another name.
_NAMES = {
    "'reasoning_effort'": "'thinking'",
    "'response_format'": "'output_config.format'",
    "'stop'": "'stop_sequences'",
}
_TOOL_FIELDS = re.compile(r"(tools\[\d+\])\.function\.(name|description|parameters)")
_TYPES = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
_OVERLOADED = 529
_PING = b'event: ping\ndata: {"type":"ping"}\n\n'
_STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
Json: TypeAlias = dict[str, Any]
# Anthropic's own values.
_USUAL_LIMIT, _LARGEST_LIMIT = 20, 1000


def client_status(given: int) -> int:
    """Return the status that Anthropic's clients expect."""
    return _OVERLOADED if given == 503 else given


def rename_fields(message: str) -> str:
    """Return an engine's message with this API's field names."""
    for engines, own in _NAMES.items():
        message = message.replace(engines, own)
    return _TOOL_FIELDS.sub(
        lambda match: (f"{match[1]}.{'input_schema' if match[2] == 'parameters' else match[2]}"),
        message,
    )


def error_body(given: int, message: str, request_id: str) -> bytes:
    """Return the body of an error; `request_id` may be empty."""
    kind = _TYPES.get(given, "api_error" if given >= 500 else "invalid_request_error")
    error = {"type": kind, "message": message}
    return orjson.dumps({"type": "error", "error": error, "request_id": request_id or None})


class ErrorTranslator(ResponseTranslator):
    """Translates errors, with this API's field names."""

    request_id = ""

    @override
    def whole(self, status: int, headers: Headers, body: bytes) -> tuple[int, Headers, bytes]:
        return self.error_response(
            status, headers, rename_fields(openai_response.error_message(body))
        )

    def error_response(
        self, status: int, headers: Headers, message: str
    ) -> tuple[int, Headers, bytes]:
        """Return an error with this status and message."""
        headers = self.begin(headers)
        return client_status(status), headers, error_body(status, message, self.request_id)

    @override
    def begin(self, headers: Headers) -> Headers:
        found = next((value for name, value in headers if name == _REQUEST_ID), b"")
        self.request_id = found.decode("latin-1")
        return [*headers, (b"request-id", found)] if found else headers

    @override
    def broken(self, refusal: Refusal) -> bytes:
        return self.error(refusal.status, refusal.message)

    def error(self, status: int, message: str) -> bytes:
        """Return the event that ends a stream with an error."""
        body = error_body(status, rename_fields(message), self.request_id)
        return b"event: error\ndata: " + body + b"\n\n"


class ClientErrorTranslator(ErrorTranslator):
    """Translates errors of requests that never reached an engine: their field names are the client's own."""

    @override
    def whole(self, status: int, headers: Headers, body: bytes) -> tuple[int, Headers, bytes]:
        return self.error_response(status, headers, openai_response.error_message(body))


class TokenCountTranslator(ErrorTranslator):
    """Translates token counts."""

    def __init__(self, edits: Sequence[AppliedEdit] | None = None) -> None:
        """`edits`: what was cleared before the count."""
        self._edits = edits

    @override
    def whole(self, status: int, headers: Headers, body: bytes) -> tuple[int, Headers, bytes]:
        if status != 200:
            return super().whole(status, headers, body)
        counted: Json = {"input_tokens": orjson.loads(body)["count"]}
        if self._edits is not None:
            cleared = sum(int(edit["cleared_input_tokens"]) for edit in self._edits)
            original = {"original_input_tokens": counted["input_tokens"] + cleared}
            counted["context_management"] = original
        return 200, self.begin(headers), orjson.dumps(counted)


def encode_event(kind: str, members: Mapping[str, Any]) -> bytes:
    """Return one server-sent event."""
    return f"event: {kind}\ndata: ".encode() + orjson.dumps({"type": kind, **members}) + b"\n\n"


class ContentBlocks:
    """The content blocks of a streamed message: at most one is open, and none is reopened."""

    def __init__(self, signature: str) -> None:
        """`signature`: signs thinking blocks. Clients need one to send a block back; it is not checked."""
        self._signature = signature
        self._index = -1
        self._kind = ""
        self._calls: set[int] = set()
        self._call = -1
        self._prefix = b""

    def text(self, piece: str) -> bytes:
        """Add text."""
        out = b""
        if self._kind != "text":
            out = self._open("text", {"type": "text", "text": ""}, "text_delta", "text")
        return out + self._delta(piece)

    def thought(self, piece: str) -> bytes:
        """Add thinking."""
        out = b""
        if self._kind != "thinking":
            block = {"type": "thinking", "thinking": "", "signature": ""}
            out = self._open("thinking", block, "thinking_delta", "thinking")
        return out + (self._delta(piece) if piece else b"")

    def call(self, piece: ToolCallPiece) -> bytes | None:
        """Add to a tool call; None if the call was complete already."""
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
        """Close the open block, if there is one."""
        kind, self._kind = self._kind, ""
        if not kind:
            return b""
        out = b""
        if kind == "thinking":
            delta = {"type": "signature_delta", "signature": self._signature}
            out = encode_event("content_block_delta", {"index": self._index, "delta": delta})
        return out + encode_event("content_block_stop", {"index": self._index})

    def _open(self, kind: str, block: Mapping[str, Any], delta: str, member: str) -> bytes:
        out = self.close()
        self._kind = kind
        self._index += 1
        # Everything but the text is the same in all pieces of the block.
        self._prefix = (
            b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":"%b","%b":'
            % (self._index, delta.encode(), member.encode())
        )
        return out + encode_event(
            "content_block_start", {"index": self._index, "content_block": block}
        )

    def _delta(self, piece: str) -> bytes:
        return self._prefix + orjson.dumps(piece) + b"}}\n\n"


class MessageTranslator(AnswerTranslator, ErrorTranslator):
    """Translates one message."""

    keep_alive = _PING

    def __init__(
        self,
        model: str,
        max_tokens: int,
        *,
        shows_thoughts: bool,
        edits: Sequence[AppliedEdit] | None = None,
    ) -> None:
        """`model`: the name that the client used. `edits`: what was cleared; None if nothing was asked for."""
        super().__init__()
        self._edited = {} if edits is None else {"context_management": {"applied_edits": edits}}
        self._read_usage: Callable[[], TokenCounts] | None = None
        self._model = model
        self._max_tokens = max_tokens
        self._shows_thoughts = shows_thoughts
        self._blocks: ContentBlocks | None = None

    @override
    def whole(self, status: int, headers: Headers, body: bytes) -> tuple[int, Headers, bytes]:
        status, headers, body = super().whole(status, headers, body)
        return status, self.begin(headers) if status == 200 else headers, body

    @override
    def message(self, choice: ResponseChoice) -> bytes:
        message_id = self._message_id()
        message = {
            **self._head(message_id),
            "content": self._content(choice, message_id),
            **self._stop(),
            "usage": self._used(),
            **self._edited,
        }
        return orjson.dumps(message)

    @override
    def take_usage(self, usage: Callable[[], TokenCounts]) -> None:
        self._read_usage = usage

    @override
    def failure(self, error: EngineError) -> bytes:
        return self.error(502, error.message)

    @override
    def piece(self, choice: ResponseChoice) -> bytes:
        message = choice.content_message()
        out = self._first()
        assert self._blocks is not None
        if message.reasoning_content:
            out += self._blocks.thought(message.reasoning_content if self._shows_thoughts else "")
        if message.content:
            out += self._blocks.text(message.content)
        for call in message.tool_calls or ():
            piece = self._blocks.call(call)
            if piece is None:
                self.is_over = True
                return out + self.error(502, "The engine continued a tool call that was complete.")
            out += piece
        return out

    def _first(self) -> bytes:
        """Return the start of the message, once."""
        if self._blocks is not None:
            return b""
        message_id = self._message_id()
        self._blocks = ContentBlocks(message_id)
        if self._read_usage is not None:
            prompt, cached, _ = self._read_usage()
            details = PromptTokenDetails(cached)
            self.usage = ResponseUsage(prompt, prompt_tokens_details=details)
        message = {
            **self._head(message_id),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._used(),
        }
        return encode_event("message_start", {"message": message})

    @override
    def last(self) -> bytes:
        out = self._blocks.close() if self._blocks is not None else b""
        return (
            out
            + encode_event(
                "message_delta", {"delta": self._stop(), "usage": self._used(), **self._edited}
            )
            + _STOP
        )

    def _message_id(self) -> str:
        return "msg_" + self.response_id.removeprefix("chatcmpl-")

    def _head(self, message_id: str) -> dict[str, Any]:
        return {"id": message_id, "type": "message", "role": "assistant", "model": self._model}

    def _content(self, choice: ResponseChoice, message_id: str) -> list[dict[str, Any]]:
        message, content = choice.content_message(), list[dict[str, Any]]()
        if message.reasoning_content:
            thinking = message.reasoning_content if self._shows_thoughts else ""
            content.append({"type": "thinking", "thinking": thinking, "signature": message_id})
        if message.content:
            content.append({"type": "text", "text": message.content})
        calls = ToolCallAssembler()
        calls.take_all(message.tool_calls or ())
        for id_, name, arguments in calls.complete():
            content.append({"type": "tool_use", "id": id_, "name": name, "input": arguments})
        return content

    def _stop(self) -> dict[str, str | None]:
        sequence, made = None, self.usage.completion_tokens
        match self.final.finish_reason:
            case "tool_calls":
                reason = "tool_use"
            case "length":
                # With fewer tokens than requested, the context was full.
                is_full = 0 < made < self._max_tokens
                reason = "model_context_window_exceeded" if is_full else "max_tokens"
            case _:
                sequence = self.final.stop_reason
                reason = "end_turn" if sequence is None else "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": sequence}

    def _used(self) -> dict[str, int]:
        usage = self.usage
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
        }


def model_body(model: ServedModel) -> Json:
    """Return one model."""
    return {
        "type": "model",
        "id": model.name,
        "display_name": model.name,
        "created_at": datetime.fromtimestamp(model.created, UTC).isoformat(),
        "lifecycle": "active",
    }


def model_page(models: Sequence[ServedModel], query: Mapping[str, str]) -> Json:
    """Return the page of the list for `limit`, `after_id` and `before_id`.

    Raises:
        RefusedError: the limit is invalid.

    """
    limit = _limit(query.get("limit"))
    names = [model.name for model in models]
    begin, end = 0, len(models)
    if query.get("after_id") in names:
        begin = names.index(query["after_id"]) + 1
    if query.get("before_id") in names:
        end = names.index(query["before_id"])
        begin = max(begin, end - limit)
    shown = models[begin:end][:limit]
    has_more = begin > 0 if "before_id" in query else begin + len(shown) < end
    return {
        "data": [model_body(model) for model in shown],
        "has_more": has_more,
        "first_id": shown[0].name if shown else None,
        "last_id": shown[-1].name if shown else None,
    }


def _limit(text: str | None) -> int:
    if text is None:
        return _USUAL_LIMIT
    if text.isascii() and text.isdecimal() and 1 <= int(text[:9]) <= _LARGEST_LIMIT:
        return int(text)
    raise invalid(f"'limit' must be a number from 1 to {_LARGEST_LIMIT}.", param="limit")
