"""The gateway process: flags, exit codes, signals."""

import json
import socket
from pathlib import Path

import aiohttp
import pytest
from click.testing import CliRunner

from gateway.__main__ import main
from store.etcd.connect import connect
from tests.support.etcd import running_etcd
from tests.support.fleet import fleetctl
from tests.support.gateway_calls import CHAT, gateway_process, wait_for_gateway
from tests.support.gateway_engine_scripts import streams
from tests.support.gateway_fake_engine import FakeEngine, running
from tests.support.gateway_world import World
from tests.support.ports import free_port
from tests.support.waiting import until_async


def test_a_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = CliRunner().invoke(main, ["--port", str(port), "--etcd", "unix:/s"])
    assert result.exit_code == 3
    assert result.stderr == (
        f"gateway: port {port} is in use on 127.0.0.1; choose another with --port\n"
    )


def test_an_address_that_is_not_ours() -> None:
    result = CliRunner().invoke(main, ["--host", "192.0.2.1", "--port", "0", "--etcd", "unix:/s"])
    assert result.exit_code == 3
    assert result.stderr.startswith("gateway: cannot listen on 192.0.2.1:0: ")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--etcd", "http://a:1", "--etcd", "unix:/s"], "not both"),
        (["--etcd", "https://a:1", "--etcd-ca", "/nowhere"], "/nowhere"),
        (["--etcd", "https://a:1", "--etcd-ca", __file__], "TLS files"),
        ([], "no etcd given"),
        (["--etcd", "unix:/s", "--max-body", "0"], "--max-body"),
        (
            ["--etcd", "unix:/s", "--port", "0", "--engine-sockets", "/dev/null/s"],
            "--engine-sockets: ",
        ),
        (["--etcd", "unix:/s", "--tls-cert", "/c"], "--tls-cert needs --tls-key as well"),
        (["--etcd", "unix:/s", "--tls-key", "/k"], "--tls-key needs --tls-cert as well"),
        (
            ["--etcd", "unix:/s", "--tls-cert", "/c", "--tls-key", "/k"],
            "/c cannot be read: No such",
        ),
        (
            ["--etcd", "unix:/s", "--tls-cert", "/c", "--tls-key", "/k", "--insecure-http"],
            "--tls-cert and --insecure-http contradict each other",
        ),
        (["--etcd", "unix:/s", "--anonymous-concurrency", "0"], "--anonymous-concurrency"),
        (
            ["--etcd", "unix:/s", "--port", "0", "--auth", "on", "--anonymous-concurrency", "1"],
            "this gateway requires keys (--auth), so no request comes without one; limit the keys",
        ),
    ],
)
def test_wrong_flags(flags: list[str], said: str) -> None:
    result = CliRunner().invoke(main, flags)
    assert result.exit_code == 2
    assert said in result.stderr


@pytest.mark.parametrize(
    ("flags", "refusal"),
    [
        (
            ["--floating-address", "192.168.1.50/24"],
            "127.0.0.1 alone does not serve it; add --host",
        ),
        (["--host", "0.0.0.0", "--floating-address", "mac-1"], "mac-1: expected an IPv4 address"),
        (["--floating-interface", "en0"], "--floating-interface belongs to --floating-address"),
    ],
)
def test_a_floating_address_that_cannot_be_held_is_refused(flags: list[str], refusal: str) -> None:
    result = CliRunner().invoke(main, ["--etcd", "unix:/s", "--port", "0", *flags])
    assert (result.exit_code, refusal in " ".join(result.stderr.split())) == (2, True)


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_plain_http_beyond_loopback_needs_a_flag(host: str) -> None:
    result = CliRunner().invoke(main, ["--host", host, "--port", "0", "--etcd", "unix:/s"])
    assert result.exit_code == 2
    assert f"--host {host}: other machines can reach {host}" in result.stderr
    assert "--tls-cert FILE --tls-key FILE" in result.stderr
    assert "--insecure-http" in result.stderr


@pytest.mark.ci
@pytest.mark.etcd
@pytest.mark.timeout(180)
async def test_after_kill_9_the_journal_shows_what_was_before(
    tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    port, state = free_port(), tmp_path / "state"
    url = f"http://127.0.0.1:{port}"

    async def routes() -> list[str]:
        done = await fleetctl("routes", "--last", "10", "--gateway", url, "-o", "json")
        assert (done.code, done.err) in ((0, ""), (0, "no requests found\n")), done
        return [item["id"] for item in json.loads(done.out)["items"]] if done.out else []

    async def is_saved() -> bool:
        found = state / "requests.jsonl"
        return found.exists() and found.read_bytes().count(b"\n") == 3

    async with (
        running_etcd(tmp_path) as etcd,
        running(FakeEngine("m-0", streams(3, pause_s=0.01))) as engine,
    ):
        transport = connect(etcd.address)
        await World(transport).serve("m", engine)
        flags = ("--port", str(port), "--etcd", str(etcd.address), "--state-dir", str(state))
        async with gateway_process(*flags) as gateway:
            await wait_for_gateway(http, url)
            for number in range(3):
                body = {"model": "m", "stream": True}
                headers = {"x-request-id": f"before-{number}"}
                async with http.post(f"{url}{CHAT}", json=body, headers=headers) as response:
                    await response.read()
            before = await routes()
            assert before == ["before-0", "before-1", "before-2"]
            await until_async(is_saved, what="the entries to be saved")
            gateway.kill()
            await gateway.wait()
        async with gateway_process(*flags):
            await wait_for_gateway(http, url)
            assert await routes() == before
        await transport.close()
