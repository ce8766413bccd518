"""Engines' answers in OpenAI's words, as far as translations need them. Pure.

One answer as its engine tells it, for translations: what was said, and whether that was all. Does no I/O.
"""

from collections.abc import Iterable, Iterator
from typing import Final, Literal, TypeAlias

import msgspec
import orjson

DONE = b"[DONE]"


class FunctionPiece(msgspec.Struct):
    """What is called, or a piece of it."""

    name: str | None = None
    arguments: str | None = None


class ToolCallPiece(msgspec.Struct):
    """A call, or a piece of one: only its first piece has the id and the name."""

    function: FunctionPiece
    index: int = 0
    id: str | None = None


class MessagePiece(msgspec.Struct):
    """A message, or what a chunk adds to one."""

    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallPiece] | None = None


class ChatLogprobs(msgspec.Struct):
    """Of a chat's tokens."""

    content: msgspec.Raw = msgspec.Raw()


class ResponseChoice(msgspec.Struct):
    """One answer; translations ask for one only."""

    delta: MessagePiece | None = None
    message: MessagePiece | None = None
    text: str | None = None
    """Of completions."""
    finish_reason: str | None = None
    stop_reason: str | None = None
    """The stop word that ended it, if one did."""
    logprobs: ChatLogprobs | None = None

    def said(self) -> MessagePiece:
        """Return what it says, whichever endpoint and form it came in."""
        return self.delta or self.message or MessagePiece(content=self.text)


class PromptTokenDetails(msgspec.Struct):
    """What of a prompt had been read before."""

    cached_tokens: int = 0


class ResponseUsage(msgspec.Struct):
    """What a request cost."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: PromptTokenDetails | None = None

    @property
    def cached_tokens(self) -> int:
        """How many of the prompt's tokens were in a cache."""
        return self.prompt_tokens_details.cached_tokens if self.prompt_tokens_details else 0


class EnginePerformance(msgspec.Struct):
    """The engine's own measurement, in seconds and tokens a second; None where there was nothing to measure."""

    queue_s: float | None = None
    prefill_s: float | None = None
    decode_tokens_per_s: float | None = None


class EngineError(msgspec.Struct):
    """Why a stream goes no further."""

    message: str = "The engine failed."
    code: str | None = None


class EngineResponse(msgspec.Struct):
    """A whole answer, or one chunk of a stream."""

    id: str = ""
    choices: list[ResponseChoice] = []
    usage: ResponseUsage | None = None
    performance: EnginePerformance | None = None
    error: EngineError | None = None


class ErrorBody(msgspec.Struct):
    """The body of a refusal."""

    error: EngineError


_RESPONSE_DECODER = msgspec.json.Decoder(EngineResponse)
_ERROR_DECODER = msgspec.json.Decoder(ErrorBody)


def event_payloads(data: bytes) -> list[bytes]:
    """Return what whole events carry; comments carry nothing."""
    return [line[5:].strip() for line in data.splitlines() if line.startswith(b"data:")]


def parse_response(payload: bytes) -> EngineResponse:
    """Return a body or a chunk; one that is none is a fault of the engine's."""
    try:
        return _RESPONSE_DECODER.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return EngineResponse(
            error=EngineError(message=f"The engine's answer makes no sense: {error}")
        )


def error_message(body: bytes) -> str:
    """Return a refusal's message, whoever refused."""
    try:
        return _ERROR_DECODER.decode(body).error.message
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return body[:1000].decode(errors="replace")


class ToolCallAssembler:
    """Joins the pieces of calls."""

    def __init__(self) -> None:
        self._calls: dict[int, tuple[str, str, list[str]]] = {}

    def take(self, pieces: Iterable[ToolCallPiece]) -> None:
        """Take the next pieces of a stream."""
        for piece in pieces:
            self._take(piece.index, piece)

    def take_all(self, calls: Iterable[ToolCallPiece]) -> None:
        """Take complete calls, whose indexes mean nothing."""
        for index, call in enumerate(calls):
            self._take(index, call)

    def _take(self, index: int, piece: ToolCallPiece) -> None:
        if index not in self._calls:
            self._calls[index] = (piece.id or "", piece.function.name or "", [])
        self._calls[index][2].append(piece.function.arguments or "")

    def complete(self) -> list[tuple[str, str, dict[str, object]]]:
        """Return id, name and arguments of all; one that was cut off is left out: it asks for something else."""
        found = []
        for id_, name, pieces in self._calls.values():
            try:
                arguments = orjson.loads("".join(pieces) or "{}")
            except orjson.JSONDecodeError:
                continue
            if isinstance(arguments, dict):
                found.append((id_, name, arguments))
        return found


COMPLETE: Final = "complete"
ResponsePiece: TypeAlias = ResponseChoice | EngineError | Literal["complete"]
"""Something that is said; why there is no more of it; that it was all."""


class ResponseReader:
    """What was heard of one answer so far."""

    def __init__(self) -> None:
        self.id = ""
        self.last = ResponseChoice()
        """The one that said why it ended."""
        self.usage = ResponseUsage()
        self.performance = EnginePerformance()
        self.is_over = False
        """Nothing more is told: it is complete, or will never be."""

    def whole(self, body: bytes) -> ResponseChoice | EngineError:
        """Return what an answer says that was not streamed."""
        answer = parse_response(body)
        self._note(answer)
        if answer.error is not None or not answer.choices:
            return answer.error or EngineError()
        return answer.choices[0]

    def pieces(self, payloads: Iterable[bytes]) -> Iterator[ResponsePiece]:
        """Return what the events of a stream say, up to its end."""
        for payload in payloads:
            if self.is_over:
                return
            piece = self._piece(payload)
            if piece is not None:
                yield piece

    def cut(self) -> EngineError:
        """Have it be over, although it is not complete."""
        self.is_over = True
        return EngineError(message="The engine's stream ended before the answer did.")

    def _piece(self, payload: bytes) -> ResponsePiece | None:
        if payload == DONE:
            if self.last.finish_reason is None:
                return self.cut()
            self.is_over = True
            return COMPLETE
        answer = parse_response(payload)
        if answer.error is not None:
            self.is_over = True
            return answer.error
        self._note(answer)
        return answer.choices[0] if answer.choices else None

    def _note(self, answer: EngineResponse) -> None:
        self.id = answer.id or self.id
        self.usage = answer.usage or self.usage
        self.performance = answer.performance or self.performance
        if answer.choices and answer.choices[0].finish_reason is not None:
            self.last = answer.choices[0]
