"""External endpoints: servers that the fleet did not start, as backends and fallbacks of a route."""

import asyncio
import signal
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson
import pytest
from pydantic import SecretStr

from machinery.clock import SystemClock
from schemas.records import ExternalKey
from store import codec, keys
from store.memory import MemoryTransport
from store.port import Put
from tests.support.foreign_servers import mlx_lm_server, other_fleet, route_with
from tests.support.gateway_calls import CHAT
from tests.support.gateway_engine_scripts import chat, dies_mid_stream, echo, refuses, streams
from tests.support.gateway_fake_engine import FakeEngine
from tests.support.gateway_raw_server import Answering, serving, then_closing
from tests.support.gateway_resume_engine import Marked
from tests.support.gateway_world import Running, World, running_gateway
from tests.support.store_certificates import Authority
from tests.support.waiting import until

SECRET = "sk-fleet-very-secret"
HELLO = [{"role": "user", "content": "hello"}]


async def put_key(world: World, url: str, secret: str = SECRET) -> None:
    made = ExternalKey(
        name="theirs", url=url, key=SecretStr(secret), created=datetime(2026, 1, 1, tzinfo=UTC)
    )
    put = Put(key=keys.named(keys.EXTERNAL_KEY_PREFIX, "theirs"), value=codec.encode(made))
    await world.transport.commit([], [put])


def at(engine: FakeEngine, **more: Any) -> dict[str, Any]:
    return {"url": f"http://127.0.0.1:{engine.port}/v1", "model": "theirs", **more}


@pytest.mark.ci
async def test_mlx_lm_server_answers_and_after_kill_9_the_fleet_does(
    gateway: Running, tmp_path: Path
) -> None:
    with mlx_lm_server(tmp_path) as foreign:
        await foreign.wait_ready()
        (own,) = await gateway.serve(chat)
        await gateway.world.put(
            route_with({"url": f"{foreign.url}/v1", "model": foreign.model}, fallbacks=["m"])
        )
        await gateway.knows("chat", ready=2)
        ask = {"model": "chat", "messages": HELLO, "max_tokens": 4}
        status, body, response = await gateway.chat(**ask)
        assert status == 200, body
        assert body["usage"]["completion_tokens"] == 4
        assert response.headers["x-fleet-replica"] == "chat/outside"
        status, raw, _ = await gateway.chat(**ask, stream=True)
        assert status == 200
        assert raw.endswith(b"data: [DONE]\n\n"), raw[-200:]
        assert not own.calls
        foreign.process.send_signal(signal.SIGKILL)
        foreign.process.wait()
        for _ in range(3):
            status, body, response = await gateway.chat(**ask)
            assert (status, response.headers["x-fleet-replica"]) == (200, "m-0"), body
        await until(
            lambda: bool(gateway.gateway.load_tracker.outliers.ejected_origins),
            what="the ejection",
        )
        assert "chat/outside" in await gateway.metrics()


async def test_https_with_the_fleets_key_and_an_authority_of_its_own(
    gateway: Running, tmp_path: Path
) -> None:
    (far,) = await gateway.start(chat, of="far")
    async with other_fleet(tmp_path, far, SECRET) as theirs:
        url, pem = theirs.running.url, theirs.authority.certificate.read_text()
        external = {"url": f"{url}/v1", "model": "m", "key": "theirs", "authorities": pem}
        await gateway.world.put(route_with(external))
        await until(lambda: "chat" in gateway.gateway.table_cache.table.models, what="the route")
        status, body, _ = await gateway.chat(model="chat")
        assert status == 503
        assert "there is no externalkey theirs" in body["error"]["message"]
        await put_key(gateway.world, url)
        await gateway.knows("chat", ready=1)
        status, body, _ = await gateway.chat(model="chat")
        assert (status, body["choices"][0]["message"]["content"]) == (200, "hello from far-0")
        status, raw, _ = await gateway.chat(model="chat", stream=True)
        assert (status, b"far-0" in raw) == (200, True)


@pytest.mark.ci
async def test_a_server_that_cannot_prove_its_name_gets_nothing(
    gateway: Running, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    stranger = Authority(tmp_path / "other", "stranger").certificate.read_text()
    (far,) = await gateway.start(chat, of="far")
    async with other_fleet(tmp_path, far, SECRET) as theirs:
        url = theirs.running.url
        await put_key(gateway.world, url)
        for more in ({"authorities": stranger}, {}):
            await gateway.world.put(
                route_with({"url": f"{url}/v1", "model": "m", "key": "theirs", **more})
            )
            await gateway.knows("chat", ready=1)
            status, body, _ = await gateway.chat(model="chat")
            assert status == 503
            assert "TLS" in body["error"]["message"], body
        assert not far.calls


@pytest.mark.parametrize("patience_s", [1.0])
async def test_a_refused_key_is_the_fleets_fault_and_not_the_clients(
    gateway: Running, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (far,) = await gateway.start(chat, of="far")
    async with other_fleet(tmp_path, far, "sk-fleet-another") as theirs:
        url, pem = theirs.running.url, theirs.authority.certificate.read_text()
        await put_key(gateway.world, url)
        external = {"url": f"{url}/v1", "model": "m", "key": "theirs", "authorities": pem}
        await gateway.world.put(route_with(external))
        await gateway.knows("chat", ready=1)
        status, body, _ = await gateway.chat(model="chat")
        assert status == 503
        assert "refuses the fleet's key (status 401)" in body["error"]["message"]
        assert SECRET not in caplog.text + orjson.dumps(body).decode()
        assert SECRET not in repr(gateway.gateway.table_cache.table)


async def test_a_key_is_sent_to_its_own_server_only(gateway: Running) -> None:
    (far,) = await gateway.start(echo, of="far")
    await put_key(gateway.world, "http://127.0.0.1:1/v1")
    await gateway.world.put(route_with(at(far, key="theirs")))
    await until(lambda: "chat" in gateway.gateway.table_cache.table.models, what="the route")
    status, body, _ = await gateway.chat(model="chat")
    assert status == 503
    assert "is for http://127.0.0.1:1 only" in body["error"]["message"]
    assert not far.calls


async def test_what_only_this_fleet_knows_stays_here(gateway: Running) -> None:
    (far,) = await gateway.start(echo, of="far")
    await gateway.world.put(route_with(at(far)))
    await gateway.knows("chat", ready=1)
    headers = {"authorization": "Bearer the-clients", "x-fleet-request-timeout": "30"}
    body = {
        "model": "chat",
        "messages": HELLO,
        "session_id": "s",
        "cache_salt": "c",
        "top_p": 1,
    }
    async with gateway.post(json=body, headers=headers) as answer:
        assert answer.status == 200
    (call,) = far.calls
    assert call.path == CHAT
    assert orjson.loads(call.body) == {"model": "theirs", "messages": HELLO, "top_p": 1}
    assert set(call.headers) == {*("host", "content-type", "content-length", "via", "x-request-id")}


async def test_weights_share_requests_with_a_server_outside(gateway: Running) -> None:
    (far,) = await gateway.start(chat, of="far")
    (own,) = await gateway.serve(chat)
    backends = [{"deployment": "m", "weight": 1}, {"external": "outside", "weight": 1}]
    await gateway.world.put(route_with(at(far), backends=backends))
    await gateway.knows("chat", ready=2)
    for _ in range(40):
        status, _, _ = await gateway.chat(model="chat")
        assert status == 200
    assert len(far.calls) + len(own.calls) == 40
    assert min(len(far.calls), len(own.calls)) >= 8


async def test_a_stream_of_the_fleet_never_continues_outside(gateway: Running) -> None:
    engine = Marked(cuts=[900])  # the stream could continue, and no other engine is there
    (far,) = await gateway.start(chat, of="far")
    await gateway.serve(engine)
    external = at(far)
    await gateway.world.put(
        route_with(external, backends=[{"deployment": "m"}], fallbacks=["outside"])
    )
    await gateway.knows("chat", ready=2)
    status, raw, response = await gateway.chat(model="chat", stream=True)
    assert (status, response.headers["x-fleet-replica"]) == (200, "m-0")
    assert raw.endswith(b"data: [DONE]\n\n")
    assert len(engine.bodies) == 2  # the engine itself continued it, after a pause
    assert not far.calls


async def test_a_stream_from_outside_that_breaks_ends_with_an_error(gateway: Running) -> None:
    (far,) = await gateway.start(dies_mid_stream, of="far")
    (own,) = await gateway.serve(chat)
    await gateway.world.put(route_with(at(far), fallbacks=["m"]))
    await gateway.knows("chat", ready=2)
    status, raw, _ = await gateway.chat(model="chat", stream=True)
    assert status == 200
    assert b'"error"' in raw
    assert not own.calls


async def test_a_client_that_leaves_ends_its_request_outside(gateway: Running) -> None:
    script = streams(10_000, pause_s=0.02)
    (far,) = await gateway.start(script, of="far")
    await gateway.world.put(route_with(at(far)))
    await gateway.knows("chat", ready=1)
    ask = {"model": "chat", "messages": HELLO, "stream": True}
    async with gateway.post(json=ask) as answer:
        await answer.content.readany()
    await until(lambda: far.abandoned == 1, what="the end of the call")


@pytest.mark.parametrize("status", [301, 401, 403, 404, 500, 503])
async def test_faults_of_a_server_outside_lead_to_the_fallback(
    gateway: Running, status: int
) -> None:
    (far,) = await gateway.start(refuses(status, "theirs"), of="far")
    await gateway.serve(chat)
    await gateway.world.put(route_with(at(far), fallbacks=["m"]))
    await gateway.knows("chat", ready=2)
    found, _, response = await gateway.chat(model="chat")
    assert (found, response.headers["x-fleet-replica"]) == (200, "m-0")
    assert len(far.calls) == 1


async def test_a_fleet_that_leads_to_itself_is_noticed() -> None:
    world = World(MemoryTransport(SystemClock()))
    async with running_gateway(world.transport) as gateway:
        await world.put(route_with({"url": f"{gateway.url}/v1", "model": "chat"}))
        await gateway.knows("chat", ready=1)
        async with asyncio.timeout(60):
            status, body, _ = await gateway.chat(model="chat")
        assert status == 508
        assert "leads back to its own fleet" in body["error"]["message"]


_OK, _EVENT = b"HTTP/1.1 200 OK\r\n", b'data: {"choices": []}\n\n'
_JSON, _STREAM = b"content-type: application/json\r\n", b"content-type: text/event-stream\r\n"
_CHUNKED = b"transfer-encoding: chunked\r\n"


async def flood(writer: asyncio.StreamWriter) -> None:
    """Send interim responses for ever."""
    while True:
        writer.write(b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" * 100)
        await writer.drain()


@pytest.mark.parametrize(
    ("answer", "status", "code"),
    [
        pytest.param(
            _OK + _JSON + b"content-length: 2\r\ncontent-length: 3\r\n\r\n{} ",
            503,
            "upstream_failed",
            id="two-lengths",
        ),
        pytest.param(
            _OK + _JSON + _CHUNKED + b"content-length: 2\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
            503,
            "upstream_failed",
            id="length-and-chunks",
        ),
        pytest.param(
            _OK + _JSON + _CHUNKED + b"\r\n-2\r\n{}\r\n0\r\n\r\n",
            503,
            "upstream_failed",
            id="chunk-size",
        ),
        pytest.param(
            _OK + b"x: y\r\n" * 100_000 + b"\r\n", 503, "upstream_failed", id="giant-head"
        ),
        pytest.param(
            then_closing(_OK + _JSON + b"content-length: 9\r\n\r\n{}"),
            503,
            "upstream_failed",
            id="body-too-short",
        ),
        pytest.param(_OK + b"x", 504, "request_timeout", id="no-end-of-head"),
        pytest.param(flood, 504, "request_timeout", id="interim-responses"),
    ],
)
async def test_an_invalid_response_is_a_refusal(
    gateway: Running, answer: Answering | bytes, status: int, code: str
) -> None:
    async with serving(answer) as (server, origin), asyncio.timeout(60):
        url = f"http://127.0.0.1:{origin.port}/v1"
        await gateway.world.put(route_with({"url": url, "model": "theirs"}))
        await gateway.knows("chat", ready=1)
        body, headers = {"model": "chat", "messages": HELLO}, {"x-request-timeout": "2"}
        async with gateway.post(json=body, headers=headers) as response:
            assert response.status == status, await response.text()
            assert (await response.json())["error"]["code"] == code
        assert server.requests
        await until(lambda: gateway.gateway.links.external.connections() == 0, what="no connection")


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(_CHUNKED + b"\r\n%x\r\n%b\r\nzz\r\n" % (len(_EVENT), _EVENT), id="chunk-size"),
        pytest.param(b"content-length: 999\r\n\r\n" + _EVENT, id="body-too-short"),
    ],
)
async def test_a_stream_that_becomes_invalid_ends_with_an_error(
    gateway: Running, answer: bytes
) -> None:
    async def answer_slowly(writer: asyncio.StreamWriter) -> None:
        head, end, rest = answer.rpartition(_EVENT)
        writer.write(_OK + _STREAM + head + end)
        await asyncio.sleep(0.2)
        writer.write(rest)
        await asyncio.sleep(0.2)
        writer.close()

    async with serving(answer_slowly) as (_, origin), asyncio.timeout(60):
        url = f"http://127.0.0.1:{origin.port}/v1"
        await gateway.world.put(route_with({"url": url, "model": "theirs"}))
        await gateway.knows("chat", ready=1)
        status, raw, _ = await gateway.chat(model="chat", stream=True)
        assert status == 200
        assert b'data: {"error"' in raw
        assert not raw.endswith(b"data: [DONE]\n\n")
