"""Which versions get along: every part of the fleet as it says of itself, and the rules. Pure.

The rules: fleetctl, gateways and agents may be one minor version from the leading reconciler, as Kubernetes allows it
around its API server (a fleet is upgraded one part after the other); mlx-lm is the one that memory proofs were checked
with; etcd is one that keeps what it acknowledged (docs/operations/store.md).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from machinery.version import is_compatible, parse_release
from store.etcd.member.binary import is_sound, parse_version_number

Part: TypeAlias = Literal["fleetctl", "etcd", "reconciler", "gateway", "nodeagent"]
UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentVersion:
    """One part of the fleet and its version; UNKNOWN where it does not say, as earlier releases."""

    part: Part
    name: str = ""
    """Which gateway, which node, which reconciler leads."""
    version: str
    mlx_lm: str = ""
    """Of a node."""

    @property
    def label(self) -> str:
        return f"{self.part} {self.name}".rstrip()


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetVersions:
    """All versions of a fleet."""

    client: ComponentVersion
    etcd: ComponentVersion
    reconciler: ComponentVersion | None = None
    """None while nobody leads."""
    gateways: Sequence[ComponentVersion] = field(default=())
    agents: Sequence[ComponentVersion] = field(default=())

    def servers(self) -> tuple[ComponentVersion, ...]:
        """Return everything but the client."""
        leader = () if self.reconciler is None else (self.reconciler,)
        return (self.etcd, *leader, *self.gateways, *self.agents)


def warnings(versions: FleetVersions, *, mlx_lm: str) -> list[str]:
    """Return what does not get along, and what to do; nothing if all is well.

    `mlx_lm` is the release, as in "0.32", that memory proofs were checked with.
    """
    return [
        *_etcd_warnings(versions.etcd),
        *_skew_warnings(versions),
        *_mlx_warnings(versions.agents, mlx_lm),
    ]


def _etcd_warnings(etcd: ComponentVersion) -> Iterator[str]:
    number = parse_version_number(etcd.version)
    if number is not None and not is_sound(number):
        yield (
            f"etcd {etcd.version} can lose what it acknowledged when it is killed; 3.4.21 and 3.5.5 are the first that "
            'do not. docs/operations/store.md, "Which etcd", says how to change it'
        )


def _skew_warnings(versions: FleetVersions) -> Iterator[str]:
    """Yield who is too far from the leader; without one, from this fleetctl."""
    leader = versions.reconciler
    centre = leader if leader is not None and parse_release(leader.version) else versions.client
    others = [versions.client, *versions.gateways, *versions.agents]
    for one in others:
        if one is centre or is_compatible(one.version, centre.version):
            continue
        theirs, ours = parse_release(one.version), parse_release(centre.version)
        assert theirs is not None
        assert ours is not None
        older = one if theirs < ours else centre
        yield (
            f"{one.label} is {one.version}, {centre.part} is {centre.version}; they may be one minor version apart: "
            f"upgrade {older.label}"
        )


def _mlx_warnings(agents: Sequence[ComponentVersion], mlx_lm: str) -> Iterator[str]:
    for one in agents:
        theirs = parse_release(one.mlx_lm)
        if theirs is not None and theirs != parse_release(mlx_lm):
            yield (
                f"{one.label} has mlx-lm {one.mlx_lm}; memory proofs were checked with {mlx_lm}, which should be there"
            )


def lines(versions: FleetVersions) -> list[str]:
    """Return what `fleetctl version` prints: a line each, nodes of one version in one line."""
    leader = versions.reconciler
    found = [f"fleetctl: {versions.client.version}", f"etcd: {versions.etcd.version}"]
    if leader is None:
        found.append("reconciler: none leads")
    else:
        found.append(f"reconciler {leader.name}: {leader.version}")
    found += [f"gateway {one.name}: {one.version}" for one in versions.gateways]
    return [*found, *_agent_lines(versions.agents)]


def _agent_lines(agents: Sequence[ComponentVersion]) -> Iterator[str]:
    by_version: dict[tuple[str, str], list[str]] = {}
    for one in agents:
        by_version.setdefault((one.version, one.mlx_lm), []).append(one.name)
    for (version, mlx_lm), names in sorted(by_version.items()):
        more = len(names) - _MAX_NAMES
        listed = ", ".join(names[:_MAX_NAMES]) + (f" and {more} more" if more > 0 else "")
        with_mlx = f" (mlx-lm {mlx_lm})" if mlx_lm else ""
        yield f"nodeagent {listed}: {version}{with_mlx}"


# A fleet may have a thousand.
_MAX_NAMES = 5


def tree(versions: FleetVersions, warned: Sequence[str]) -> dict[str, object]:
    """Return the same as `-o json` and `-o yaml` have it."""
    leader = versions.reconciler
    return {
        "fleetctl": versions.client.version,
        "etcd": versions.etcd.version,
        "reconciler": None if leader is None else _name_and_version(leader),
        "gateways": [_name_and_version(one) for one in versions.gateways],
        "nodes": [
            {**_name_and_version(one), "mlxLmVersion": one.mlx_lm} for one in versions.agents
        ],
        "warnings": list(warned),
    }


def _name_and_version(one: ComponentVersion) -> dict[str, str]:
    return {"name": one.name, "version": one.version}
