"""An endpoint counts only on the node that has its replica; without replicas to compare, every endpoint counts."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from typing_extensions import override

from gateway.limits import GatewayLimits
from gateway.state.endpoint_filter import EndpointFilter, EngineAccess
from gateway.state.table_cache import TableCache
from identity.credentials import Credentials
from identity.names import Role
from machinery.clock import SystemClock
from schemas.replica import Endpoint, publisher_of, unassigned_reason
from schemas.trust import TlsMode
from store import codec, keys
from store.errors import PermissionDeniedError
from store.memory import MemoryTransport
from store.port import Delete, KeyValue, Listing, Put, Transport
from tests.support.clock import FakeClock
from tests.support.gateway_engine_scripts import echo
from tests.support.gateway_fake_engine import FakeEngine, running
from tests.support.gateway_world import (
    World,
    deployment,
    endpoint,
    published,
    replica_of,
    running_gateway,
)
from tests.support.identities import TestAuthority
from tests.support.waiting import until

VICTIM = endpoint("m-0", "m", "http://127.0.0.1:4100", node="mac-1")


def by(node: str, name: str = "m-0", of: str = "m", port: int = 4666) -> Endpoint:
    """Return an endpoint that a node's agent publishes."""
    return endpoint(name, of, f"http://127.0.0.1:{port}", node=node)


@pytest.mark.parametrize(
    ("stolen", "reason"),
    [
        (VICTIM, ""),
        (by("mac-2"), "replica m-0 is assigned to node mac-1, not to mac-2"),
        (by("mac-1", of="n"), "replica m-0 belongs to deployment m, not to n"),
    ],
)
def test_why_an_endpoint_does_not_speak_for_its_replica(stolen: Endpoint, reason: str) -> None:
    assert unassigned_reason(stolen, publisher_of(replica_of(VICTIM))) == reason


def test_endpoints_of_earlier_or_missing_replicas_do_not_count() -> None:
    replica = replica_of(VICTIM)
    later = replica.model_copy(
        update={"metadata": replica.metadata.model_copy(update={"uid": "later"})}
    )
    assert unassigned_reason(VICTIM, publisher_of(later)) == "it is of an earlier replica m-0"
    assert unassigned_reason(VICTIM, None) == "there is no replica m-0"


async def steal(world: World, *endpoints: Endpoint) -> None:
    """Write endpoints as an agent does, without replicas."""
    puts = [
        Put(key=keys.endpoint_key(one.spec.node, one.name), value=codec.encode(one))
        for one in endpoints
    ]
    await world.transport.commit([], [*puts])


@asynccontextmanager
async def keeping(
    transport: Transport, clock: FakeClock | SystemClock | None = None
) -> AsyncIterator[TableCache]:
    table_cache = TableCache(transport, clock or FakeClock())
    async with asyncio.TaskGroup() as group:
        task = group.create_task(table_cache.run())
        await until(lambda: table_cache.is_synced, what="the first list")
        yield table_cache
        task.cancel()


def ports(table_cache: TableCache, name: str = "m") -> list[int]:
    """Return the ports of all endpoints of the model, orphans included."""
    backends = table_cache.table.models[name].backends
    return [t.origin.port for b in backends for t in (*b.leased, *b.orphans)]


async def test_a_stolen_agent_takes_no_request_of_another_nodes_replica(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        running(FakeEngine("m-0", echo)) as victim,
        running(FakeEngine("m-0", echo)) as thief,
        running_gateway(world.transport, GatewayLimits(drain_timeout_s=0)) as gateway,
    ):
        await world.put(deployment("m"), published(victim, "m"))
        await gateway.knows("m", ready=1)
        # The last writer of a name would win, and a further name would get its share.
        await steal(world, by("mac-2", port=thief.port), by("mac-2", name="m-1", port=thief.port))
        await until(lambda: gateway.gateway.table_cache.table.refused == 2, what="the refusals")
        for _ in range(20):
            url = f"{gateway.url}/v1/completions"
            async with gateway.http.post(url, json={"model": "m"}) as answer:
                assert answer.status == 200
        assert (len(victim.calls), len(thief.calls)) == (20, 0)
        async with gateway.get("/metrics") as answer:
            assert "fleet_gateway_endpoints_refused 2\n" in await answer.text()
        async with gateway.get("/health") as answer:
            assert (await answer.json())["endpointsRefused"] == 2
    told = [(r.key, r.why) for r in caplog.records if r.message == "endpoint ignored"]  # type: ignore[attr-defined]  # extra
    assert told == [
        (keys.endpoint_key("mac-2", "m-0"), "replica m-0 is assigned to node mac-1, not to mac-2"),
        (keys.endpoint_key("mac-2", "m-1"), "there is no replica m-1"),
    ]


async def test_a_replica_that_moves_takes_its_endpoint_along(world: World) -> None:
    await world.put(deployment("m"), VICTIM)
    async with keeping(world.transport) as table_cache:
        assert ports(table_cache) == [4100]
        await world.transport.commit([], [codec.put_spec(replica_of(by("mac-2")))])
        # Its node still publishes it, and is not asked as a last resort either.
        await until(lambda: not ports(table_cache), what="the end on the old node")
        await steal(world, by("mac-2"))
        await until(lambda: ports(table_cache) == [4666], what="the endpoint on the new node")


async def test_an_endpoint_whose_mac_goes_to_sleep_is_not_even_a_last_resort(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    await world.put(deployment("m"), VICTIM)
    async with keeping(world.transport) as table_cache:
        assert ports(table_cache) == [4100]
        spec = VICTIM.spec.model_copy(update={"is_leaving": True})
        await steal(world, VICTIM.model_copy(update={"spec": spec}))
        await until(lambda: not ports(table_cache), what="the end of its requests")
        key = keys.endpoint_key("mac-1", "m-0")
        await world.transport.commit([], [Delete(key=key)])
        await until(lambda: not table_cache.known().endpoints, what="the end of the lease")
        assert ports(table_cache) == []
        await steal(world, VICTIM)
        await until(lambda: ports(table_cache) == [4100], what="the endpoint after a wake")
    assert "endpoint ignored" not in caplog.text


async def test_refused_endpoints_are_not_saved(world: World) -> None:
    await world.put(deployment("m"), VICTIM)
    await steal(world, by("mac-2"))
    async with keeping(world.transport) as table_cache:
        assert set(table_cache.known().endpoints) == {keys.endpoint_key("mac-1", "m-0")}


class OldRole(MemoryTransport):
    """A store whose role of gateways may not read replicas."""

    is_old = True

    def _check(self, key: str) -> None:
        if self.is_old and key.startswith(keys.spec_prefix("Replica")):
            raise PermissionDeniedError("etcd refuses user 'fleet-gateway'")

    @override
    async def pages(self, prefix: str) -> AsyncGenerator[Listing]:
        self._check(prefix)
        async for page in super().pages(prefix):
            yield page

    @override
    async def get(self, key: str) -> KeyValue | None:
        self._check(key)
        return await super().get(key)


async def test_a_gateway_that_may_not_read_replicas_uses_every_endpoint_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    transport = OldRole(SystemClock())
    world = World(transport)
    await world.put(deployment("m"))
    await steal(world, VICTIM)
    async with keeping(transport, SystemClock()) as table_cache:
        assert ports(table_cache) == [4100]
        assert "run `fleetctl init-auth` again" in caplog.text
        # As soon as it may, it looks.
        transport.is_old = False
        await until(lambda: not ports(table_cache), what="the check")
        assert table_cache.table.refused == 1


async def test_a_gateway_that_loses_the_right_to_read_replicas_uses_new_endpoints() -> None:
    transport = OldRole(SystemClock())
    transport.is_old = False
    world = World(transport)
    await world.put(deployment("m"), VICTIM)
    clock = FakeClock()
    async with keeping(transport, clock) as table_cache:
        transport.is_old = True
        await steal(world, by("mac-3", name="m-1"))
        await until(lambda: table_cache.table.refused == 1, what="the refusal")
        await clock.advance(15)
        await until(lambda: sorted(ports(table_cache)) == [4100, 4666], what="the endpoint")


def why_ignored(
    access: Path | EngineAccess | None,
    url: str,
    caplog: pytest.LogCaptureFixture,
    writer: str = "mac-1",
) -> str:
    """Return why a gateway with that access or folder ignores an endpoint of node mac-1; empty if it uses it."""
    if not isinstance(access, EngineAccess):
        access = EngineAccess(sockets=access)
    endpoint_filter = EndpointFilter(
        MemoryTransport(FakeClock()), FakeClock(), lambda _: None, access
    )
    key = keys.endpoint_key(writer, "m-0")
    endpoint_filter.filter({key: (endpoint("m-0", "m", url, node="mac-1"), 1)})
    told = [r.why for r in caplog.records if r.message == "endpoint ignored"]  # type: ignore[attr-defined]  # extra
    assert (len(endpoint_filter.used), len(endpoint_filter.refused)) == ((0, 1) if told else (1, 0))
    return told[0] if told else ""


def test_an_agent_speaks_for_its_own_node_only(caplog: pytest.LogCaptureFixture) -> None:
    why = why_ignored(None, "http://127.0.0.1:4100", caplog, writer="mac-2")
    assert why == "it was written below the key of another node"


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        pytest.param("ftp:/tmp/x", "is not https://HOST:PORT, http://HOST:PORT or unix:/PATH", id="no-url"),
        pytest.param("unix:{0}/mac-1/4100.sock", "", id="its-node"),
        pytest.param("unix:/var/run/docker.sock", "is not in {0}/mac-1, the folder of node mac-1", id="docker"),
        pytest.param("unix:{0}/mac-2/4100.sock", "is not in {0}/mac-1", id="of-another-node"),
        pytest.param("unix:{0}/mac-1/../../s", "http://HOST:PORT or unix:/PATH", id="dots"),
        pytest.param("unix:{0}/mac-1/deeper/s", "is not in {0}/mac-1", id="deeper"),
    ],
)  # fmt: skip
def test_an_agent_can_publish_sockets_of_its_own_folder_only(
    short_folder: Path, caplog: pytest.LogCaptureFixture, url: str, reason: str
) -> None:
    for node in ("mac-1", "mac-2"):
        (short_folder / node).mkdir(mode=0o700)
    assert reason.format(short_folder) in why_ignored(
        short_folder, url.format(short_folder), caplog
    )
    assert bool(reason) == bool(caplog.records)


async def test_a_stolen_agent_leads_no_request_to_another_program_of_the_gateways_machine(
    short_folder: Path,
) -> None:
    sockets, own = short_folder / "s", short_folder / "s" / "mac-1" / "4100.sock"
    own.parent.mkdir(mode=0o700, parents=True)
    limits = GatewayLimits(drain_timeout_s=0, engine_sockets=sockets)
    async with (
        running(FakeEngine("m-0", echo, path=own)) as engine,
        running(FakeEngine("m-1", echo, path=short_folder / "docker.sock")) as docker,
        running_gateway(limits=limits) as gateway,
    ):
        stolen = endpoint("m-1", "m", f"unix:{docker.path}", node="mac-1")
        await gateway.world.put(
            deployment("m"), endpoint("m-0", "m", f"unix:{own}", node="mac-1"), stolen
        )
        await gateway.knows("m", ready=1)
        await until(lambda: gateway.gateway.table_cache.table.refused == 1, what="the refusal")
        for _ in range(5):
            async with gateway.post("/v1/completions", json={"model": "m"}) as answer:
                assert answer.status == 200
        assert {call.headers["host"] for call in engine.calls} == {"localhost"}
        assert (len(engine.calls), docker.connections) == (5, 0)
        # Its next process listens at the same path.
        await engine.kill()
        own.unlink(missing_ok=True)
        await engine.start()
        async with gateway.post("/v1/completions", json={"model": "m"}) as answer:
            assert answer.status == 200


def test_a_gateway_on_another_machine_ignores_sockets(
    short_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    why = why_ignored(None, "unix:/s/mac-1/4100.sock", caplog)
    assert "only a gateway there with --engine-sockets can use it" in why
    # Its own folder may have the same path.
    caplog.clear()
    why = why_ignored(short_folder, f"unix:{short_folder}/mac-1/4100.sock", caplog)
    assert "it runs on another machine" in why


def test_a_folder_that_other_users_may_enter_is_not_trusted(
    short_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (short_folder / "mac-1").mkdir()
    (short_folder / "mac-1").chmod(0o750)
    assert "is open to other users" in why_ignored(
        short_folder, f"unix:{short_folder}/mac-1/s", caplog
    )


PLAIN, TLS = "http://10.0.0.5:4100", "https://10.0.0.5:4100"


@pytest.mark.parametrize(
    ("mode", "url", "reason"),
    [
        (None, PLAIN, ""),
        (None, TLS, "this gateway has no identity"),
        (TlsMode.PERMISSIVE, PLAIN, ""),
        (TlsMode.PERMISSIVE, TLS, ""),
        (TlsMode.TLS, PLAIN, ""),
        (TlsMode.STRICT, TLS, ""),
        (TlsMode.STRICT, PLAIN, "the fleet's TLS mode is strict"),
        (TlsMode.STRICT, "http://mac-1.local:4100", "the fleet's TLS mode is strict"),
        (TlsMode.STRICT, "http://127.0.0.1:4100", ""),
        (TlsMode.STRICT, "http://[::1]:4100", ""),
        (TlsMode.STRICT, "http://localhost:4100", ""),
    ],
)
def test_the_mode_decides_about_engines_without_tls(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: TlsMode | None, url: str, reason: str
) -> None:
    credentials = None
    if mode is not None:
        fleet = TestAuthority(tmp_path)
        folder = fleet.issue(Role.GATEWAY, "edge")
        folder.write_trust(fleet.snapshot(mode=mode))
        credentials = Credentials(folder, SystemClock())
    why = why_ignored(EngineAccess(credentials=credentials), url, caplog)
    assert reason in why
    assert bool(reason) == bool(why)
