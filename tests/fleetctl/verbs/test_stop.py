"""The verb `fleetctl stop`: the engines of this Mac, or of all Macs, without etcd. Real engines: tests/nodeagent/test_stop_all.py."""

import stat
from pathlib import Path

import pytest

from fleetctl.cli.errors import FleetctlError
from fleetctl.fleets import stop_orders
from fleetctl.fleets.known_nodes import KnownNodes
from identity.names import Role
from nodeagent.engines.stop_order import StopOrder
from store import codec, keys
from store.port import Put
from tests.support.agent_api import STATUS, serving
from tests.support.fleetctl_runner import MemoryFleet, run_fleetctl
from tests.support.identities import TestAuthority
from tests.support.ports import free_port


@pytest.mark.parametrize("content", ["", "{}", '{"at": 1}', '{"at": "now"}'])
def test_a_damaged_order_holds(tmp_path: Path, content: str) -> None:
    (tmp_path / "stopped.json").write_text(content)
    assert StopOrder(tmp_path).refusal().startswith("engines are stopped on this Mac;")


@pytest.fixture
def authority(tmp_path: Path) -> TestAuthority:
    return TestAuthority(tmp_path / "authority")


async def publish(fleet: MemoryFleet, **urls: str) -> None:
    """Write the statuses of nodes whose agents have these URLs."""
    statuses = {
        name.replace("_", "-"): STATUS.model_copy(update={"agent_url": url})
        for name, url in urls.items()
    }
    puts = [
        Put(key=keys.status_key("Node", name), value=codec.encode(status))
        for name, status in statuses.items()
    ]
    await fleet.store.commit([], puts)


async def test_all_macs_are_stopped_and_one_that_does_not_answer_is_named(
    fleet: MemoryFleet, authority: TestAuthority
) -> None:
    admin = ("--identity-dir", str(authority.issue(Role.ADMIN, "anna").path))
    order = StopOrder(authority.root)
    async with serving(authority) as api:
        here = f"https://127.0.0.1:{api.port}"
        await publish(fleet, mac_2=here, mac_9=f"https://127.0.0.1:{free_port()}")
        done = await fleet.ctl("stop", "--all", *admin)
        assert done.code == 2
        assert "there is no terminal to confirm this: give --yes" in done.err
        assert order.refusal() == ""
        done = await fleet.ctl("stop", "--all", "--yes", *admin)
        assert done.code == 1
        assert done.out == (
            "NODE    RESULT\nmac-2   0 engines ended, none starts until --undo\nmac-9   no answer\n"
        )
        assert (
            "1 of 2 Macs did not do it\n  node/mac-9 does not answer at https://127.0.0.1:"
            in done.err
        )
        assert "`fleetctl stop --local` on that Mac" in done.err
        assert order.refusal()
        done = await fleet.ctl("stop", "--all", "--undo", "--nodes", "mac-2", *admin)
        assert (done.code, done.out) == (0, "NODE    RESULT\nmac-2   engines may start again\n")
        assert order.refusal() == ""


async def test_addresses_are_remembered_for_the_time_without_etcd(
    fleet: MemoryFleet, authority: TestAuthority, tmp_path: Path
) -> None:
    admin = ("--identity-dir", str(authority.issue(Role.ADMIN, "anna").path))
    words = ("stop", "--all", "--yes", "--etcd", f"http://127.0.0.1:{free_port()}", *admin)
    done = await run_fleetctl(*words)
    assert (done.code, done.out) == (1, "")
    assert "no agent of this fleet was seen before from here. Give their addresses" in done.err
    async with serving(authority) as api:
        await publish(fleet, mac_2=f"https://127.0.0.1:{api.port}")
        assert (await fleet.ctl("get", "nodes")).code == 0
        file = tmp_path / "known-nodes.json"
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        file.write_text(file.read_text().replace(fleet.url, words[4]))
        done = await run_fleetctl(*words)
        assert (done.code, done.out) == (
            0,
            "NODE    RESULT\nmac-2   0 engines ended, none starts until --undo\n",
        )
        assert "etcd is away" in done.err
        assert StopOrder(authority.root).refusal()


async def test_a_certificate_of_another_role_stops_nothing(
    fleet: MemoryFleet, authority: TestAuthority
) -> None:
    async with serving(authority) as api:
        await publish(fleet, mac_2=f"https://127.0.0.1:{api.port}")
        node = str(authority.issue(Role.NODE, "mac-1").path)
        done = await fleet.ctl("stop", "--all", "--yes", "--identity-dir", node)
        assert (done.code, done.out) == (1, "NODE    RESULT\nmac-2   refused\n")
        assert "only a certificate of the role admin stops engines" in done.err
        assert StopOrder(authority.root).refusal() == ""


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("mac-1.local:4001", {"mac-1": "https://mac-1.local:4001"}),
        ("mac-1.local", {"mac-1": "https://mac-1.local:4001"}),
        ("studio=10.0.0.2:4002, mac-3", {"studio": "https://10.0.0.2:4002", "mac-3": "https://[fd00::3]:4001"}),
        ("10.0.0.4:4001", {"mac-4": "https://10.0.0.4:4001"}),
        ("mac-3=[fd00::9]", {"mac-3": "https://[fd00::9]:4001"}),
    ],
)  # fmt: skip
def test_addresses_that_a_person_gives(text: str, found: dict[str, str]) -> None:
    known = {"mac-3": "https://[fd00::3]:4001", "mac-4": "https://10.0.0.4:4001"}
    assert stop_orders.parse_nodes(text, known, is_https=True) == found


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        ("10.0.0.9", "write NAME=10.0.0.9:4001"),
        ("mac-1:99999", "expected HOST:PORT"),
        ("https://mac-1:4001", "expected HOST:PORT"),
        ("=mac-1:4001", "write NAME=mac-1:4001"),
        (" , ", "expected HOST:PORT"),
    ],
)
def test_addresses_that_cannot_be_used(text: str, refusal: str) -> None:
    with pytest.raises(FleetctlError, match=refusal):
        stop_orders.parse_nodes(text, {}, is_https=True)


def test_the_file_of_addresses_is_bounded_and_may_be_damaged(tmp_path: Path) -> None:
    file = tmp_path / "known-nodes.json"
    for number in range(20):
        KnownNodes(file, f"http://etcd-{number}:2379").remember({"mac-1": f"http://mac-{number}"})
    assert KnownNodes(file, "http://etcd-3:2379").read() == {}
    assert KnownNodes(file, "http://etcd-4:2379").read() == {"mac-1": "http://mac-4"}
    last = KnownNodes(file, "http://etcd-19:2379")
    last.remember({f"mac-{number}": "http://mac" for number in range(3000)})
    assert len(last.read()) == 2000
    for content in ("", "[]", "{", '{"http://etcd-19:2379": 1}'):
        file.write_text(content)
        assert last.read() == {}
