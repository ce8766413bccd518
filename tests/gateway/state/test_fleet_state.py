"""Static stability: gateways serve and start without etcd."""

import asyncio
import signal
from pathlib import Path

import aiohttp
import pytest

from gateway.limits import GatewayLimits
from gateway.state.orphan_endpoints import ORPHAN_S
from gateway.state.persistence import KnownObjects, SnapshotFile
from gateway.state.table_cache import TableCache
from machinery.clock import SystemClock
from store import keys
from store.etcd.address import EtcdAddress
from store.etcd.connect import connect
from store.etcd.member.embedded import EmbeddedEtcd
from store.memory import MemoryTransport
from tests.support.clock import FakeClock
from tests.support.etcd import running_etcd
from tests.support.gateway_calls import gateway_process, put_api_key
from tests.support.gateway_engine_scripts import chat
from tests.support.gateway_fake_engine import FakeEngine, running
from tests.support.gateway_world import World, deployment, endpoint, published, running_gateway
from tests.support.ports import free_port
from tests.support.waiting import until, until_async

SECRET = "sk-fleet-abc"


async def kept(state_dir: Path, *engines: FakeEngine) -> None:
    """Save the state of a fleet with one deployment."""
    world = World(MemoryTransport(SystemClock()))
    await world.serve("m", *engines)
    await put_api_key(world, SECRET)
    limits = GatewayLimits(drain_timeout_s=0.0, asks_for_keys=True, state_dir=state_dir)
    async with running_gateway(world.transport, limits) as gateway:
        await gateway.knows("m", ready=len(engines))

        def is_written() -> bool:
            found = SnapshotFile(state_dir).read() if state_dir.exists() else None
            if found is None or len(found.known.endpoints) < len(engines):
                return False
            return found.keys is not None and bool(found.keys.keys)

        await until(is_written, what="the file")


async def test_a_gateway_starts_from_its_file(tmp_path: Path) -> None:
    nobody = connect(EtcdAddress(socket=tmp_path / "nobody"))
    state_dir = tmp_path / "state"
    limits = GatewayLimits(drain_timeout_s=0.0, asks_for_keys=True, state_dir=state_dir)
    async with running(FakeEngine("m-0", chat)) as one, running(FakeEngine("m-1", chat)) as two:
        await kept(state_dir, one, two)
        async with running_gateway(nobody, limits) as gateway:
            # No request is refused while the gateway still waits for the store.
            status, _, headers = await gateway.chat_with_key(SECRET)
            assert (status, headers["x-fleet-store"]) == (200, "stale")
            assert (await gateway.chat_with_key("other"))[0] == 401
            async with gateway.get("/health") as answer:
                said = await answer.json()
            assert (answer.status, said["source"], said["isStale"]) == (200, "snapshot", True)
            assert said["snapshotAgeSeconds"] >= 0
            assert said["status"].startswith("degraded: ")
            assert (said["endpoints"], said["endpointsKept"]) == (0, 2)
            async with gateway.get(
                "/api/ps", headers={"authorization": f"Bearer {SECRET}"}
            ) as answer:
                assert [one["name"] for one in (await answer.json())["models"]] == ["m"]
            assert gateway.gateway.table_cache.table.models["m"].kept() == 2
            # An endpoint that does not answer is left out, like an orphan.
            await one.kill()
            for _ in range(3):
                assert (await gateway.chat_with_key(SECRET))[0] == 200
            assert len(two.calls) >= 2
    await nobody.close()


async def test_the_store_wins_when_it_is_heard(tmp_path: Path) -> None:
    state_dir = tmp_path / "state"
    async with running(FakeEngine("m-0", chat)) as engine:
        await kept(state_dir, engine)
        world = World(MemoryTransport(SystemClock()))
        await world.put(deployment("other"))
        limits = GatewayLimits(drain_timeout_s=0.0, asks_for_keys=True, state_dir=state_dir)
        async with running_gateway(world.transport, limits) as gateway:
            await until(lambda: gateway.gateway.table_cache.source == "store", what="the store")
            assert set(gateway.gateway.table_cache.table.models) == {"other"}
            assert not gateway.gateway.fleet_state.keyring
            assert gateway.gateway.fleet_state.snapshot_age_s() is None


async def put_leased(etcd: EmbeddedEtcd, engine: FakeEngine) -> None:
    transport = connect(etcd.address)
    world = World(transport)
    await world.put(deployment("m"))
    await put_api_key(world, SECRET)
    lease = await transport.grant(60)
    await world.put(published(engine, "m"), lease=lease)
    await transport.close()


@pytest.mark.ci
@pytest.mark.etcd
async def test_etcd_dies_and_the_gateway_is_killed_and_started_again(
    tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    """Real processes: every request to a running gateway is answered, with etcd or without."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    state_dir = tmp_path / "state"

    async def answered() -> str:
        """Return the store's state in the response; empty if the port is closed."""
        headers = {"authorization": f"Bearer {SECRET}"}
        try:
            async with http.post(
                f"{url}/v1/completions", json={"model": "m"}, headers=headers
            ) as got:
                assert got.status in (200, 401, 404, 503), await got.text()
                return got.headers.get("x-fleet-store", "fresh") if got.status == 200 else ""
        except aiohttp.ClientConnectionError:
            return ""

    async def healthy(source: str) -> bool:
        async with http.get(f"{url}/health") as got:
            return bool((await got.json())["source"] == source)

    async with running(FakeEngine("m-0", chat)) as engine, running_etcd(tmp_path / "e") as etcd:
        flags = [
            *("--port", str(port), "--etcd", str(etcd.address)),
            *("--auth", "on", "--state-dir", str(state_dir)),
        ]
        await put_leased(etcd, engine)
        async with gateway_process(*flags) as first:
            assert await until_async(answered, what="the first gateway") == "fresh"

            def is_written() -> bool:
                found = SnapshotFile(state_dir).read() if state_dir.exists() else None
                return found is not None and bool(found.keys and found.known.endpoints)

            await until(is_written, what="the file")
            assert etcd.supervisor.pid is not None
            await etcd.supervisor.stop()
            assert await answered() == "fresh"
            first.send_signal(signal.SIGKILL)
            await first.wait()
        async with gateway_process(*flags):
            assert await until_async(answered, what="the second gateway") == "stale"
            assert await healthy("snapshot")
            async with http.post(f"{url}/v1/completions", json={"model": "m"}) as got:
                assert got.status == 401
            await etcd.start()

            async def is_back() -> bool:
                assert await answered() != ""
                return await healthy("store")

            await until_async(is_back, what="the store")


async def test_an_endpoint_of_the_saved_state_is_tried_again_after_a_while(tmp_path: Path) -> None:
    """While no report can tell that an engine is back, it is tried now and then."""
    nobody = connect(EtcdAddress(socket=tmp_path / "nobody"))
    clock = FakeClock()
    table_cache = TableCache(nobody, clock)
    leased = {keys.endpoint_key("mac-1", "m-0"): (endpoint("m-0", "m", "http://127.0.0.1:1"), 1)}
    async with asyncio.TaskGroup() as group:
        task = group.create_task(table_cache.run())
        table_cache.restore(KnownObjects(deployments={"m": deployment("m")}, endpoints=leased))

        def orphans() -> list[str]:
            model = table_cache.table.models.get("m")
            return [
                t.replica for backend in (model.backends if model else ()) for t in backend.orphans
            ]

        await until(lambda: orphans() == ["m-0"], what="the orphan")
        assert table_cache.table.models["m"].ready() == 0
        table_cache.drop_orphan(table_cache.table.models["m"].backends[0].orphans[0])
        await until(lambda: not orphans(), what="its end")
        dropped_s = clock.monotonic()

        async def is_back() -> bool:
            await clock.advance(1)
            return orphans() == ["m-0"]

        await until_async(is_back, what="its return")
        assert clock.monotonic() - dropped_s >= 30
        # Time does not count while no report is possible.
        for _ in range(3):
            await clock.advance(ORPHAN_S)
            assert orphans() == ["m-0"]
        task.cancel()
    await nobody.close()
