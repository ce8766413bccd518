"""Client of a gateway's chat API: sends one request and reads the answer as it streams. Prints nothing."""

import difflib
import os
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp
import msgspec

from fleetctl.chat.conversation import ChatAnswer, Json
from fleetctl.cli.errors import FleetctlError
from identity.dialer import Dial
from insight import process_client
from machinery.clock import Clock
from machinery.http_body import read_limited
from schemas.wire import headers, streams
from schemas.wire.errors import ErrorBody

_CONNECT_S = 5.0
_LIST_S = 10.0
_REFUSAL_LIMIT = 1 << 16
_LIST_LIMIT = 8 << 20
# The largest event: a chunk of text, or a whole answer in one event.
_LINE_LIMIT = 4 << 20


class GatewayUnreachableError(FleetctlError):
    """No connection to a gateway: it has not seen the request, and another one may be asked."""

    def __init__(self, message: str, *, summary: str) -> None:
        """`summary`: which gateway, and why, without a remedy."""
        super().__init__(message)
        self.summary = summary


class KeyRefusedError(FleetctlError):
    """A gateway does not know the API key."""


class GatewayLostError(FleetctlError):
    """A gateway died, or the connection to it broke, before the end of its answer."""

    def __init__(self, message: str, url: str) -> None:
        super().__init__(message)
        self.url = url


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayAccess:
    """URL of a gateway, the API key for it, and the time limit for silence."""

    url: str
    key: str = ""
    dial: Dial = field(default_factory=Dial)
    """TLS arguments of its connections."""
    silence_s: float = 300.0
    """Longest time without data, in seconds."""
    connect_s: float = _CONNECT_S
    """Longest time for a connection, in seconds."""

    def arguments(self) -> dict[str, Any]:
        """Return aiohttp's arguments that authenticate requests and the gateway, and follow no redirect."""
        return {
            "headers": {"authorization": f"Bearer {self.key}"} if self.key else {},
            "ssl": self.dial.ssl,
            "server_hostname": self.dial.server_hostname,
            "allow_redirects": False,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerPiece:
    """A part of an answer: text of the model, or of its reasoning."""

    text: str
    is_reasoning: bool = False


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


class ListedModel(msgspec.Struct, frozen=True):
    """A model of a gateway's list."""

    id: str
    context: int | None = msgspec.field(name="max_model_len", default=None)
    """Its context in tokens; None if the gateway does not know it."""


class _Models(msgspec.Struct):
    data: list[ListedModel]


_DONE = streams.DONE.removeprefix(streams.DATA).rstrip()
_EVENT = msgspec.json.Decoder(_ChunkEvent)


class AnswerStream:
    """One request and its answer; `answer` holds the part that has arrived, also after an interruption."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began_s = clock.monotonic()
        self.answer = ChatAnswer()

    async def read(
        self, access: GatewayAccess, body: Json, show: Callable[[AnswerPiece], None]
    ) -> None:
        """Send the request, and pass each piece of the answer to `show`.

        Raises:
            FleetctlError: the gateway is unreachable, refuses the request, or ends the answer early.

        """
        is_complete = False
        async with _open_session(access) as http:
            url = f"{access.url}/v1/chat/completions"
            async with http.post(url, json=body, **access.arguments()) as response:
                if response.status != 200:
                    raise await _refusal(response, access)
                process_client.watch_peer(response)
                replica = response.headers.get(headers.REPLICA, "")
                node = response.headers.get(headers.NODE, "")
                self.answer = replace(self.answer, replica=replica, node=node)
                async for line in _lines(response.content):
                    if line == _DONE:
                        is_complete = True
                        break
                    self._handle_event(line, show)
        self._note_time()
        if not is_complete:
            raise GatewayLostError(
                f"the gateway at {access.url} ended the answer before its end", access.url
            )

    def _handle_event(self, line: bytes, show: Callable[[AnswerPiece], None]) -> None:
        try:
            event = _EVENT.decode(line)
        except msgspec.DecodeError as error:
            raise FleetctlError(f"the gateway sent an invalid chat event ({error})") from error
        if event.error is not None:
            self._note_time()
            raise FleetctlError(event.error.message)
        if event.usage is not None:
            cached = event.usage.prompt_tokens_details
            self.answer = replace(
                self.answer,
                prompt_tokens=event.usage.prompt_tokens,
                output_tokens=event.usage.completion_tokens,
                cached_tokens=cached.cached_tokens if cached is not None else 0,
            )
        for choice in event.choices:
            if choice.delta.reasoning_content:
                self._note_time()
                show(AnswerPiece(text=choice.delta.reasoning_content, is_reasoning=True))
            if choice.delta.content:
                self._note_time()
                self.answer = replace(self.answer, text=self.answer.text + choice.delta.content)
                show(AnswerPiece(text=choice.delta.content))
            if choice.finish_reason is not None:
                self.answer = replace(self.answer, finish=choice.finish_reason)

    def _note_time(self) -> None:
        """Note the time of the first text, and of the latest."""
        elapsed_s = self._clock.monotonic() - self._began_s
        first_s = elapsed_s if self.answer.first_s is None else self.answer.first_s
        self.answer = replace(self.answer, first_s=first_s, total_s=elapsed_s)


async def list_models(access: GatewayAccess) -> tuple[str, ...]:
    """Return the names of the models that this API key may use, sorted. Raises as `list_models_with_context`."""
    return tuple(model.id for model in await list_models_with_context(access))


async def list_models_with_context(access: GatewayAccess) -> tuple[ListedModel, ...]:
    """Return the models that this API key may use, sorted by name.

    Raises:
        FleetctlError: the gateway is unreachable, or refuses the request.

    """
    async with (
        _open_session(replace(access, silence_s=_LIST_S)) as http,
        http.get(f"{access.url}/v1/models", **access.arguments()) as response,
    ):
        if response.status != 200:
            raise await _refusal(response, access)
        body = await read_limited(response.content.iter_any(), _LIST_LIMIT)
    try:
        models = msgspec.json.decode(body, type=_Models)
    except msgspec.DecodeError as error:
        raise FleetctlError(
            f"{access.url} is not a gateway: it has no valid list of models ({error})"
        ) from error
    return tuple(sorted(models.data, key=lambda model: model.id))


async def ask_once(access: GatewayAccess, path: str, body: Mapping[str, str]) -> ChatAnswer:
    """Return the statistics of a request to a model that generates no text.

    Raises:
        FleetctlError: the gateway is unreachable, or refuses the request.

    """
    async with (
        _open_session(access) as http,
        http.post(f"{access.url}{path}", json=dict(body), **access.arguments()) as response,
    ):
        if response.status != 200:
            raise await _refusal(response, access)
        await read_limited(response.content.iter_any(), _LIST_LIMIT)
        replica = response.headers.get(headers.REPLICA, "")
        return ChatAnswer(replica=replica, node=response.headers.get(headers.NODE, ""))


def unknown_model_text(name: str, known: Sequence[str]) -> str:
    """Return the error message for a model that the gateway does not serve."""
    near = difflib.get_close_matches(name, known, n=1)
    if near:
        return f"no model is named {name}; did you mean {near[0]}?"
    return f"no model is named {name}; available models: {', '.join(known) or 'none yet'}"


@asynccontextmanager
async def _open_session(access: GatewayAccess) -> AsyncIterator[aiohttp.ClientSession]:
    """Open an HTTP session that turns connection errors into FleetctlErrors."""
    timeout = aiohttp.ClientTimeout(
        total=None, sock_connect=access.connect_s, sock_read=access.silence_s
    )
    try:
        async with aiohttp.ClientSession(timeout=timeout) as http:
            yield http
    except aiohttp.ClientConnectorCertificateError as error:
        why = process_client.untrusted_text(error)
        raise GatewayUnreachableError(
            f"the gateway at {access.url} was not asked: {why}",
            summary=f"the gateway at {access.url} was not asked: {why}",
        ) from error
    except aiohttp.ConnectionTimeoutError as error:
        raise _unreachable(access, f"no connection within {access.connect_s:g} s") from error
    except TimeoutError as error:
        raise FleetctlError(
            f"the gateway at {access.url} sent nothing for {access.silence_s:g} s; use --timeout to wait longer"
        ) from error
    except aiohttp.ClientConnectorError as error:
        raise _unreachable(access, _cause(error.os_error)) from error
    except (aiohttp.ClientPayloadError, aiohttp.ClientConnectionError) as error:
        raise GatewayLostError(
            f"the connection to the gateway at {access.url} broke: {_lost_text(error)}", access.url
        ) from error
    except aiohttp.ClientError as error:
        raise FleetctlError(
            f"the connection to the gateway at {access.url} broke: {error}"
        ) from error


def _unreachable(access: GatewayAccess, why: str) -> GatewayUnreachableError:
    return GatewayUnreachableError(
        f"no gateway answers at {access.url} ({why}). Is it running? "
        "Give another address with --gateway or FLEET_GATEWAY",
        summary=f"{access.url} does not answer ({why})",
    )


def _lost_text(error: aiohttp.ClientError) -> str:
    """Return why a connection broke: aiohttp's own words for an early end are about its parser."""
    if isinstance(error, OSError) and error.errno:
        return _cause(error)
    return "it was closed in the middle"


def _cause(error: OSError) -> str:
    """Return the operating system's reason; asyncio's message contains only addresses."""
    if isinstance(error, socket.gaierror) or not error.errno or error.errno < 0:
        return error.strerror or str(error)
    return os.strerror(error.errno)


async def _refusal(response: aiohttp.ClientResponse, access: GatewayAccess) -> FleetctlError:
    """Return the gateway's refusal as an error."""
    refused = ErrorBody.parse(await read_limited(response.content.iter_any(), _REFUSAL_LIMIT))
    if refused is not None:
        message = refused.message
    else:
        message = f"{access.url} answers {response.status} {response.reason}; is it a gateway?"
    if response.status == 401:
        return KeyRefusedError(
            f"{message.rstrip('.')}. Set FLEET_API_KEY, or give the key's file with --api-key-file"
        )
    return FleetctlError(message)


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yield the data of each event; skip comments."""
    rest = b""
    async for piece in content.iter_any():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line.removeprefix(b"data:").strip()
        if len(rest) > _LINE_LIMIT:
            raise FleetctlError(f"the gateway sent an event of more than {_LINE_LIMIT} bytes")
