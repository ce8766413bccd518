"""Responses of engines in OpenAI's format, parsed as far as translators need them. Pure."""

from collections.abc import Iterable

import msgspec
import orjson
from typing_extensions import override

from gateway.apis.adapter import ResponseTranslator
from gateway.upstream.call import Headers
from schemas.wire.errors import Refusal

DONE = b"[DONE]"


class FunctionPiece(msgspec.Struct):
    """The function of a call, or a piece of it."""

    name: str | None = None
    arguments: str | None = None


class ToolCallPiece(msgspec.Struct):
    """A tool call, or a piece of one: only the first piece has the id and the name."""

    function: FunctionPiece
    index: int = 0
    id: str | None = None


class MessagePiece(msgspec.Struct):
    """A message, or the delta of a chunk."""

    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallPiece] | None = None


class ChatLogprobs(msgspec.Struct):
    """Logprobs of a chat."""

    content: msgspec.Raw = msgspec.Raw()


class ResponseChoice(msgspec.Struct):
    """One choice; translators ask for one only."""

    delta: MessagePiece | None = None
    message: MessagePiece | None = None
    text: str | None = None
    """Set in completions."""
    finish_reason: str | None = None
    stop_reason: str | None = None
    """The stop word that ended the answer, if one did."""
    logprobs: ChatLogprobs | None = None

    def content_message(self) -> MessagePiece:
        """Return the message, from either endpoint, streamed or not."""
        return self.delta or self.message or MessagePiece(content=self.text)


class PromptTokenDetails(msgspec.Struct):
    """The cached part of a prompt."""

    cached_tokens: int = 0


class ResponseUsage(msgspec.Struct):
    """Token counts of a response."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: PromptTokenDetails | None = None

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were in a cache."""
        return self.prompt_tokens_details.cached_tokens if self.prompt_tokens_details else 0


class EnginePerformance(msgspec.Struct):
    """The engine's measurements in seconds and tokens per second; None if there was nothing to measure."""

    queue_s: float | None = None
    prefill_s: float | None = None
    decode_tokens_per_s: float | None = None


class EngineError(msgspec.Struct):
    """The error that ends a response."""

    message: str = "The engine failed."
    code: str | None = None


class EngineResponse(msgspec.Struct):
    """A complete response, or one chunk of a stream."""

    id: str = ""
    choices: list[ResponseChoice] = []
    usage: ResponseUsage | None = None
    performance: EnginePerformance | None = None
    error: EngineError | None = None


class ErrorBody(msgspec.Struct):
    """The body of an error."""

    error: EngineError


_RESPONSE_DECODER = msgspec.json.Decoder(EngineResponse)
_ERROR_DECODER = msgspec.json.Decoder(ErrorBody)


def event_payloads(data: bytes) -> list[bytes]:
    """Return the data of complete events; comments have none."""
    return [line[5:].strip() for line in data.splitlines() if line.startswith(b"data:")]


def parse_response(payload: bytes) -> EngineResponse:
    """Return a parsed body or chunk; invalid data becomes an error of the engine."""
    try:
        return _RESPONSE_DECODER.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return EngineResponse(
            error=EngineError(message=f"The engine's response is invalid: {error}")
        )


def error_message(body: bytes) -> str:
    """Return the message of an error body."""
    try:
        return _ERROR_DECODER.decode(body).error.message
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return body[:1000].decode(errors="replace")


class ToolCallAssembler:
    """Assembles tool calls from their pieces."""

    def __init__(self) -> None:
        self._calls: dict[int, tuple[str, str, list[str]]] = {}

    def take(self, pieces: Iterable[ToolCallPiece]) -> None:
        """Add the next pieces of a stream."""
        for piece in pieces:
            self._take(piece.index, piece)

    def take_all(self, calls: Iterable[ToolCallPiece]) -> None:
        """Add complete calls, whose indexes are ignored."""
        for index, call in enumerate(calls):
            self._take(index, call)

    def _take(self, index: int, piece: ToolCallPiece) -> None:
        if index not in self._calls:
            self._calls[index] = (piece.id or "", piece.function.name or "", [])
        self._calls[index][2].append(piece.function.arguments or "")

    def complete(self) -> list[tuple[str, str, dict[str, object]]]:
        """Return id, name and arguments of all calls.

        A truncated call is left out, because it would mean something else.
        """
        found = []
        for id_, name, pieces in self._calls.values():
            try:
                arguments = orjson.loads("".join(pieces) or "{}")
            except orjson.JSONDecodeError:
                continue
            if isinstance(arguments, dict):
                found.append((id_, name, arguments))
        return found


class AnswerTranslator(ResponseTranslator):
    """Translates one response with text, complete or streamed, into another API's.

    The class after it in the order of bases translates errors.
    """

    keep_alive: bytes = b""
    """Stands for a comment of the engine, which means that the request is in progress."""

    def __init__(self) -> None:
        self.response_id = ""
        self.final = ResponseChoice()
        """The choice with the finish reason."""
        self.usage = ResponseUsage()
        self.performance = EnginePerformance()
        self.is_over = False
        """True after the end or an error."""

    def message(self, choice: ResponseChoice) -> bytes:
        """Return the body of a response that was not streamed."""
        raise NotImplementedError

    def piece(self, choice: ResponseChoice) -> bytes:
        """Return the events for a piece of a stream."""
        raise NotImplementedError

    def last(self) -> bytes:
        """Return the events at the end of a complete stream."""
        raise NotImplementedError

    def failure(self, error: EngineError) -> bytes:
        """Return the events for a failure of the engine."""
        raise NotImplementedError

    @override
    def whole(self, status: int, headers: Headers, body: bytes) -> tuple[int, Headers, bytes]:
        if status != 200:
            return super().whole(status, headers, body)
        answer = parse_response(body)
        self._note(answer)
        if answer.error is not None or not answer.choices:
            error = {"message": (answer.error or EngineError()).message}
            return super().whole(502, headers, orjson.dumps({"error": error}))
        return 200, headers, self.message(answer.choices[0])

    @override
    def events(self, data: bytes) -> bytes:
        payloads = event_payloads(data)
        if not payloads:
            return b"" if self.is_over else self.keep_alive
        return b"".join(self._event(payload) for payload in payloads if not self.is_over)

    def _event(self, payload: bytes) -> bytes:
        if payload == DONE:
            if self.final.finish_reason is None:
                return self.end()
            self.is_over = True
            return self.last()
        answer = parse_response(payload)
        if answer.error is not None:
            self.is_over = True
            return self.failure(answer.error)
        self._note(answer)
        return self.piece(answer.choices[0]) if answer.choices else b""

    def _note(self, answer: EngineResponse) -> None:
        self.response_id = answer.id or self.response_id
        self.usage = answer.usage or self.usage
        self.performance = answer.performance or self.performance
        if answer.choices and answer.choices[0].finish_reason is not None:
            self.final = answer.choices[0]

    @override
    def end(self) -> bytes:
        if self.is_over:
            return b""
        self.is_over = True
        return self.failure(EngineError(message="The engine's stream ended before the answer did."))

    @override
    def broken(self, refusal: Refusal) -> bytes:
        return b"" if self.is_over else super().broken(refusal)
