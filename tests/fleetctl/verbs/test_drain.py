"""`fleetctl drain` on a real etcd: what it writes, what it waits for, and what it prints when that fails."""

import asyncio

import pytest

from machinery.clock import SystemClock
from schemas.deployment import ModelDeploymentStatus
from schemas.meta import ObjectMeta
from schemas.node import Node
from schemas.replica import Replica
from store import codec, keys, objects
from store.etcd.connect import connect
from store.port import Delete, Operation, Put, Transport
from tests.support.fleet import Fleet
from tests.support.fleetctl_manifests import put_replica
from tests.support.fleetctl_runner import MemoryFleet
from tests.support.fleetctl_stream import streaming
from tests.support.reconciler_agents import FakeAgent, put_lease, put_node
from tests.support.world import GIB, PROOF, deployment

pytestmark = [pytest.mark.etcd, pytest.mark.timeout(120)]


async def fleet_of(
    shared_transport: Transport,
    name: str,
    nodes: tuple[str, ...],
    *,
    replicas: int = 1,
    min_available: int | str = 0,
) -> None:
    """Write nodes, and a deployment with all replicas ready on the first of them."""
    owner = deployment(name=name, replicas=replicas, min_available=min_available)
    status = ModelDeploymentStatus(ready_replicas=replicas, desired_replicas=replicas)
    key = keys.status_key("ModelDeployment", name)
    puts: list[Operation] = [codec.put_spec(owner), Put(key=key, value=codec.encode(status))]
    for node in nodes:
        spec = Node(metadata=ObjectMeta(name=node, uid=f"uid-{node}", generation=1))
        puts += [put_node(node), put_lease(node), codec.put_spec(spec)]
    puts += [put_replica(owner, ordinal, nodes[0]) for ordinal in range(replicas)]
    await shared_transport.commit([], puts)


async def test_a_drain_writes_the_spec_and_waits(shared: Fleet, transport: Transport) -> None:
    await fleet_of(transport, "goes", ("from-1", "to-1"), replicas=2)
    async with streaming(shared, "drain", "from-1") as running:
        expected = [await running.line() for _ in range(3)]
        assert expected == [
            "node/from-1 cordoned\n",
            "evicting replica/goes-0\n",
            "evicting replica/goes-1\n",
        ]
        node = await objects.get(transport, Node, "from-1")
        assert node is not None
        assert (node.spec.unschedulable, node.spec.draining, node.metadata.generation) == (
            True,
            True,
            2,
        )
        owner = deployment(name="goes")
        await transport.commit([], [put_replica(owner, 0, "to-1")])
        assert await running.line() == "replica/goes-0 evicted\n"
        await transport.commit([], [Delete(key=keys.spec_key("Replica", "goes-1"))])
        assert await running.line() == "replica/goes-1 evicted\n"
        assert await running.line() == "node/from-1 drained\n"
        assert await running.ended() == 0
    listed = await shared.ctl("get", "node", "from-1")
    assert "Ready,Cordoned,Draining" in listed.out
    again = await shared.ctl("drain", "from-1", "--timeout", "5s")
    assert (again.code, again.out) == (0, "node/from-1 already cordoned\nnode/from-1 drained\n")
    back = await shared.ctl("uncordon", "from-1")
    assert back.out == "node/from-1 uncordoned\n"
    node = await objects.get(transport, Node, "from-1")
    assert node is not None
    assert (node.spec.unschedulable, node.spec.draining) == (False, False)


async def test_an_unknown_node_is_answered_with_all_that_are_near() -> None:
    fleet = MemoryFleet()
    await fleet.store.commit([], [put_node(f"node-{number}") for number in (1, 2, 3)])
    lists = "`fleetctl get nodes` lists them\n"
    for name, hint in (("node-9", "; did you mean node-3 or node-2 or node-1?"), ("zzz", ".")):
        done = await fleet.ctl("drain", name)
        assert (done.code, done.err) == (1, f'error: nodes "{name}" not found{hint} {lists}')


async def test_ctrl_c_ends_the_wait_but_not_the_drain(shared: Fleet, transport: Transport) -> None:
    await fleet_of(transport, "stays", ("stop-1",))
    async with streaming(shared, "drain", "stop-1") as running:
        while not (await running.line()).startswith("evicting"):
            pass
        running.interrupt()
        assert await running.line() == (
            "error: interrupted; the drain of stop-1 continues. `fleetctl uncordon stop-1` ends it\n"
        )
        assert await running.ended() == 130
    node = await objects.get(transport, Node, "stop-1")
    assert node is not None
    assert node.spec.draining


@pytest.mark.ci
async def test_a_drain_that_another_user_ends(shared: Fleet, transport: Transport) -> None:
    await fleet_of(transport, "kept", ("ended-1",))
    async with streaming(shared, "drain", "ended-1") as running:
        while not (await running.line()).startswith("evicting"):
            pass
        assert (await shared.ctl("uncordon", "ended-1")).code == 0
        assert await running.line() == (
            "error: the drain of node/ended-1 was ended by another user: spec.draining is no "
            "longer set\n"
        )
        assert await running.ended() == 1


async def test_replicas_that_cannot_move_are_reported_with_reasons(store: Fleet) -> None:
    """Use a separate fleet: nodes of other tests could take the replicas."""
    shared_transport = connect(store.etcd.address)
    await fleet_of(shared_transport, "held", ("only", "full"), replicas=1, min_available="100%")
    big = deployment(name="big", memory="7Gi")
    memory = PROOF.model_copy(update={"override_bytes": 7 * GIB})
    await shared_transport.commit(
        [], [codec.put_spec(big), put_replica(big, 0, "full", memory=memory)]
    )
    done = await store.ctl("drain", "only", "--timeout", "300ms")
    assert done.code == 1
    line = "0/2 nodes fit: 1 short of memory (need 2.8 GiB, best has 1.0 GiB), 1 draining"
    held = "minAvailable is 100% with 1 of 1 replicas ready. Free memory on other nodes, or lower spec.minAvailable"
    assert done.err.splitlines() == [
        "warning: 1 of 1 replica of modeldeployment/held cannot be moved: no node accepts a "
        f"replacement ({line}), and {held}",
        "error: timed out after 0.3 s: 1 replica is still on only",
        f"  replica/held-0: no node accepts a replacement ({line}), and {held}",
        "  no reconciler is running: start fleet-reconciler, which moves replicas",
        "The drain continues; `fleetctl uncordon only` ends it",
    ]
    quiet = await store.ctl("drain", "full", "--no-wait")
    assert (quiet.code, quiet.out) == (0, "node/full cordoned\nevicting replica/big-0\n")
    await shared_transport.close()


@pytest.mark.ci
async def test_a_real_reconciler_moves_replicas_away(store: Fleet) -> None:
    store.start_reconciler()
    shared_transport, clock = connect(store.etcd.address), SystemClock()
    async with asyncio.TaskGroup() as group:
        agents = [
            group.create_task(FakeAgent(shared_transport, clock, name).run())
            for name in ("a", "b", "c")
        ]
        await store.joined(3)
        manifest = (
            "apiVersion: fleet/v1alpha1\nkind: ModelDeployment\nmetadata: {name: qwen}\n"
            "spec: {model: {path: qwen}, replicas: 2, minAvailable: 2, contextLength: 1024}\n"
        )
        await store.applied(manifest)
        await store.available("qwen")
        rolled = await store.ctl("rollout", "status", "qwen", "--timeout", "30s")
        assert rolled.out.splitlines()[-1] == 'modeldeployment "qwen" successfully rolled out'
        there = await objects.list_all(shared_transport, Replica)
        node = there[0].spec.ranks[0].node
        done = await store.ctl("drain", node, "--timeout", "40s")
        assert done.code == 0, done.err + store.words()
        assert f"replica/{there[0].name} evicted\n" in done.out
        assert done.out.endswith(f"node/{node} drained\n")
        await store.available("qwen")
        assert node not in {
            r.spec.ranks[0].node for r in await objects.list_all(shared_transport, Replica)
        }
        shown = await store.ctl("rollout", "history", "qwen")
        assert shown.out.splitlines()[-1].split()[:2] == ["*", "1"]
        assert (await store.ctl("rollout", "restart", "qwen")).code == 0
        rolled = await store.ctl("rollout", "status", "qwen", "--timeout", "40s")
        assert rolled.code == 0, rolled.err + store.words()
        for agent in agents:
            agent.cancel()
    await shared_transport.close()
