"""The versions of all parts of a fleet, and warnings about version skew.

fleetctl, gateways and agents may differ by one minor version from the leading reconciler, as Kubernetes allows around
its API server. mlx-lm must be the version that memory proofs were checked with. etcd must be a version that keeps
acknowledged writes (docs/operations/store.md).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from insight import process_client
from machinery.version import parse_release
from reconciler.nodes.node_state import VersionedPart, mlx_skew_text, skew_text
from schemas.node import Node
from store import keys, objects
from store.etcd.member.binary import is_sound, parse_version_number
from store.port import Transport

Part: TypeAlias = Literal["fleetctl", "etcd", "reconciler", "gateway", "nodeagent"]
UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentVersion:
    """One part of the fleet and its version; UNKNOWN if it does not report one, as earlier releases."""

    part: Part
    name: str = ""
    """The name of the gateway, the node or the leading reconciler."""
    version: str
    mlx_lm: str = ""
    """The version of mlx-lm on a node."""

    @property
    def label(self) -> str:
        return f"{self.part} {self.name}".rstrip()


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetVersions:
    """The versions of all parts of a fleet."""

    client: ComponentVersion
    etcd: ComponentVersion
    reconciler: ComponentVersion | None = None
    """None while no reconciler leads."""
    gateways: Sequence[ComponentVersion] = field(default=())
    agents: Sequence[ComponentVersion] = field(default=())

    def servers(self) -> tuple[ComponentVersion, ...]:
        """Return all parts except the client."""
        leader = () if self.reconciler is None else (self.reconciler,)
        return (self.etcd, *leader, *self.gateways, *self.agents)


def warnings(versions: FleetVersions) -> list[str]:
    """Return warnings about version skew, with what to do."""
    mlx = (mlx_skew_text(f"mlx-lm of {agent.label}", agent.mlx_lm) for agent in versions.agents)
    return [
        *_etcd_warnings(versions.etcd),
        *_skew_warnings(versions),
        *filter(None, mlx),
    ]


def _etcd_warnings(etcd: ComponentVersion) -> Iterator[str]:
    number = parse_version_number(etcd.version)
    if number is not None and not is_sound(number):
        yield (
            f"etcd {etcd.version} can lose acknowledged writes when it is killed; 3.4.21 and 3.5.5 are the first that "
            'do not. docs/operations/store.md, "Choose an etcd version", says how to change it'
        )


def _skew_warnings(versions: FleetVersions) -> Iterator[str]:
    """Yield a warning for each part that is too far from the leading reconciler; without one, from this fleetctl."""
    leader = versions.reconciler
    centre = leader if leader is not None and parse_release(leader.version) else versions.client
    others = [versions.client, *versions.gateways, *versions.agents]
    middle = _part(centre, label=f"the {centre.part}" if centre is leader else centre.label)
    found = (skew_text(_part(other), middle) for other in others if other is not centre)
    yield from filter(None, found)


def _part(one: ComponentVersion, *, label: str = "") -> VersionedPart:
    return VersionedPart(label=label or one.label, version=one.version, upgrade=one.label)


def lines(versions: FleetVersions) -> list[str]:
    """Return the output of `fleetctl version`: one line each, and one line for all nodes of the same version."""
    leader = versions.reconciler
    found = [f"fleetctl: {versions.client.version}", f"etcd: {versions.etcd.version}"]
    if leader is None:
        found.append("reconciler: none leads")
    else:
        found.append(f"reconciler {leader.name}: {leader.version}")
    found += [f"gateway {gateway.name}: {gateway.version}" for gateway in versions.gateways]
    return [*found, *_agent_lines(versions.agents)]


def _agent_lines(agents: Sequence[ComponentVersion]) -> Iterator[str]:
    by_version: dict[tuple[str, str], list[str]] = {}
    for agent in agents:
        by_version.setdefault((agent.version, agent.mlx_lm), []).append(agent.name)
    for (version, mlx_lm), names in sorted(by_version.items()):
        more = len(names) - _MAX_NAMES
        listed = ", ".join(names[:_MAX_NAMES]) + (f" and {more} more" if more > 0 else "")
        with_mlx = f" (mlx-lm {mlx_lm})" if mlx_lm else ""
        yield f"nodeagent {listed}: {version}{with_mlx}"


# A fleet can have a thousand nodes.
_MAX_NAMES = 5


def tree(versions: FleetVersions, warned: Sequence[str]) -> dict[str, object]:
    """Return the versions as a tree, for -o json and yaml."""
    leader = versions.reconciler
    return {
        "fleetctl": versions.client.version,
        "etcd": versions.etcd.version,
        "reconciler": None if leader is None else _name_and_version(leader),
        "gateways": [_name_and_version(gateway) for gateway in versions.gateways],
        "nodes": [
            {**_name_and_version(agent), "mlxLmVersion": agent.mlx_lm} for agent in versions.agents
        ],
        "warnings": list(warned),
    }


def _name_and_version(one: ComponentVersion) -> dict[str, str]:
    return {"name": one.name, "version": one.version}


async def read_versions(transport: Transport, client: ComponentVersion) -> FleetVersions:
    """Return the versions that all parts report in the store. Raises StoreError."""
    server = await transport.status()
    leader = await transport.get(keys.ELECTION_RECONCILER)
    leases = await process_client.list_gateway_leases(transport)
    nodes = await objects.list_all(transport, Node)
    return FleetVersions(
        client=client,
        etcd=ComponentVersion(part="etcd", version=server.version),
        reconciler=None if leader is None else leader_version(leader.value),
        gateways=[
            ComponentVersion(part="gateway", name=id_, version=lease.version)
            for id_, lease in sorted(leases.items())
        ],
        agents=[
            ComponentVersion(
                part="nodeagent",
                name=node.name,
                version=node.status.agent_version,
                mlx_lm=node.status.mlx_lm_version,
            )
            for node in nodes
            if node.status is not None
        ],
    )


def leader_version(value: bytes) -> ComponentVersion:
    """Parse the value of the election key, `host/pid version`; earlier releases wrote no version."""
    name, _, release = value.decode(errors="replace").partition(" ")
    return ComponentVersion(part="reconciler", name=name, version=release or UNKNOWN)
