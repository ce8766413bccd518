"""The join port on a real socket under arbitrary bytes: no request breaks it, and others are served meanwhile."""

import asyncio
import base64
import contextlib
import json
import os
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fleetctl.fleets.join_client import JoinAddress
from identity.authority import new_key
from identity.token_store import TokenOptions
from schemas.wire.join import CA_PATH, JOIN_PATH, REQUESTS_PATH
from tests.support.clock import HastyClock
from tests.support.join import JoinStand, join_body

_LIMIT_S = 20.0
_GROWTH_BYTES = 100 << 20


@dataclass(frozen=True, slots=True)
class Target:
    """The address of the port, and a valid body for it."""

    address: JoinAddress
    body: dict[str, Any]

    def talk(self, data: bytes, *, is_tls: bool) -> bytes:
        """Send bytes over a connection of its own, and return all that comes back."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        where = (self.address.host, self.address.port)
        answer = b""
        with contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.suppress(ConnectionError, ssl.SSLError))
            raw = stack.enter_context(socket.create_connection(where, timeout=_LIMIT_S))
            link = stack.enter_context(context.wrap_socket(raw)) if is_tls else raw
            link.sendall(data)
            if not is_tls:
                link.shutdown(socket.SHUT_WR)
            while piece := link.recv(1 << 16):
                answer += piece
        return answer

    def is_served(self) -> bool:
        """Return whether an honest request is answered."""
        answer = self.talk(http("GET", CA_PATH), is_tls=True)
        return answer.startswith(b"HTTP/1.1 200 ")


def http(method: str, path: str, body: bytes = b"", headers: bytes = b"") -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n".encode()
    return head + headers + b"\r\n" + body


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=40),
    lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=8,
)


@st.composite
def requests_like(draw: st.DrawFn, valid: bytes) -> str:
    """Return a request for a certificate of which some bytes are changed."""
    raw = bytearray(valid)
    for _ in range(draw(st.integers(0, 4))):
        raw[draw(st.integers(0, len(raw) - 1))] = draw(st.integers(0, 255))
    raw = raw[: draw(st.integers(1, len(raw)))] if draw(st.booleans()) else raw
    text = base64.encodebytes(raw).decode()
    return f"-----BEGIN CERTIFICATE REQUEST-----\n{text}-----END CERTIFICATE REQUEST-----\n"


@st.composite
def documents(draw: st.DrawFn, valid: dict[str, Any], request: bytes) -> bytes:
    """Return a body in which some fields are others, missing or too many."""
    tree = json.loads(json.dumps(valid))
    for place in (tree, tree["machine"]):
        for name in list(place):
            if name != "machine" and draw(st.integers(0, 5)) == 0:
                place[name] = draw(values)
    tree["request"] = draw(requests_like(request) | st.just(tree.get("request")))
    if draw(st.integers(0, 9)) == 0:
        tree[draw(st.text(max_size=10))] = draw(values)
    raw = json.dumps(tree).encode()
    return raw[: draw(st.integers(0, len(raw)))] if draw(st.integers(0, 9)) == 0 else raw


def attack(target: Target, examples: int) -> None:
    """Send arbitrary requests one after another. The port has to answer an honest one every now and then."""
    request = base64.b64decode("".join(target.body["request"].strip().splitlines()[1:-1]))
    paths = st.sampled_from([JOIN_PATH, REQUESTS_PATH, CA_PATH, f"{REQUESTS_PATH}/{'a' * 16}", "/"])
    methods = st.sampled_from(["GET", "POST", "DELETE", "PUT", "HEAD"])
    bodies = documents(target.body, request) | st.binary(max_size=200)
    proof, expected = b"authorization: Proof !!\r\n", b"expect: 100-continue\r\n"
    headers = st.sampled_from([b"", proof, expected, b"content-encoding: gzip\r\n", b"x: \xff\r\n"])
    messages = st.builds(http, methods, paths, bodies, headers)
    # With a beginning and an end, so that the port does not wait for more.
    messages |= st.binary(max_size=300).map(lambda raw: b"!" + raw + b"\r\n\r\n")
    messages |= st.builds(http, st.just("POST"), st.just(JOIN_PATH), bodies)
    seen = 0

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(messages, st.booleans())
    def send(message: bytes, is_tls: bool) -> None:
        nonlocal seen
        answer = target.talk(message, is_tls=is_tls)
        assert b" 500 " not in answer.partition(b"\r\n")[0], message
        assert b"Traceback" not in answer
        seen += 1
        assert seen % 25 or target.is_served()

    send()
    assert target.is_served()


async def fuzzed(tmp_path: Path, work: Callable[[Target], None]) -> None:
    stand = await JoinStand(tmp_path, clock=HastyClock(), most_per_minute=10**9).open()
    token = await stand.token(TokenOptions(uses=1000, labels={}))
    body = join_body(token, new_key()[1]).model_dump(mode="json", by_alias=True)
    process = psutil.Process(os.getpid())
    async with stand.serve() as address:
        target = Target(address, body)
        await asyncio.to_thread(target.is_served)
        before = process.memory_info().rss
        await asyncio.to_thread(work, target)
        assert process.memory_info().rss - before < _GROWTH_BYTES


async def test_no_request_breaks_the_port(tmp_path: Path) -> None:
    await fuzzed(tmp_path, lambda target: attack(target, 80))


@pytest.mark.full
@pytest.mark.timeout(900)
async def test_no_request_of_many_breaks_the_port(tmp_path: Path) -> None:
    await fuzzed(tmp_path, lambda target: attack(target, 3_000))


async def test_silent_connections_keep_nobody_out(tmp_path: Path) -> None:
    """A hundred connections without a word, and sixty that stop in the middle of a body."""

    def work(target: Target) -> None:
        where = (target.address.host, target.address.port)
        with contextlib.ExitStack() as stack:
            for _ in range(100):
                stack.enter_context(socket.create_connection(where, timeout=_LIMIT_S))
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            for _ in range(60):
                raw = socket.create_connection(where, timeout=_LIMIT_S)
                link = stack.enter_context(context.wrap_socket(raw))
                link.sendall(http("POST", JOIN_PATH, b"x" * 30_000)[:15_000])
            assert target.is_served()

    await fuzzed(tmp_path, work)


async def test_a_large_body_is_refused_before_it_is_read(tmp_path: Path) -> None:
    def work(target: Target) -> None:
        for body in (b"x" * (33 << 10), b"x" * (2 << 20)):
            answer = target.talk(http("POST", JOIN_PATH, body), is_tls=True)
            assert answer == b"" or b" 413 " in answer.partition(b"\r\n")[0]
        assert target.is_served()

    await fuzzed(tmp_path, work)
