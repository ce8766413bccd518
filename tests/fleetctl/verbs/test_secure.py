"""`fleetctl secure`: the authority, the status of processes, and the steps of the TLS mode."""

import asyncio
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from identity.authority import identity_of, load_certificate
from identity.folder import IdentityFolder
from identity.names import Role
from schemas.meta import ObjectMeta
from schemas.node import NodeLease
from schemas.records import GatewayLease, ReconcilerLease
from schemas.replica import Endpoint, EndpointSpec
from schemas.trust import FleetTrust, TlsMode, TlsReport
from store import codec, keys
from store.port import Put
from tests.support.fleetctl_runner import MemoryFleet

FLEET = "0123456789abcdef0123456789abcdef"
NODE, GATEWAY = keys.node_lease_key("mac-1"), keys.named(keys.GATEWAY_LEASE_PREFIX, "edge")
RECONCILER = keys.named(keys.RECONCILER_LEASE_PREFIX, "4711")
BRIEF = "--timeout=0s"


async def put(fleet: MemoryFleet, key: str, document: object) -> None:
    assert isinstance(document, NodeLease | GatewayLease | ReconcilerLease | FleetTrust | Endpoint)
    value = (
        codec.encode_spec(document) if isinstance(document, Endpoint) else codec.encode(document)
    )
    await fleet.store.commit([], [Put(key=key, value=value)])


async def mode_of(fleet: MemoryFleet) -> TlsMode:
    item = await fleet.store.get(keys.FLEET_TRUST)
    assert item is not None
    return codec.decode(FleetTrust, item).mode


async def report(fleet: MemoryFleet, mode: TlsMode | None) -> None:
    """Write the leases of an agent, a gateway and a reconciler that follow the mode; None: without a certificate."""

    def tls(name: str) -> TlsReport | None:
        if mode is None:
            return None
        return TlsReport(identity=f"mlxfleet://{FLEET}/{name}", mode=mode)

    await put(fleet, NODE, NodeLease(uid="u", session="s", tls=tls("node/mac-1")))
    url = "http://10.0.0.5:4000"
    await put(fleet, GATEWAY, GatewayLease(url=url, version="1", tls=tls("gateway/edge")))
    await put(
        fleet, RECONCILER, ReconcilerLease(identity="mac-1/7 1.0", tls=tls("reconciler/mac-1"))
    )


async def publish(fleet: MemoryFleet, url: str) -> None:
    spec = EndpointSpec(
        deployment="tiny", replica_uid="u", node="mac-1", url=url, served_names=("tiny",)
    )
    endpoint = Endpoint(metadata=ObjectMeta(name="tiny-0"), spec=spec)
    await put(fleet, keys.endpoint_key("mac-1", "tiny-0"), endpoint)


@asynccontextmanager
async def following(fleet: MemoryFleet) -> AsyncIterator[list[TlsMode]]:
    """Let the processes follow the mode a moment after it has changed; yield the modes that they saw."""
    tls_modes: list[TlsMode] = []

    async def follow() -> None:
        while True:
            mode = await mode_of(fleet)
            if [mode] != tls_modes[-1:]:
                await asyncio.sleep(0.1)
                tls_modes.append(mode)
                await report(fleet, mode)
            await asyncio.sleep(0.02)

    async with asyncio.TaskGroup() as group:
        task = group.create_task(follow())
        yield tls_modes
        task.cancel()


@pytest.fixture
async def secured(fleet: MemoryFleet) -> MemoryFleet:
    await put(fleet, keys.FLEET_TRUST, FleetTrust(fleet=FLEET, authorities="-"))
    return fleet


async def test_the_authority_is_made_once(fleet: MemoryFleet, tmp_path: Path) -> None:
    folder = tmp_path / "authority"
    made = await fleet.ctl("secure", "--authority-dir", str(folder))
    assert made.code == 0, made.err
    assert f"made in {folder}; TLS mode permissive" in made.out
    key = folder / "ca.key"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    admin = IdentityFolder(folder / "admin")
    assert identity_of(load_certificate(admin.certificate())).role is Role.ADMIN
    before = key.read_bytes(), admin.read_identity()
    again = await fleet.ctl("secure", "--authority-dir", str(folder))
    assert f"unchanged in {folder}" in again.out
    assert (key.read_bytes(), admin.read_identity()) == before
    other = await fleet.ctl("secure", "--authority-dir", str(tmp_path / "other"))
    assert other.code == 1
    assert "Give the folder that belongs to the store" in other.err


async def test_plain_engines_keep_the_fleet_from_strict(secured: MemoryFleet) -> None:
    await publish(secured, "http://10.0.0.5:4100")
    async with following(secured):
        refused = await secured.ctl("secure", "--mode", "strict", "--timeout=1s")
        assert refused.code == 1
        assert "the TLS mode stays tls; 1 part is not ready for strict" in refused.err
        assert "fleetctl rollout restart modeldeployment/tiny" in refused.err
        for url in ("unix:/sock/mac-1/4100.sock", "http://127.0.0.1:4100", "https://10.0.0.5:4100"):
            await publish(secured, url)
            status = await secured.ctl("secure", "status")
            assert "ready: fleetctl secure --mode strict" in status.out, url


@pytest.mark.ci
async def test_the_mode_moves_step_by_step_in_both_directions(secured: MemoryFleet) -> None:
    async with following(secured) as modes:
        for wanted in (TlsMode.STRICT, TlsMode.PERMISSIVE):
            done = await secured.ctl("secure", "--mode", str(wanted))
            assert done.code == 0, done.err
            assert done.out.endswith(f"every process follows TLS mode {wanted}\n")
    steps = [TlsMode.PERMISSIVE, TlsMode.TLS, TlsMode.STRICT, TlsMode.TLS, TlsMode.PERMISSIVE]
    assert modes == steps


async def test_the_way_back_does_not_need_every_process(secured: MemoryFleet) -> None:
    trust = FleetTrust(fleet=FLEET, authorities="-", mode=TlsMode.TLS)
    await put(secured, keys.FLEET_TRUST, trust)
    await report(secured, TlsMode.TLS)
    stuck = await secured.ctl("secure", "--mode", "permissive", BRIEF)
    assert stuck.code == 0, stuck.err
    assert "warning: 3 parts are not following after 0 s" in stuck.out
    assert await mode_of(secured) is TlsMode.PERMISSIVE
