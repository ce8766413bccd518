"""Gateways that serve HTTPS: every command that connects to one trusts the authority of --gateway-ca, and no other."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from gateway.limits import GatewayLimits
from machinery.tls_server import ServerCertificate
from store import keys
from store.port import Transport
from tests.support.fleetctl_runner import MemoryFleet
from tests.support.gateway_engine_scripts import streams
from tests.support.gateway_fake_engine import FakeEngine, running
from tests.support.gateway_world import Running, World, running_gateway
from tests.support.store_certificates import Authority
from tests.support.waiting import until_async

UNTRUSTED = "its certificate is not trusted"


@asynccontextmanager
async def secure_gateway(transport: Transport, folder: Path) -> AsyncIterator[tuple[Running, Path]]:
    """Yield a registered gateway with HTTPS, and its authority's certificate."""
    authority = Authority(folder, "ours")
    files = authority.issue("gateway")
    certificate = ServerCertificate(files.certificate, files.key)
    limits = GatewayLimits(drain_timeout_s=0.0, certificate=certificate)
    async with (
        running(FakeEngine("m-0", streams(3, pause_s=0.0))) as engine,
        running_gateway(transport, limits) as gateway,
    ):
        await World(transport).serve("m", engine)
        await gateway.knows("m", ready=1)

        async def registered() -> bool:
            return len((await transport.list(keys.GATEWAY_LEASE_PREFIX)).items) == 1

        await until_async(registered, what="the gateway to be registered")
        yield gateway, authority.certificate


async def test_commands_trust_the_authority_that_is_given(
    shared_fleet: MemoryFleet, shared_transport: Transport, tmp_path: Path
) -> None:
    async with secure_gateway(shared_transport, tmp_path) as (gateway, ca):
        trust = ("--gateway-ca", str(ca))
        for words in (
            ("chat", "m", "-m", "hi"),
            ("chat", "m", "-m", "hi", "--gateway", gateway.url),
            ("routes",),
        ):
            refused = await shared_fleet.ctl(*words)
            assert refused.code != 0
            assert UNTRUSTED in refused.err
            assert "--gateway-ca FILE" in refused.err
            done = await shared_fleet.ctl(*words, *trust)
            assert (done.code, done.err) == (0, "")
        logs = await shared_fleet.ctl("logs", "gateway")
        assert UNTRUSTED in logs.err
        assert (await shared_fleet.ctl("logs", "gateway", *trust)).code == 0
        top = ("top", "models", "--over", "0.5s")
        assert UNTRUSTED in (await shared_fleet.ctl(*top)).err
        assert UNTRUSTED not in (await shared_fleet.ctl(*top, *trust)).err
        assert f"{UNTRUSTED} (" in (await shared_fleet.ctl("doctor")).out
        found = (await shared_fleet.ctl("doctor", *trust)).out
        assert "1 of 1 gateways answer" in found
        stranger = Authority(tmp_path, "stranger").certificate
        wrong = await shared_fleet.ctl("routes", "--gateway-ca", str(stranger))
        assert UNTRUSTED in wrong.err


async def test_an_unusable_file_is_refused(shared_fleet: MemoryFleet, tmp_path: Path) -> None:
    file = tmp_path / "ca.pem"
    file.write_text("no certificate")
    words = ("chat", "m", "-m", "hi", "--gateway", "https://127.0.0.1:9", "--gateway-ca", str(file))
    done = await shared_fleet.ctl(*words)
    assert done.code == 1
    assert f"--gateway-ca: {file} holds no certificate of an authority" in done.err
