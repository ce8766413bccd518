"""A fleet whose etcd asks for passwords: every process with its own, and none with more than it needs."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from store import keys
from store.errors import PermissionDeniedError
from store.etcd import users
from store.etcd.connect import connect
from store.port import Put
from tests.support.fleet import Fleet, fleetctl
from tests.support.store_tcp_etcd import TcpEtcd
from tests.support.streams import Stream, stream
from tests.support.waiting import until_async

MANIFEST = """
apiVersion: fleet/v1alpha1
kind: ModelDeployment
metadata: {name: tiny}
spec:
  model: {path: tiny}
  replicas: 1
  contextLength: 512
---
apiVersion: fleet/v1alpha1
kind: ModelRoute
metadata: {name: chat}
spec:
  model: chat
  backends: [{deployment: tiny, weight: 1}]
---
apiVersion: fleet/v1alpha1
kind: NodePool
metadata: {name: all}
spec: {nodes: [node-1, node-2]}
"""


@asynccontextmanager
async def guarded_fleet(root: Path, models_dir: Path) -> AsyncIterator[Fleet]:
    """Run a fleet on an etcd that `init-auth` has set up; half of it over the JSON gateway."""
    # Tokens end while the test runs.
    async with TcpEtcd(root, "--bcrypt-cost=4", "--auth-token-ttl=3") as etcd:
        fleet = Fleet(root, models_dir, etcd=etcd)
        fleet.passwords = root / "passwords"
        words = ("--etcd", etcd.url, "--etcd-prefix", "/lab", "--out", str(fleet.passwords))
        nodes = ("--node", "node-1", "--node", "node-2")
        for step in (("--prepare", *nodes), ("--enable",)):
            ran = await fleetctl("init-auth", *step, *words)
            assert ran.code == 0, ran.err
        admin = users.read_credentials(fleet.passwords / "admin.env")
        etcd.address = replace(
            etcd.address, username=admin.user, password=admin.password, prefix="/lab"
        )
        try:
            fleet.start_reconciler(grace_s=1.0)
            fleet.start_agent("node-1")
            fleet.start_agent("node-2", "--etcd-transport", "http")
            fleet.start_gateway("--etcd-transport", "http")
            await fleet.joined(2)
            yield fleet
        finally:
            await fleet.stop()


@pytest.mark.ci
@pytest.mark.fleet
@pytest.mark.etcd
@pytest.mark.timeout(180)
async def test_everybody_can_do_its_work_and_no_more(tmp_path: Path, models_dir: Path) -> None:
    async with guarded_fleet(tmp_path, models_dir) as fleet:
        await fleet.applied(MANIFEST)
        await fleet.available("tiny")
        await fleet.routed("chat", 1)
        await answers(fleet)
        await the_store_is_shown(fleet)
        await a_stolen_password_is_of_little_use(fleet)
        await its_node_is_lost(fleet)
        await all_of_it_can_be_deleted(fleet)
        logs = "\n".join(log.read_text() for log in tmp_path.glob("logs/*.log"))
        assert "permission denied" not in logs


async def answers(fleet: Fleet) -> None:
    for _ in range(4):
        one = Stream()
        await stream(fleet.url, "chat", "hello", max_tokens=8, into=one)
        assert one.succeeded, one.error


async def the_store_is_shown(fleet: Fleet) -> None:
    for what in ("nodes", "md", "np", "mr", "replicas", "endpoints", "events"):
        shown = await fleet.ctl("get", what)
        assert (shown.code, shown.err) == (0, ""), what
        assert len(shown.out.splitlines()) > 1, what
    described = await fleet.ctl("describe", "md/tiny")
    assert "ReplicaPlaced" in described.out


async def a_stolen_password_is_of_little_use(fleet: Fleet) -> None:
    assert fleet.passwords is not None
    thief = users.read_credentials(fleet.passwords / "node-node-1.env")
    address = replace(fleet.etcd.address, username=thief.user, password=thief.password)
    for way in ("grpc", "http"):
        transport = connect(replace(address, transport="http" if way == "http" else "grpc"))
        for key in (
            keys.status_key("Node", "node-2"),
            keys.node_lease_key("node-2"),
            keys.spec_key("ModelDeployment", "tiny"),
            keys.spec_key("Replica", "tiny-0"),
            keys.endpoint_key("node-2", "tiny-0"),
            keys.ELECTION_RECONCILER,
        ):
            with pytest.raises(PermissionDeniedError):
                await transport.commit([], [Put(key=key, value=b"{}")])
        with pytest.raises(PermissionDeniedError):
            await transport.list(keys.SECRET_PREFIX)
        await transport.close()


async def its_node_is_lost(fleet: Fleet) -> None:
    """The replica moves: the reconciler removes what was said of it, and another agent says it anew."""
    before = await node_of_endpoint(fleet)
    fleet.kill(before)
    fleet.kill_engines(before)

    async def moved() -> bool:
        return await node_of_endpoint(fleet) not in ("", before)

    await until_async(moved, limit_s=60, what="the move")
    await fleet.routed("chat", 1)
    await answers(fleet)
    fleet.restart(before)
    await fleet.joined(2)


async def node_of_endpoint(fleet: Fleet) -> str:
    transport = connect(fleet.etcd.address)
    items = (await transport.list(keys.ENDPOINT_PREFIX)).items
    await transport.close()
    return items[0].key.removeprefix(keys.ENDPOINT_PREFIX).partition("/")[0] if items else ""


async def all_of_it_can_be_deleted(fleet: Fleet) -> None:
    for what in ("mr/chat", "np/all", "md/tiny"):
        gone = await fleet.ctl("delete", what)
        assert gone.code == 0, gone.err
    waited = await fleet.ctl("wait", "md/tiny", "--for=delete", "--timeout=40s")
    assert waited.code == 0, waited.err
    transport = connect(fleet.etcd.address)
    for prefix in (keys.RANK_PREFIX, keys.ENDPOINT_PREFIX, keys.spec_prefix("Replica")):
        assert (await transport.list(prefix)).items == ()
    await transport.close()
