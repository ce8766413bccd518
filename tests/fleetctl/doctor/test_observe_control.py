"""The doctor's observation of the control plane, at a real etcd."""

import asyncio
import json
from datetime import timedelta
from pathlib import Path

from fleetctl.doctor import observe_control
from fleetctl.doctor.observe_control import exposed_urls
from insight.doctor.control_plane import ForeignEndpoint
from schemas.meta import ManagedFieldsEntry, ObjectMeta
from schemas.pools import NodePool, NodePoolSpec, NodePoolStatus
from store import codec, keys
from store.etcd.address import EtcdAddress
from store.memory import MemoryTransport
from store.port import Delete, Put, Transport
from tests.support.clock import FakeClock
from tests.support.fleet import Fleet, fleetctl
from tests.support.gateway_world import endpoint
from tests.support.nodeagent_plans import wanted
from tests.support.tcp_server import tcp_server

STOLEN = keys.endpoint_key("mac-2", "qwen-0")


async def doctor(shared: Fleet) -> dict[str, list[dict[str, str]]]:
    done = await fleetctl("doctor", "--etcd", str(shared.etcd.address), "-o", "json")
    found: dict[str, list[dict[str, str]]] = {}
    for load in json.loads(done.out)["findings"]:
        found.setdefault(load["check"], []).append(load)
    return found


async def test_an_endpoint_of_a_stolen_agent_fails(shared: Fleet, transport: Transport) -> None:
    key, replica = keys.endpoint_key("a", "qwen-0"), wanted()
    own = endpoint("qwen-0", "qwen", "http://127.0.0.1:4100", node="a")
    spec = own.spec.model_copy(update={"replica_uid": replica.metadata.uid})
    own = own.model_copy(update={"spec": spec})
    value = codec.encode(own)
    await transport.commit([], [codec.put_spec(replica), Put(key=key, value=value)])
    reading = await observe_control.read_control(transport, ())
    assert reading.is_settled, reading.foreign
    stolen = own.model_copy(update={"spec": spec.model_copy(update={"node": "mac-2"})})
    for written, reason in (
        (codec.encode(stolen), "replica qwen-0 is assigned to node a, not to mac-2"),
        (value, "it was written below the key of another node"),
    ):
        await transport.commit([], [Put(key=STOLEN, value=written)])
        reading = await observe_control.read_control(transport, ())
        assert reading.foreign == {ForeignEndpoint(replica="qwen-0", node="mac-2", reason=reason)}
    await transport.commit([], [Put(key=STOLEN, value=b"{}")])
    (unreadable,) = (await observe_control.read_control(transport, ())).foreign
    assert "it cannot be read" in unreadable.reason
    await transport.commit([], [Delete(key=key), Delete(key=STOLEN)])


async def test_a_change_that_no_reconciler_observes_fails(
    shared: Fleet, transport: Transport
) -> None:
    pool = NodePool(
        metadata=ObjectMeta(name="frozen", generation=2), spec=NodePoolSpec(nodes=("a",))
    )
    status = Put(
        key=keys.status_key("NodePool", "frozen"),
        value=codec.encode(NodePoolStatus(observed_generation=1)),
    )
    # The lease of a leader that etcd has locked out.
    leader = Put(key=keys.ELECTION_RECONCILER, value=b"vm/7 0.1.0")
    await transport.commit([], [codec.put_spec(pool), status, leader])
    (found,) = (await doctor(shared))["leader"]
    assert found["level"] == "FAIL"
    assert (
        "does not act: it has not observed nodepool/frozen (generation 2, observed 1"
        in found["message"]
    )
    gone = (keys.spec_key("NodePool", "frozen"), status.key, leader.key)
    await transport.commit([], [Delete(key=key) for key in gone])


async def test_the_quota_of_an_embedded_etcd_is_on_its_command_line(
    shared: Fleet, tmp_path: Path
) -> None:
    store, address = MemoryTransport(FakeClock()), shared.etcd.address
    elsewhere = await observe_control.observe_etcd(store, address, tmp_path, is_writable=True)
    assert elsewhere.quota_bytes is None
    health = await observe_control.observe_etcd(
        store, address, shared.root / "etcd", is_writable=True
    )
    assert health.quota_bytes == 512 * 2**20
    assert 0 < (health.size_bytes or 0) < health.quota_bytes
    assert not health.is_nearly_full


def test_only_what_is_there_twice_is_confirmed() -> None:
    foreign_endpoint = ForeignEndpoint(replica="a-0", node="x", reason="y")
    other = ForeignEndpoint(replica="b-0", node="x", reason="y")
    first = observe_control.ControlReading(
        endpoints=2,
        foreign=frozenset({foreign_endpoint}),
        unobserved=frozenset({("nodepool/a", 2)}),
    )
    later = observe_control.ControlReading(
        endpoints=3,
        foreign=frozenset({foreign_endpoint, other}),
        unobserved=frozenset({("nodepool/a", 3), ("nodepool/b", 2)}),
    )
    assert first.confirm(later) == observe_control.ControlReading(
        endpoints=3, foreign=frozenset({foreign_endpoint}), unobserved=frozenset()
    )


def test_the_age_of_a_change_is_that_of_its_last_write() -> None:
    clock = FakeClock()
    entry = ManagedFieldsEntry(
        manager="fleetctl-scale", operation="Update", time=clock.now() - timedelta(seconds=226)
    )
    old = NodePoolStatus(observed_generation=1)
    pool = NodePool(
        metadata=ObjectMeta(name="desk", generation=2, managed_fields=(entry,)),
        spec=NodePoolSpec(),
        status=old,
    )
    reading = observe_control.ControlReading(
        endpoints=0, foreign=frozenset(), unobserved=frozenset({("nodepool/desk", 2)})
    )
    (change,) = observe_control.unobserved_changes(reading, [pool], clock)
    assert (change.generation, change.observed_generation, change.age_s) == (2, 1, 226)


async def test_a_quota_in_a_later_piece_of_the_metrics_is_found() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        body = b"# HELP other\n", b"etcd_server_quota_backend_bytes 5.36870912e+08\n"
        size = sum(map(len, body))
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size + body[0])
        await writer.drain()
        await asyncio.sleep(0.2)
        writer.write(body[1])
        await writer.drain()

    async with tcp_server(serve) as port:
        url = f"http://127.0.0.1:{port}"
        address = EtcdAddress(endpoints=(url,))
        assert await observe_control.fetch_quota(address, url) == 512 * 2**20


def test_only_an_etcd_that_other_machines_can_reach_is_exposed() -> None:
    urls = ("http://127.0.0.1:2379", "http://localhost:2379", "http://[::1]:2379")
    assert exposed_urls(EtcdAddress(endpoints=urls)) == ()
    assert exposed_urls(EtcdAddress(endpoints=(*urls, "http://mac-1.local:2379"))) == (
        "http://mac-1.local:2379",
    )
