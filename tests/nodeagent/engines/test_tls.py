"""TLS between an agent and its engines: configuration, adoption, health over TLS, and the URL that the mode asks for."""

from pathlib import Path

import pytest

from identity.credentials import Credentials
from identity.names import Role
from machinery.clock import SystemClock
from nodeagent.engines import engine_processes
from nodeagent.engines.engine_processes import EngineOrder
from nodeagent.engines.health_client import HealthClient
from nodeagent.engines.tls import NodeTls
from schemas.trust import TlsMode
from schemas.wire.engine_address import EngineAddress
from schemas.wire.engine_config import EngineConfig, EngineIdentity
from tests.support.clock import FakeClock
from tests.support.identities import TestAuthority
from tests.support.tls_engine import HOST, on_loop, serving_tls
from tests.support.values import present

PLAIN = EngineAddress(HOST, 4100)
TLS = EngineAddress(HOST, 4100, "", "mac-1")
ORDER = EngineOrder(config=EngineConfig(model_dir=Path("/models/tiny"), replica="tiny-0"))


@pytest.fixture
def fleet(tmp_path: Path) -> TestAuthority:
    return TestAuthority(tmp_path / "ours")


@pytest.mark.parametrize(
    ("folder", "address"), [(None, PLAIN), (Path("/state/identity"), TLS)], ids=["plain", "tls"]
)
def test_an_adopted_engine_is_dialled_as_it_was_started(
    folder: Path | None, address: EngineAddress
) -> None:
    config = engine_processes.place(ORDER, node="mac-1", address=PLAIN, identity_dir=folder)
    assert config.identity_dir == folder
    identity = present(
        EngineIdentity.from_argv(["python", "-m", "engine", *config.identity.to_argv()])
    )
    assert identity.address == config.address == address


def test_an_engine_on_a_socket_needs_no_identity() -> None:
    address = EngineAddress.at_socket(Path("/s/4100.sock"))
    config = engine_processes.place(
        ORDER, node="mac-1", address=address, identity_dir=Path("/state/identity")
    )
    assert (config.identity_dir, config.address) == (None, address)


async def test_the_mode_decides_how_gateways_dial_and_engines_have_time_to_follow(
    fleet: TestAuthority,
) -> None:
    clock, folder = FakeClock(), fleet.issue(Role.NODE, "mac-1")
    credentials = Credentials(folder, clock)
    tls = NodeTls(credentials, clock)
    assert tls.advertised(TLS) == PLAIN
    for mode in (TlsMode.TLS, TlsMode.STRICT):
        folder.write_trust(fleet.snapshot(mode=mode))
        credentials.refresh()
        assert tls.advertised(TLS) == TLS
        assert tls.advertised(PLAIN) == PLAIN  # of an engine without an identity
    folder.write_trust(fleet.snapshot(mode=TlsMode.PERMISSIVE))
    credentials.refresh()
    assert tls.advertised(TLS) == TLS
    await clock.advance(5)
    assert tls.advertised(TLS) == PLAIN


@on_loop
async def test_health_is_asked_over_tls_of_the_own_node_only(fleet: TestAuthority) -> None:
    folder = fleet.issue(Role.NODE, "mac-1")
    folder.write_trust(fleet.snapshot(mode=TlsMode.STRICT))
    client = HealthClient(NodeTls(Credentials(folder, SystemClock()), SystemClock()))
    plain = HealthClient()
    try:
        async with (
            serving_tls(folder) as engine,
            serving_tls(fleet.issue(Role.NODE, "mac-2")) as other,
        ):
            for tls_engine in (engine, other):
                tls_engine.health_body = {"state": "Ready", "replicaUid": "u1"}
            address = EngineAddress(HOST, engine.port, "", "mac-1")
            health = present(await client.ask(address, "u1"))
            assert health.state == "Ready"
            assert await plain.ask(address, "u1") is None
            assert await client.ask(EngineAddress(HOST, other.port, "", "mac-1"), "u1") is None
            assert engine.refused == {"Plain": 1}
    finally:
        await client.close()
        await plain.close()
