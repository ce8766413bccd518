"""`fleetctl node wake`: what it writes, and how it is undone."""

from datetime import timedelta

import pytest

from machinery.clock import SystemClock
from schemas.meta import ObjectMeta
from schemas.node import Node
from store import codec, objects
from store.port import Transport
from tests.support.fleet import Fleet
from tests.support.fleetctl_runner import run_fleetctl
from tests.support.reconciler_agents import put_node

pytestmark = [pytest.mark.etcd, pytest.mark.timeout(120)]


async def test_a_wish_is_written_and_ended(shared: Fleet, transport: Transport) -> None:
    node = Node(metadata=ObjectMeta(name="dozer", uid="uid-dozer", generation=1))
    await transport.commit([], [put_node("dozer"), codec.put_spec(node)])
    etcd = ("--etcd", str(shared.etcd.address))
    began = SystemClock().now()
    done = await run_fleetctl("node", "wake", "dozer", "--for", "2h", *etcd)
    assert done.code == 0, done.err
    assert done.out.startswith("node/dozer stays awake until 20")
    written = await objects.get(transport, Node, "dozer")
    assert written is not None
    assert written.spec.awake_until is not None
    assert timedelta(hours=2) <= written.spec.awake_until - began < timedelta(hours=2, minutes=5)
    done = await run_fleetctl("node", "wake", "dozer", "--for", "0s", *etcd)
    assert (done.code, done.out) == (0, "node/dozer may sleep again\n")
    written = await objects.get(transport, Node, "dozer")
    assert written is not None
    assert written.spec.awake_until is None
    done = await run_fleetctl("node", "wake", "nobody", *etcd)
    assert done.code == 1
