"""Engines' answers in OpenAI's words, as far as translations need them. Pure."""

from collections.abc import Iterable

import msgspec
import orjson

DONE = b"[DONE]"


class Function(msgspec.Struct):
    """What is called, or a piece of it."""

    name: str | None = None
    arguments: str | None = None


class Call(msgspec.Struct):
    """A call, or a piece of one: only its first piece has the id and the name."""

    function: Function
    index: int = 0
    id: str | None = None


class Said(msgspec.Struct):
    """A message, or what a chunk adds to one."""

    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Call] | None = None


class Likelihoods(msgspec.Struct):
    """Of a chat's tokens."""

    content: msgspec.Raw = msgspec.Raw()


class Choice(msgspec.Struct):
    """One answer; translations ask for one only."""

    delta: Said | None = None
    message: Said | None = None
    text: str | None = None
    """Of completions."""
    finish_reason: str | None = None
    stop_reason: str | None = None
    """The stop word that ended it, if one did."""
    logprobs: Likelihoods | None = None

    def said(self) -> Said:
        """Return what it says, whichever endpoint and form it came in."""
        return self.delta or self.message or Said(content=self.text)


class Cached(msgspec.Struct):
    """What of a prompt had been read before."""

    cached_tokens: int = 0


class Usage(msgspec.Struct):
    """What a request cost."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: Cached | None = None

    @property
    def cached_tokens(self) -> int:
        """How many of the prompt's tokens were in a cache."""
        return self.prompt_tokens_details.cached_tokens if self.prompt_tokens_details else 0


class Performance(msgspec.Struct):
    """The engine's own measurement, in seconds and tokens a second; None where there was nothing to measure."""

    queue_s: float | None = None
    prefill_s: float | None = None
    decode_tokens_per_s: float | None = None


class Fault(msgspec.Struct):
    """Why a stream goes no further."""

    message: str = "The engine failed."
    code: str | None = None


class Answer(msgspec.Struct):
    """A whole answer, or one chunk of a stream."""

    id: str = ""
    choices: list[Choice] = []
    usage: Usage | None = None
    performance: Performance | None = None
    error: Fault | None = None


class Refused(msgspec.Struct):
    """The body of a refusal."""

    error: Fault


_ANSWER = msgspec.json.Decoder(Answer)
_REFUSED = msgspec.json.Decoder(Refused)


def payloads(data: bytes) -> list[bytes]:
    """Return what whole events carry; comments carry nothing."""
    return [line[5:].strip() for line in data.splitlines() if line.startswith(b"data:")]


def read(payload: bytes) -> Answer:
    """Return a body or a chunk; one that is none is a fault of the engine's."""
    try:
        return _ANSWER.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return Answer(error=Fault(message=f"The engine's answer makes no sense: {error}"))


def reason(body: bytes) -> str:
    """Return a refusal's message, whoever refused."""
    try:
        return _REFUSED.decode(body).error.message
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return body[:1000].decode(errors="replace")


class Calls:
    """Joins the pieces of calls."""

    def __init__(self) -> None:
        self._calls: dict[int, tuple[str, str, list[str]]] = {}

    def take(self, pieces: Iterable[Call]) -> None:
        """Take the next pieces of a stream."""
        for piece in pieces:
            self._take(piece.index, piece)

    def take_all(self, calls: Iterable[Call]) -> None:
        """Take complete calls, whose indexes mean nothing."""
        for index, call in enumerate(calls):
            self._take(index, call)

    def _take(self, index: int, piece: Call) -> None:
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
