"""Asks a gateway and reads its answer as it comes. Keeps no conversation, prints nothing."""

import difflib
import os
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import aiohttp
import msgspec

from fleetctl.chat.conversation import ChatAnswer, Json
from fleetctl.cli.errors import FleetctlError
from machinery.clock import Clock

_CONNECT_S = 5.0
_LIST_S = 10.0
_REFUSAL_LIMIT = 1 << 16
_LIST_LIMIT = 8 << 20
# One event: a chunk of text, or an answer that came at once.
_LINE_LIMIT = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayAccess:
    """Where a gateway is, and what lets us in."""

    url: str
    key: str = ""
    silence_s: float = 300.0
    """How long it may say nothing."""

    def headers(self) -> dict[str, str]:
        """Return what says who we are."""
        return {"authorization": f"Bearer {self.key}"} if self.key else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerPiece:
    """Some words of an answer: what the model says, or what it thinks."""

    text: str
    is_thought: bool = False


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _ChunkChoice(msgspec.Struct):
    delta: _Delta = msgspec.field(default_factory=_Delta)
    finish_reason: str | None = None


class _Cached(msgspec.Struct):
    cached_tokens: int = 0


class _ChunkUsage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Cached | None = None


class _Error(msgspec.Struct):
    message: str


class _ChunkEvent(msgspec.Struct):
    choices: list[_ChunkChoice] = []
    usage: _ChunkUsage | None = None
    error: _Error | None = None


class _Refusal(msgspec.Struct):
    error: _Error


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


_EVENT = msgspec.json.Decoder(_ChunkEvent)


class AnswerStream:
    """One question's way to its answer; `told` is what came of it so far, also after an interruption."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began_s = clock.monotonic()
        self.told = ChatAnswer()

    async def read(
        self, door: GatewayAccess, body: Json, show: Callable[[AnswerPiece], None]
    ) -> None:
        """Ask, and show each piece as it comes.

        Raises:
            FleetctlError: nobody answers, the request is refused, or the answer broke off.

        """
        is_ended = False
        async with _open_session(door) as http:
            url = f"{door.url}/v1/chat/completions"
            async with http.post(
                url, json=body, headers=door.headers(), allow_redirects=False
            ) as response:
                if response.status != 200:
                    raise await _refusal(response, door)
                replica = response.headers.get("x-fleet-replica", "")
                node = response.headers.get("x-fleet-node", "")
                self.told = replace(self.told, replica=replica, node=node)
                async for line in _lines(response.content):
                    if line == b"[DONE]":
                        is_ended = True
                        break
                    self._take(line, show)
        self._stop()
        if not is_ended:
            raise FleetctlError("the answer broke off before its end; ask again")

    def _take(self, line: bytes, show: Callable[[AnswerPiece], None]) -> None:
        try:
            event = _EVENT.decode(line)
        except msgspec.DecodeError as error:
            raise FleetctlError(f"what the gateway sends is no chat ({error})") from error
        if event.error is not None:
            self._stop()
            raise FleetctlError(event.error.message)
        if event.usage is not None:
            self._use(event.usage)
        for choice in event.choices:
            if choice.delta.reasoning_content:
                self._stop()
                show(AnswerPiece(text=choice.delta.reasoning_content, is_thought=True))
            if choice.delta.content:
                self._stop()
                self.told = replace(self.told, text=self.told.text + choice.delta.content)
                show(AnswerPiece(text=choice.delta.content))
            if choice.finish_reason is not None:
                self.told = replace(self.told, finish=choice.finish_reason)

    def _stop(self) -> None:
        """Note the time: of the first words, and of the last ones until there are more."""
        spent_s = self._clock.monotonic() - self._began_s
        first_s = spent_s if self.told.first_s is None else self.told.first_s
        self.told = replace(self.told, first_s=first_s, whole_s=spent_s)

    def _use(self, usage: _ChunkUsage) -> None:
        cached = usage.prompt_tokens_details
        self.told = replace(
            self.told,
            prompt_tokens=usage.prompt_tokens,
            output_tokens=usage.completion_tokens,
            cached_tokens=cached.cached_tokens if cached is not None else 0,
        )


async def list_models(door: GatewayAccess) -> tuple[str, ...]:
    """Return the names that the gateway serves to whoever we are.

    Raises:
        FleetctlError: nobody answers, or we may not know.

    """
    async with (
        _open_session(replace(door, silence_s=_LIST_S)) as http,
        http.get(
            f"{door.url}/v1/models", headers=door.headers(), allow_redirects=False
        ) as response,
    ):
        if response.status != 200:
            raise await _refusal(response, door)
        body = await _read_limited(response, _LIST_LIMIT)
    try:
        found = msgspec.json.decode(body, type=_Models)
    except msgspec.DecodeError as error:
        raise FleetctlError(
            f"{door.url} is no gateway: its list of models is none ({error})"
        ) from error
    return tuple(sorted(model.id for model in found.data))


def unknown_model_text(name: str, known: Sequence[str]) -> str:
    """Return the refusal of a name that the gateway does not serve."""
    near = difflib.get_close_matches(name, known, n=1)
    if near:
        return f"no model is called {name}; did you mean {near[0]}?"
    return f"no model is called {name}; there are: {', '.join(known) or 'none yet'}"


@asynccontextmanager
async def _open_session(door: GatewayAccess) -> AsyncIterator[aiohttp.ClientSession]:
    """Open a session whose failures are said in our words."""
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=door.silence_s)
    try:
        async with aiohttp.ClientSession(timeout=timeout) as http:
            yield http
    except aiohttp.ConnectionTimeoutError as error:
        raise FleetctlError(
            _unreachable_text(door, f"no connection within {_CONNECT_S:g} s")
        ) from error
    except TimeoutError as error:
        raise FleetctlError(
            f"the gateway at {door.url} said nothing for {door.silence_s:g} s; --timeout waits longer"
        ) from error
    except aiohttp.ClientConnectorError as error:
        raise FleetctlError(_unreachable_text(door, _cause(error.os_error))) from error
    except aiohttp.ClientError as error:
        raise FleetctlError(
            f"the connection to the gateway at {door.url} broke: {error}"
        ) from error


def _unreachable_text(door: GatewayAccess, why: str) -> str:
    return (
        f"no gateway answers at {door.url} ({why}). Is it running? "
        "Say where one is with --gateway or FLEET_GATEWAY"
    )


def _cause(error: OSError) -> str:
    """Return the system's own words: asyncio puts addresses in their place."""
    if isinstance(error, socket.gaierror) or not error.errno or error.errno < 0:
        return error.strerror or str(error)
    return os.strerror(error.errno)


async def _refusal(response: aiohttp.ClientResponse, door: GatewayAccess) -> FleetctlError:
    """Return what the gateway says against the request, in its own words."""
    body = await _read_limited(response, _REFUSAL_LIMIT)
    try:
        said = msgspec.json.decode(body, type=_Refusal).error.message
    except msgspec.DecodeError:
        said = f"{door.url} answers {response.status} {response.reason}; is it a gateway?"
    if response.status == 401:
        said = f"{said.rstrip('.')}. Give it in FLEET_API_KEY, or its file with --api-key-file"
    return FleetctlError(said)


async def _read_limited(response: aiohttp.ClientResponse, limit: int) -> bytes:
    body = bytearray()
    async for piece in response.content.iter_any():
        body += piece
        if len(body) > limit:
            raise aiohttp.ClientPayloadError(f"its answer is larger than {limit} bytes")
    return bytes(body)


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yield what events carry; comments are passed by."""
    kept = b""
    async for piece in content.iter_any():
        *lines, kept = (kept + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line.removeprefix(b"data:").strip()
        if len(kept) > _LINE_LIMIT:
            raise aiohttp.ClientPayloadError(f"an event is larger than {_LINE_LIMIT} bytes")
