"""`fleetctl version`: all parts of a fleet, and warnings about version skew."""

import json
import platform
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetctl.fleets.node_versions import COLUMNS, NodeVersions, difference_texts, marked
from identity.names import Role
from insight import version_skew
from insight.version_skew import UNKNOWN, ComponentVersion, FleetVersions, leader_version
from machinery.version import is_compatible, parse_release
from machinery.version import version as ours
from schemas.meta import ObjectMeta
from schemas.node import Node
from schemas.records import GatewayLease
from store import codec, keys
from store.port import Put, Transport
from tests.support.agent_api import STATUS, serving
from tests.support.fleet import fleetctl
from tests.support.fleetctl_runner import MemoryFleet
from tests.support.identities import TestAuthority

SOUND = "3.5.16"


def versions(
    client: str = "1.4.0",
    reconciler: str | None = "1.4.2",
    gateway: str = "1.4.0",
    agents: Sequence[tuple[str, str]] = (("1.4.0", "0.32.2"),),
    etcd: str = SOUND,
) -> FleetVersions:
    leader = ComponentVersion(part="reconciler", name="mac-1/7", version=reconciler or "")
    return FleetVersions(
        client=ComponentVersion(part="fleetctl", version=client),
        etcd=ComponentVersion(part="etcd", version=etcd),
        reconciler=leader if reconciler is not None else None,
        gateways=(ComponentVersion(part="gateway", name="g", version=gateway),),
        agents=[
            ComponentVersion(part="nodeagent", name=f"mac-{n}", version=version, mlx_lm=mlx)
            for n, (version, mlx) in enumerate(agents, 1)
        ],
    )


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (versions(), []),
        (versions(client="1.5.0", gateway="1.3.9"), []),
        (versions(client="checkout", reconciler=UNKNOWN), []),
        (versions(reconciler=None, gateway="1.5.0"), []),
        (
            versions(client="1.2.0"),
            [
                "fleetctl is 1.2.0, the reconciler is 1.4.2; they may differ by one minor version: upgrade fleetctl"
            ],
        ),
        (
            versions(gateway="2.4.0"),
            [
                "gateway g is 2.4.0, the reconciler is 1.4.2; they may differ by one minor version: "
                "upgrade reconciler mac-1/7"
            ],
        ),
        (
            versions(agents=(("1.4.0", "0.32.9"), ("1.1.0", "0.31.0"))),
            [
                "nodeagent mac-2 is 1.1.0, the reconciler is 1.4.2; they may differ by one minor version: "
                "upgrade nodeagent mac-2",
                "mlx-lm of nodeagent mac-2 is 0.31.0, memory proofs were tested with 0.32: install mlx-lm 0.32 there. Until then replicas may take more memory than proven",
            ],
        ),
        (
            versions(etcd="3.5.1"),
            [
                "etcd 3.5.1 can lose acknowledged writes when it is killed; 3.4.21 and 3.5.5 are the first that do "
                'not. docs/operations/store.md, "Choose an etcd version", says how to change it'
            ],
        ),
    ],
)
def test_version_skew_warnings(found: FleetVersions, expected: list[str]) -> None:
    assert version_skew.warnings(found) == expected


def test_nodes_of_one_version_share_a_line() -> None:
    fleet_versions = versions(agents=[("1.4.0", "0.32.2")] * 7 + [("1.3.0", "")], reconciler=None)
    assert version_skew.lines(fleet_versions) == [
        "fleetctl: 1.4.0",
        "etcd: 3.5.16",
        "reconciler: none leads",
        "gateway g: 1.4.0",
        "nodeagent mac-8: 1.3.0",
        "nodeagent mac-1, mac-2, mac-3, mac-4, mac-5 and 2 more: 1.4.0 (mlx-lm 0.32.2)",
    ]


numbers = st.integers(0, 20)


@given(numbers, numbers, numbers, numbers)
def test_compatibility_is_symmetric(major: int, minor: int, other: int, another: int) -> None:
    one, two = f"{major}.{minor}.0", f"{other}.{another}.1-rc"
    assert is_compatible(one, two) is is_compatible(two, one)
    assert is_compatible(one, two) is (major == other and abs(minor - another) <= 1)
    assert parse_release(one) == (major, minor)
    assert is_compatible(one, "a checkout")


def test_the_leader_version() -> None:
    assert leader_version(b"mac-1/77 0.3.1") == ComponentVersion(
        part="reconciler", name="mac-1/77", version="0.3.1"
    )
    assert leader_version(b"mac-1/77").version == UNKNOWN


@pytest.mark.etcd
@pytest.mark.timeout(180)
async def test_all_parts(shared_fleet: MemoryFleet, shared_transport: Transport) -> None:
    lease = GatewayLease(url="http://127.0.0.1:9", version="99.0.0")
    gateway = keys.named(keys.GATEWAY_LEASE_PREFIX, "odd")
    leader = Put(key=keys.ELECTION_RECONCILER, value=f"mac-1/7 {ours()}".encode())
    await shared_transport.commit([], [leader, Put(key=gateway, value=codec.encode(lease))])
    done = await shared_fleet.ctl("version")
    assert done.code == 0
    assert f"reconciler mac-1/7: {ours()}\ngateway odd: 99.0.0\n" in done.out
    assert f"warning: gateway odd is 99.0.0, the reconciler is {ours()}; " in done.err
    tree = json.loads((await shared_fleet.ctl("version", "-o", "json")).out)
    assert tree["reconciler"] == {"name": "mac-1/7", "version": ours()}
    assert (tree["gateways"], len(tree["warnings"]) > 0) == (
        [{"name": "odd", "version": "99.0.0"}],
        True,
    )


async def test_client_only() -> None:
    plain = await fleetctl("version", "--client")
    assert (plain.code, plain.out) == (0, f"fleetctl: {ours()}\n")
    done = await fleetctl("version", "--client", "-o", "yaml")
    assert done.out == f'fleetctl: "{ours()}"\n'


def _values(mlx: str = "0.32.4", build: str = "25D125", chip: str = "Apple M4") -> tuple[str, ...]:
    return ("0.1.0", mlx, "0.32.2", "3.11.9", "Darwin 26.3", build, chip, "48Gi")


def test_what_differs_from_most_macs_is_marked() -> None:
    found = marked(
        [
            NodeVersions(name="mac-1", values=_values()),
            NodeVersions(name="mac-2", values=_values(mlx="0.31.0", chip="Apple M4 Pro")),
            NodeVersions(name="mac-3", values=_values(build="-")),
        ]
    )
    assert [sorted(node_versions.differs) for node_versions in found] == [[], ["MLX"], []]
    assert found[1].cells()[2] == "0.31.0 *"
    assert found[2].tree()["build"] is None
    assert difference_texts(found) == ["MLX differs: mac-2 has 0.31.0"]


async def test_nodes_are_compared_with_the_python_of_each_agent(
    fleet: MemoryFleet, tmp_path: Path
) -> None:
    authority = TestAuthority(tmp_path / "authority")
    admin = ("--identity-dir", str(authority.issue(Role.ADMIN, "anna").path))
    async with serving(authority) as api:
        url = f"https://127.0.0.1:{api.port}"
        live = STATUS.model_copy(update={"mlx_version": "0.32.4", "agent_url": url})
        gone = STATUS.model_copy(update={"mlx_version": "0.31.0"})
        for name, status in (("mac-2", live), ("mac-3", gone)):
            status_put = Put(key=keys.status_key("Node", name), value=codec.encode(status))
            spec_put = codec.put_spec(Node(metadata=ObjectMeta(name=name)))
            await fleet.store.commit([], [spec_put, status_put])
        done = await fleet.ctl("version", "--nodes", *admin)
        info = await fleet.ctl("cluster-info", *admin)
    titles, first, second = (line.split() for line in done.out.splitlines())
    assert titles == ["NODE", *COLUMNS]
    assert first[:5] == ["mac-2", "1", "0.32.4", "-", platform.python_version()]
    assert second[:6] == ["mac-3", "1", "0.31.0", "*", "-", "-"]
    assert done.err == "warning: MLX differs: mac-3 has 0.31.0\n"
    assert "* MLX differs: mac-3 has 0.31.0\n" in info.out
    assert "`fleetctl fabric check`" in info.out
    tree = json.loads((await fleet.ctl("version", "--nodes", "-o", "json")).out)
    assert [one["differs"] for one in tree["nodes"]] == [[], ["mlx"]]
