"""`/v1/ws/chat/completions` on a listening gateway: several requests on one connection, cancel, limits, authentication."""

import asyncio
import ssl
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from gateway.http.chat_socket import MAX_RUNNING
from gateway.limits import GatewayLimits
from machinery.tls_server import ServerCertificate
from tests.support.gateway_calls import KEYS_REQUIRED
from tests.support.gateway_engine_scripts import chat, dies_mid_stream, slow, streams
from tests.support.gateway_world import Running, running_gateway
from tests.support.store_certificates import Authority
from tests.support.tls_engine import on_loop
from tests.support.waiting import until

PATH = "/v1/ws/chat/completions"
SECRET = "sk-fleet-one"
Socket = aiohttp.ClientWebSocketResponse


def ask(id_: str = "1", **body: Any) -> str:
    request = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **body}
    return orjson.dumps({"id": id_, "request": request}).decode()


async def next_message(socket: Socket) -> dict[str, Any]:
    async with asyncio.timeout(60):
        wsmessage = await socket.receive()
    assert wsmessage.type is aiohttp.WSMsgType.TEXT, wsmessage
    message: dict[str, Any] = orjson.loads(wsmessage.data)
    return message


async def until_done(socket: Socket, id_: str = "1") -> list[dict[str, Any]]:
    """Return the messages of one request up to its end."""
    found: list[dict[str, Any]] = []
    while not found or "done" not in found[-1]:
        message = await next_message(socket)
        if message["id"] == id_:
            found.append(message)
    return found


async def close_code(socket: Socket) -> int | None:
    """Return the code with which the gateway closes."""
    async with asyncio.timeout(60):
        while (await socket.receive()).type is aiohttp.WSMsgType.TEXT:
            pass
    return socket.close_code


def text_of(messages: list[dict[str, Any]]) -> str:
    parts = [
        message["data"]["choices"][0]["delta"]["content"]
        for message in messages
        if "data" in message
    ]
    return "".join(parts)


async def test_a_stream_and_a_whole_answer(gateway: Running) -> None:
    await gateway.serve(chat)
    async with gateway.http.ws_connect(gateway.url + PATH) as socket:
        await socket.send_str(ask("a", stream=True))
        first, *rest = await until_done(socket, "a")
        assert first["status"] == 200
        assert first["headers"]["x-fleet-replica"] == "m-0"
        assert text_of(rest) == "hello from m-0"
        await socket.send_str(ask("b"))
        status, answer, end = await until_done(socket, "b")
        assert (status["status"], end) == (200, {"id": "b", "done": True})
        assert answer["data"]["choices"][0]["message"]["content"] == "hello from m-0"
    await until(lambda: not gateway.gateway.handler.running(), what="the end of the requests")


async def test_requests_run_at_the_same_time(gateway: Running) -> None:
    script = streams(20, pause_s=0.02)
    await gateway.serve(script)
    async with gateway.http.ws_connect(gateway.url + PATH) as socket:
        for number in range(4):
            await socket.send_str(ask(str(number), stream=True))
        order, done = [], 0
        while done < 4:
            message = await next_message(socket)
            order.append(message["id"])
            done += "done" in message
        assert {order[at] for at in range(12)} == {"0", "1", "2", "3"}


async def test_cancel_ends_one_request_and_no_other(gateway: Running) -> None:
    script = streams(10_000, pause_s=0.02)
    (engine,) = await gateway.serve(script)
    async with gateway.http.ws_connect(gateway.url + PATH) as socket:
        await socket.send_str(ask("a", stream=True))
        await socket.send_str(ask("b", stream=True))
        assert (await next_message(socket))["status"] == 200
        await socket.send_str('{"id": "a", "cancel": true}')
        assert (await until_done(socket, "a"))[-1]["cancelled"] is True
        await until(lambda: engine.abandoned == 1, what="the end of one call")
        while "data" not in (message := await next_message(socket)):
            assert message["id"] == "b"
        await socket.send_str('{"id": "gone", "cancel": true}')  # it may have ended by itself
    await until(lambda: engine.abandoned == 2, what="the end of the other")


async def test_what_is_wrong_is_said_and_the_connection_goes_on(gateway: Running) -> None:
    await gateway.serve(slow(1, chat))
    async with gateway.http.ws_connect(gateway.url + PATH) as socket:
        for text, says in (
            ("hello", "Expected"),
            ("[]", "Expected"),
            ('{"id": 1}', "Expected"),
            ('{"id": "", "cancel": true}', '"id" has 1 to 100'),
            ('{"id": "1"}', "Expected"),
            ('{"id": "1", "colour": 1}', "colour"),
        ):
            await socket.send_str(text)
            message = await next_message(socket)
            assert (message["status"], message["done"]) == (400, True)
            assert says in message["data"]["error"]["message"], text
        await socket.send_str(ask(model="x"))
        status, error, _ = await until_done(socket)
        assert status["status"] == 404
        assert "does not exist" in error["data"]["error"]["message"]
        await socket.send_str(ask())
        await socket.send_str(ask())
        twice = await next_message(socket)
        assert "running already" in twice["data"]["error"]["message"]
        assert (await until_done(socket))[0]["status"] == 200


async def test_a_broken_stream_ends_with_an_error(gateway: Running) -> None:
    await gateway.serve(dies_mid_stream)
    async with gateway.http.ws_connect(gateway.url + PATH) as socket:
        await socket.send_str(ask(stream=True))
        found = await until_done(socket)
        assert any("error" in one.get("data", {}) for one in found)


async def test_so_many_requests_run_on_one_connection(gateway: Running) -> None:
    script = streams(10_000, pause_s=0.5)
    await gateway.serve(script)
    async with gateway.http.ws_connect(gateway.url + PATH) as socket:
        for number in range(MAX_RUNNING + 1):
            await socket.send_str(ask(str(number), stream=True))
        (refused,) = await until_done(socket, str(MAX_RUNNING))
        assert refused["status"] == 429
    # The client left.
    await until(lambda: not gateway.gateway.handler.running(), what="the end of the requests")


async def test_a_key_is_asked_for_and_asked_again() -> None:
    async with running_gateway(limits=KEYS_REQUIRED) as gateway:
        await gateway.serve(chat)
        await gateway.add_key(SECRET)
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await gateway.http.ws_connect(gateway.url + PATH)
        assert refused.value.status == 401
        headers = {"authorization": f"Bearer {SECRET}"}
        async with gateway.http.ws_connect(gateway.url + PATH, headers=headers) as socket:
            await socket.send_str(ask())
            assert (await until_done(socket))[0]["status"] == 200
            await gateway.add_key("sk-fleet-another")
            await socket.send_str(ask())
            assert (await until_done(socket))[0]["status"] == 401


async def test_pages_of_other_sites_are_refused(gateway: Running) -> None:
    with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
        await gateway.http.ws_connect(
            gateway.url + PATH, headers={"origin": "https://evil.example"}
        )
    assert refused.value.status == 403
    async with gateway.get(PATH) as answer:
        assert answer.status == 404  # no handshake


async def test_long_messages_and_binary_ones_end_the_connection() -> None:
    limits = GatewayLimits(drain_timeout_s=0.0, max_body_bytes=10_000)
    async with running_gateway(limits=limits) as gateway:
        async with gateway.http.ws_connect(gateway.url + PATH) as socket:
            await socket.send_str(ask(pad="x" * 20_000))
            assert await close_code(socket) == 1009
        async with gateway.http.ws_connect(gateway.url + PATH) as socket:
            await socket.send_bytes(b"{}")
            assert await close_code(socket) == 1003
        assert gateway.gateway.handler.body_memory.used == 0


@pytest.mark.ci
async def test_a_client_that_reads_nothing_stops_its_engine(gateway: Running) -> None:
    script = streams(2000, pause_s=0, size=20_000)
    await gateway.serve(script)
    async with gateway.http.ws_connect(gateway.url + PATH, max_msg_size=0) as socket:
        await socket.send_str(ask(stream=True))
        await next_message(socket)
        (context,) = gateway.gateway.handler.running()
        await until(lambda: context.blocked_since_s < float("inf"), what="the pause")
        assert context.response.unsent_bytes() < 4 << 20
        assert len(await until_done(socket)) > 1000


async def test_a_stopping_gateway_ends_what_runs() -> None:
    limits = GatewayLimits(drain_timeout_s=30.0, resume_timeout_s=5.0)
    async with running_gateway(limits=limits) as gateway:
        await gateway.serve(streams(20, pause_s=0.1))
        socket = await gateway.http.ws_connect(gateway.url + PATH)
        await socket.send_str(ask(stream=True))
        await next_message(socket)
        gateway.gateway.stop()
        assert len(await until_done(socket)) > 15
        assert await close_code(socket) == 1001


async def over_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "ours")
    files = authority.issue("gateway")
    certificate = ServerCertificate(files.certificate, files.key)
    limits = GatewayLimits(drain_timeout_s=0.0, certificate=certificate)
    trusted = ssl.create_default_context(cafile=str(authority.certificate))
    async with running_gateway(limits=limits) as gateway:
        await gateway.serve(streams(50, pause_s=0, size=5000))
        async with gateway.http.ws_connect(gateway.url + PATH, ssl=trusted) as socket:
            await socket.send_str(ask(stream=True, pad="x" * 100_000))
            assert len(await until_done(socket)) == 52


test_over_tls_on_uvloop = on_loop(over_tls)
test_over_tls_on_asyncio = on_loop(over_tls, "asyncio")
