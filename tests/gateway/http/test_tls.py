"""HTTPS of a gateway process: requests, refusals, reload and drain, with real clients."""

import asyncio
import signal
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import orjson
import pytest

from schemas.records import GatewayLease
from store import codec, keys
from store.etcd.connect import connect
from tests.support.etcd import running_etcd
from tests.support.gateway_calls import gateway_process, wait_for_gateway
from tests.support.gateway_engine_scripts import DONE, streams
from tests.support.gateway_fake_engine import FakeEngine, running
from tests.support.gateway_raw_stand import BODY, LAST, Stand, post, running_stand
from tests.support.gateway_world import World
from tests.support.ports import free_port
from tests.support.store_certificates import Authority

pytestmark = pytest.mark.etcd

KEY = "sk-fleet-tls"
ASKED = b"authorization: Bearer " + KEY.encode()
MAX_BODY = 1 << 20


@pytest.fixture(scope="module")
async def stand(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stand]:
    folder = tmp_path_factory.mktemp("tls")
    flags = ("--max-body", str(MAX_BODY))
    async with running_stand(folder, *flags, key=KEY, authority=Authority(folder, "ours")) as made:
        yield made


@pytest.mark.ci
async def test_models_health_and_the_admin_api(stand: Stand) -> None:
    assert await stand.is_well()
    assert await stand.statuses(LAST) == [200]
    last = b"GET /queue HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    assert await stand.statuses(last) == [401]


async def test_pipelined_and_split_requests(stand: Stand) -> None:
    data = post(BODY, ASKED) * 3 + LAST
    assert await stand.statuses(data) == [200, 200, 200, 200]
    assert (
        await stand.statuses(*(data[at : at + 97] for at in range(0, len(data), 97))) == [200] * 4
    )


async def test_plain_http_is_told_that_this_is_https(stand: Stand) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", stand.port)
    async with asyncio.timeout(20):
        writer.write(post(BODY, ASKED))
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    assert head.startswith(b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n")
    error = orjson.loads(body)["error"]
    assert error["code"] == "https_required"
    assert "use https://" in error["message"]
    assert KEY not in stand.log.read_text()


async def test_a_refusal_reaches_a_client_that_still_sends(stand: Stand) -> None:
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n%b\r\ncontent-length: %d\r\n\r\n"
    )
    too_large = (head % (ASKED, 8 * MAX_BODY), *(b" " * 100_000 for _ in range(20)))
    assert await stand.statuses(*too_large) == [413]
    chunk = b"%x\r\n%b\r\n" % (200_000, b" " * 200_000)
    chunked = head.replace(b"content-length: %d", b"transfer-encoding: chunked") % ASKED
    assert await stand.statuses(chunked, *(chunk for _ in range(20))) == [413]
    assert await stand.is_well()


async def test_silent_clients_do_not_keep_others_out(stand: Stand) -> None:
    silent = [socket.create_connection(("127.0.0.1", stand.port)) for _ in range(400)]
    try:
        assert await stand.is_well()
        async with aiohttp.ClientSession() as http:
            url = f"https://127.0.0.1:{stand.port}/metrics"
            async with http.get(url, ssl=stand.tls or True) as response:
                text = await response.text()
        assert 'reason="handshake"' in text
    finally:
        for one in silent:
            one.close()


async def test_a_stranger_certificate_is_not_trusted(stand: Stand, tmp_path: Path) -> None:
    stranger = ssl.create_default_context(cafile=Authority(tmp_path, "stranger").certificate)
    with pytest.raises(ssl.SSLCertVerificationError):
        await asyncio.open_connection("127.0.0.1", stand.port, ssl=stranger)


@pytest.mark.ci
async def test_sigterm_lets_streams_finish_and_waits_for_no_idle_client(tmp_path: Path) -> None:
    port, authority = free_port(), Authority(tmp_path, "ours")
    files = authority.issue("gateway")
    trusted = ssl.create_default_context(cafile=authority.certificate)
    tls = ("--tls-cert", str(files.certificate), "--tls-key", str(files.key))
    url = f"https://127.0.0.1:{port}"
    async with (
        running_etcd(tmp_path) as etcd,
        running(FakeEngine("m-0", streams(30, pause_s=0.02))) as engine,
        gateway_process("--port", str(port), "--etcd", str(etcd.address), *tls) as gateway,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=trusted)) as http,
    ):
        transport = connect(etcd.address)
        await World(transport).serve("m", engine)

        await wait_for_gateway(http, url)
        leases = (await transport.list(keys.GATEWAY_LEASE_PREFIX)).items
        assert [codec.decode(GatewayLease, lease).url for lease in leases] == [url]
        # A client that answers nothing while it is idle, such as a pool of blocking connections.
        plain = socket.create_connection(("127.0.0.1", port))
        idle = trusted.wrap_socket(plain, server_hostname="127.0.0.1")
        idle.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        body = {"model": "m", "stream": True}
        async with http.post(f"{url}/v1/completions", json=body) as response:
            await response.content.readany()
            gateway.send_signal(signal.SIGTERM)
            assert (await response.content.read()).endswith(DONE)
        # The drain timeout, and TLS's own, are 30 s and more.
        async with asyncio.timeout(20):
            assert await gateway.wait() == 0
        idle.close()
        await transport.close()
