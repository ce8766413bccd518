"""Nothing that a client sends decides how long the gateway serves nobody else: 8 MiB of each element that may repeat.

A stall is the processor time that the gateway takes while one `GET /health/live` waits: other work of a busy machine is
not in it.
"""

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator, Sequence
from itertools import count
from pathlib import Path

import pytest

from tests.support.gateway_raw_stand import LAST, Stand, post, running_stand

_SIZE = 8 << 20
_STALL_S = 0.3
_KEY = "sk-fleet-good"
_AUTHORIZATION = b"authorization: Bearer %b" % _KEY.encode()
_LIVE = b"GET /health/live HTTP/1.1\r\nhost: localhost\r\n\r\n"
_CHAT = b'{"model":"m","max_tokens":1,"messages":['
_TEXT = b'{"type":"text","text":"x"}'
_URL = b'{"type":"image_url","image_url":{"url":"data:image/png;base64,AA=="}}'
_IMAGE = b'{"type":"image","source":{"type":"base64","media_type":"image/png","data":"AA=="}}'
_USE = b'{"type":"tool_use","id":"%d","name":"f","input":{}}'
_RESULT = b'{"type":"tool_result","tool_use_id":"%d","content":"x"}'
_CALL = b'{"id":"%d","type":"function","function":{"name":"f","arguments":"{}"}}'
_OLLAMA_CALL = b'{"id":"%d","function":{"name":"f","arguments":{}}}'
_TOOL = b'{"type":"function","function":{"name":"f","parameters":{}}}'
_TURN = b'{"role":"assistant","content":[%b]},{"role":"user","content":[%b]}' % (_USE, _RESULT)


def filled(before: bytes, element: bytes, after: bytes, size: int = _SIZE) -> bytes:
    """Return a body with as many elements as there is room for; `%d` in one is its number."""
    room, elements = size - len(before) - len(after), list[bytes]()
    for number in count():
        one = element.replace(b"%d", b"%d" % number)
        room -= len(one) + 1
        if room < 0:
            return before + b",".join(elements) + after
        elements.append(one)
    raise AssertionError


def _user(element: bytes) -> tuple[bytes, bytes, bytes]:
    return _CHAT + b'{"role":"user","content":[', element, b"]}]}"


_PLAIN = (_CHAT, b'{"role":"user","content":"x"}', b"]}")
_TOOLS = _CHAT + b'{"role":"user","content":"x"}],"tools":['
_ALL_OF_CHATS = {
    "messages": _PLAIN,
    "parts": _user(_TEXT),
    "images": _user(_URL),
    "tools": (_TOOLS, _TOOL, b"]}"),
    "calls": (_CHAT + b'{"role":"assistant","tool_calls":[', _CALL, b"]}]}"),
    "results": (_CHAT, b'{"role":"tool","tool_call_id":"%d","content":"x"}', b"]}"),
    "stops": (_CHAT + b'],"stop":[', b'"x"', b"]}"),
    "members": (_CHAT + b"]," + b'"n":1,', b'"x%d":0', b"}"),
    "sessions": (b'{"model":"m","session_id":[', b"[]", b"]}"),
    "conversations": (b'{"model":"m","conversation":[', b"{}", b"]}"),
    "salts": (b'{"model":"m","cache_salt":[', b"[]", b"]}"),
    "model names": (b'{"model":[', b"[]", b"]}"),
    "names twice": (b"{", b'"model":"alias"', b"}"),
    "renamed": (b'{"model":"alias","model":"alias",', b'"x%d":0', b"}"),
    "unnamed": (b"{", b'"x%d":0', b"}"),
}
_PROMPTS = {
    "prompts": (b'{"model":"m","prompt":[', b'"x"', b"]}"),
    "tokens": (b'{"model":"m","prompt":[', b"1", b"]}"),
    "lists of tokens": (b'{"model":"m","prompt":[', b"[1]", b"]}"),
}
_INPUTS = {
    "inputs": (b'{"model":"m","input":[', b'"x"', b"]}"),
    "lists of inputs": (b'{"model":"m","input":[', b"[]", b"]}"),
}
_MESSAGES = {
    "messages": _PLAIN,
    "turns": (_CHAT, b'{"role":"user","content":"x"},{"role":"assistant","content":"x"}', b"]}"),
    "blocks": _user(_TEXT),
    "empty blocks": _user(b"{}"),
    "messages without blocks": (_CHAT, b'{"role":"user","content":[]}', b"]}"),
    "images": _user(_IMAGE),
    "calls": (_CHAT + b'{"role":"assistant","content":[', _USE, b"]}]}"),
    "calls and results": (_CHAT, _TURN, b"]}"),
    "inputs of a call": _user(b'{"type":"tool_use","input":{"x":[[],{}]}}'),
    "tools": (_CHAT + b'],"tools":[', b'{"name":"f","input_schema":{}}', b"]}"),
    "stops": (_CHAT + b'],"stop_sequences":[', b'"x"', b"]}"),
    "commas in texts": (_CHAT + b'],"stop_sequences":[', b'",{["', b"]}"),
    "system": (_CHAT + b'],"system":[', _TEXT, b"]}"),
    "members": (_CHAT + b"],", b'"x%d":0', b"}"),
}
_BODIES: dict[str, dict[str, tuple[bytes, bytes, bytes]]] = {
    "/v1/chat/completions": _ALL_OF_CHATS,
    "/v1/completions": _PROMPTS,
    "/v1/embeddings": _INPUTS,
    "/v1/responses": {
        **_INPUTS,
        "items": (b'{"model":"m","input":[', b'{"role":"user","content":"x"}', b"]}"),
        "tools": (b'{"model":"m","input":"x","tools":[', b'{"type":"function","name":"f"}', b"]}"),
    },
    "/v1/messages": _MESSAGES,
    "/v1/messages/count_tokens": {"messages": _PLAIN, "blocks": _user(_TEXT)},
    "/api/chat": {
        "messages": _PLAIN,
        "images": (b'{"model":"m","messages":[{"role":"user","images":[', b'"AA=="', b"]}]}"),
        "tools": (_TOOLS, _TOOL, b"]}"),
        "calls": (_CHAT + b'{"role":"assistant","tool_calls":[', _OLLAMA_CALL, b"]}]}"),
        "options": (b'{"model":"m","options":{', b'"x%d":0', b"}}"),
        "marks in a name": (b'{"', b"`" * 1000, b'":0}'),
    },
    "/api/generate": {
        "images": (b'{"model":"m","prompt":"x","images":[', b'"AA=="', b"]}"),
        "context": (b'{"model":"m","prompt":"x","context":[', b"1", b"]}"),
        "empty": (b'{"model":"m","images":[', b"[]", b"]}"),
    },
    "/api/embed": _INPUTS,
    "/infill": {
        "files": (b'{"model":"m","input_prefix":"x","input_extra":[', b'{"text":"x"}', b"]}"),
        "others": (b'{"model":"m","input_prefix":"x",', b'"x%d":0', b"}"),
        "lists": (b'{"model":"m","input_prefix":"x","samplers":[', b"[]", b"]}"),
    },
    "/tokenize": _PROMPTS,
    "/v1/rerank": {"documents": (b'{"model":"m","query":"x","documents":[', b'"x"', b"]}")},
    "/v1/score": {"texts": (b'{"model":"m","text_1":"x","text_2":[', b'"x"', b"]}")},
}


def _frame(opcode: int, payload: bytes) -> bytes:
    """Return one frame of a client, whose mask is zero."""
    size = len(payload)
    if size < 126:
        return struct.pack("!BBI", opcode, 0x80 | size, 0) + payload
    return struct.pack("!BBQI", opcode, 0xFF, size, 0) + payload


_HANDSHAKE = (
    b"GET /v1/ws/chat/completions HTTP/1.1\r\nhost: localhost\r\nupgrade: websocket\r\nconnection: Upgrade\r\n"
    b"%b\r\nsec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
    % _AUTHORIZATION
)
_ASK = b'{"id":"%d","request":{"model":"none"}}'


def _repeated(element: bytes, size: int = 1 << 20) -> bytes:
    """Return what is several reads of a connection: the gateway serves others between two of them."""
    return element * (size // len(element))


_FORM = b"multipart/form-data; boundary=x"
_FILE = b'--x\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n%b\r\n--x--\r\n'
_CHUNKED = b"POST %b HTTP/1.1\r\nhost: localhost\r\n%b\r\ncontent-type: %b\r\ntransfer-encoding: chunked\r\n\r\n"


def _upload(body: bytes, kind: bytes = _FORM) -> bytes:
    head = b"POST /v1/files HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n%b\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n"
    return head % (_AUTHORIZATION, kind, len(body)) + body


def _purpose(text: bytes) -> bytes:
    return b'--x\r\ncontent-disposition: form-data; name="purpose"\r\n\r\n%b\r\n--x--\r\n' % text


_LINE = b'{"custom_id":"%d","method":"POST","url":"/v1/chat/completions","body":{"model":"m","messages":[]}}'
_END = _frame(0x88, b"")
_RAW: dict[str, list[bytes]] = {
    "pipelined requests": [_repeated(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n\r\n")],
    "pipelined requests with bodies": [_repeated(post(b"{}", _AUTHORIZATION)), LAST],
    "pipelined others": [_repeated(_LIVE), LAST],
    "upgrades": [_repeated(_LIVE[:-2] + b"upgrade: x\r\nconnection: upgrade\r\n\r\n"), LAST],
    "chunks": [
        _CHUNKED % (b"/v1/completions", _AUTHORIZATION, b"application/json"),
        _repeated(b"1\r\n \r\n"),
        b"0\r\n\r\n", LAST,
    ],
    "chunks of others": [
        _CHUNKED % (b"/v1/files", _AUTHORIZATION, _FORM),
        _repeated(b"1\r\n-\r\n"),
        b"0\r\n\r\n", LAST,
    ],
    "headers": [b"POST /v1/completions HTTP/1.1\r\n", _repeated(b"a: b\r\n")],
    "codecs": [_upload(_purpose(b"-" + b"b" * 200_000), _FORM + b"; charset=punycode")],
    "fields": [_upload(_repeated(_purpose(b"x").removesuffix(b"--\r\n") + b"\r\n"))],
    "a long field": [_upload(_purpose(b"x" * _SIZE))],
    "ends of parts": [_upload(_FILE % _repeated(b"\r\n--", _SIZE))],
    "lines": [_upload(_FILE % filled(b"", _LINE, b"").replace(b"},{", b"}\n{"))],
    "a message of a socket": [_HANDSHAKE, _frame(0x81, filled(b'{"id":"1","request":', b"[]", b"}")), _END],
    "elements of a socket": [
        _HANDSHAKE,
        _frame(0x81, b'{"id":"1","request":%b}' % filled(*_ALL_OF_CHATS["members"], _SIZE - 50)), _END],
    "messages of a socket": [_HANDSHAKE, _repeated(_frame(0x81, b"{}")), _END],
    "requests of a socket": [_HANDSHAKE, _repeated(_frame(0x81, _ASK)), _END],
    "pings": [_HANDSHAKE, _repeated(_frame(0x89, b"")), _END],
    "fragments": [_HANDSHAKE, _frame(0x01, b" "), _repeated(_frame(0x00, b" ")), _END],
    "ids of a socket": [_HANDSHAKE, _frame(0x81, filled(b"{", b'"id":"1"', b"}")), _END],
}  # fmt: skip


@pytest.fixture(scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stand]:
    """A gateway that requires keys and keeps files and batches."""
    folder: Path = tmp_path_factory.mktemp("loop")
    async with running_stand(folder, "--state-dir", str(folder / "state"), key=_KEY) as made:
        yield made


async def attack(stand: Stand, pieces: Sequence[bytes]) -> None:
    """Send the pieces on one connection, and read what comes until its end."""

    async def read(reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(60):
                while await reader.read(1 << 16):
                    pass

    async with stand.connection() as (reader, writer), asyncio.TaskGroup() as group:
        if pieces[0] is _HANDSHAKE:
            writer.write(_HANDSHAKE)
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101")
            pieces = pieces[1:]
        group.create_task(read(reader))
        with contextlib.suppress(ConnectionError):
            for piece in pieces:
                writer.write(piece)
                await writer.drain()


async def worst_stall_s(stand: Stand, pieces: Sequence[bytes]) -> float:
    """Attack; return the processor time that the gateway took while one request of another client waited."""
    worst_s = 0.0
    async with stand.connection() as (reader, writer), asyncio.TaskGroup() as group:
        attacking = group.create_task(attack(stand, pieces))
        while not attacking.done():
            before_s = sum(stand.process.cpu_times()[:2])
            writer.write(_LIVE)
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
            await reader.readuntil(b"}")
            worst_s = max(worst_s, sum(stand.process.cpu_times()[:2]) - before_s)
            await asyncio.sleep(0.01)
    return worst_s


async def check(stand: Stand, pieces: list[bytes]) -> None:
    """Fail if each of three attempts stalls others: what else runs in the gateway's threads may add to one."""
    stalls_s = list[float]()
    for _ in range(3):
        stalls_s.append(await worst_stall_s(stand, pieces))
        stand.engine.clear()
        if stalls_s[-1] < _STALL_S:
            return
    pytest.fail(f"others waited {stalls_s} s of the gateway's processor time")


@pytest.mark.ci
@pytest.mark.parametrize(
    ("path", "what"), [(path, what) for path, found in _BODIES.items() for what in found]
)
async def test_bodies(served: Stand, path: str, what: str) -> None:
    body = filled(*_BODIES[path][what])
    close = b"connection: close"
    await check(served, [post(body, _AUTHORIZATION, close, path=path.encode())])


@pytest.mark.ci
@pytest.mark.parametrize("what", _RAW)
async def test_connections(served: Stand, what: str) -> None:
    await check(served, _RAW[what])
