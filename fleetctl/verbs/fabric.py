"""The verbs `fleetctl fabric check` and `matrix`, and the group that loads `bench` on use."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import click
import orjson

from fleetctl.cli import terminal
from fleetctl.cli.connect import run, store_options
from fleetctl.cli.errors import FleetctlError
from fleetctl.cli.program import LazyGroup
from fleetctl.fabric import admission
from fleetctl.output import printers
from insight.doctor.group_admission import (
    AdmissionMember,
    GroupAdmission,
    check_admission,
    member_names,
    unplaced_on,
)
from manifests.trees import Tree
from reconciler.groups.fabric import Cable, CableEnd, FabricFault, cables_between
from schemas import quantity
from schemas.node import NodeStatus
from schemas.quantity import counted
from schemas.shardgroup import GroupMember, ShardGroup

_CHECK_HELP = """Check whether the Macs of each ShardGroup can work together, and name missing cables and settings.

\b
  fleetctl fabric check
  fleetctl fabric check studio -o json

Uses the agents' reports, which are at most 40 seconds old, and starts nothing. Deployments of a group that are not placed
are listed below it. Exit code 1: a group is not admitted.
JACCL is not yet tested on hardware: docs/operations/shardgroups.md has a checklist for the first run.
"""


@click.command(help=_CHECK_HELP)
@click.argument("group", nargs=-1, metavar="[GROUP...]")
@click.option(
    "-o", "--output", type=click.Choice(["table", "json"]), default="table", show_default=True
)
@store_options
def check(group: tuple[str, ...], output: str, **options: Any) -> None:
    """Check whether the Macs of each ShardGroup can work together, and name what is missing."""
    admissions = run(_check_groups(group, options))
    if output == "json":
        trees = {"groups": [admission_tree(one) for one in admissions]}
        click.echo(orjson.dumps(trees, option=orjson.OPT_INDENT_2).decode())
    elif admissions:
        click.echo("\n\n".join(admission_text(one) for one in admissions))
    else:
        click.echo("no shardgroups found; `fleetctl fabric matrix` compares the nodes", err=True)
    if not all(one.is_admitted for one in admissions):
        raise click.exceptions.Exit(1)


async def _check_groups(words: tuple[str, ...], options: dict[str, Any]) -> list[GroupAdmission]:
    state = await admission.read_fabric(words, options)
    return [
        replace(
            check_admission(one, state.nodes, state.ready),
            unplaced=unplaced_on(one, state.deployments),
        )
        for one in state.groups
    ]


def admission_text(group: GroupAdmission) -> str:
    """Return the result of one group as text."""
    spec = group.spec
    word = "admitted" if group.is_admitted else "not admitted"
    coloured = terminal.paint(word, "good" if group.is_admitted else "bad")
    size = counted(spec.wanted_size, "node", "nodes")
    head = f"shardgroup/{group.group}: {spec.backend} over {size}, cables and settings: {coloured}"
    rows = [_member_row(one) for one in group.members]
    parts = [head, _indent(printers.align_columns(rows, ["RANK", "NODE", "STATUS", "ADDRESSES"]))]
    if any(group.cables):
        cables = [_cable_row(group, one) for pair in group.cables for one in pair]
        parts.append(_indent(printers.align_columns(cables, ["CABLE", "FROM", "TO", "GBIT/S"])))
    parts += [f"  {terminal.paint(one.reason, 'bad')}: {one.message}" for one in group.faults]
    parts += [f"  {terminal.paint('warning', 'warn')}: {one}" for one in group.warnings]
    parts += [
        f"  modeldeployment/{one.name} is {terminal.paint('not placed', 'bad')} ({one.reason}): {one.message}"
        for one in group.unplaced
    ]
    return "\n".join(parts)


def _member_row(member: AdmissionMember) -> list[str]:
    rank = "spare" if member.rank is None else str(member.rank)
    status = "Ready" if member.is_ready else "NotReady"
    return [rank, member.node, status, ",".join(member.addresses) or "-"]


def _cable_row(group: GroupAdmission, cable: Cable) -> list[str]:
    ranks = {one.node: str(one.rank) for one in group.members}
    return [
        f"{ranks[cable.here.node]}-{ranks[cable.there.node]}",
        _cable_end(cable.here),
        _cable_end(cable.there),
        str(cable_speed(cable) or "?"),
    ]


def _cable_end(end: CableEnd) -> str:
    state = end.reported.state.lower() if end.reported is not None else "not there"
    return f"{end.node} {end.device or '-'} ({state}, {','.join(end.addresses) or 'no address'})"


def cable_speed(cable: Cable) -> int:
    """Return the speed of the cable in Gbit/s; 0 if neither end reports it."""
    ports = [end.port.speed_gbps for end in (cable.here, cable.there) if end.port is not None]
    return min((one for one in ports if one > 0), default=0)


def admission_tree(group: GroupAdmission) -> dict[str, Tree]:
    """Return the result of one group for `-o json`."""
    return {
        "group": group.group,
        "backend": group.spec.backend,
        "size": group.spec.wanted_size,
        "isAdmitted": group.is_admitted,
        "members": [
            {
                "node": one.node,
                "rank": one.rank,
                "isReady": one.is_ready,
                "addresses": list(one.addresses),
            }
            for one in group.members
        ],
        "cables": [cable_tree(one) for pair in group.cables for one in pair],
        "missing": [{"reason": one.reason, "message": one.message} for one in group.faults],
        "warnings": list(group.warnings),
        "unplaced": [
            {"deployment": one.name, "reason": one.reason, "message": one.message}
            for one in group.unplaced
        ],
    }


def cable_tree(cable: Cable) -> dict[str, Tree]:
    """Return a cable for `-o json`."""
    ends: dict[str, Tree] = {
        side: {
            "node": end.node,
            "device": end.device,
            "interface": end.interface,
            "addresses": list(end.addresses),
            "state": end.reported.state if end.reported is not None else "Unknown",
        }
        for side, end in (("from", cable.here), ("to", cable.there))
    }
    return {**ends, "gbitPerSecond": cable_speed(cable)}


def _indent(table: str) -> str:
    return "\n".join(f"  {line}".rstrip() for line in table.splitlines())


_MATRIX_HELP = """Compare the Macs of a ShardGroup, or of the fleet: versions, hardware, cables.

\b
  fleetctl fabric matrix studio
  fleetctl fabric matrix -o json

On a terminal, red marks differences that a group must not have (versions), yellow those that it may have (hardware).
"""

Weight = Literal["Must", "May", "Own"]
_ROLES: dict[Weight, terminal.Role] = {"Must": "bad", "May": "warn"}


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeProperty:
    """A property of the comparison."""

    title: str
    of: Callable[[NodeStatus], str]
    weight: Weight
    """Must: equal within a group. May: can differ. Own: belongs to one Mac."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PropertyRow:
    """The values of one property on all Macs."""

    title: str
    values: tuple[str, ...]
    weight: Weight

    @property
    def usual(self) -> str:
        """Return the most frequent value; on a tie, the first."""
        return Counter(self.values).most_common(1)[0][0]

    @property
    def is_same(self) -> bool:
        """Return whether all Macs have the same value."""
        return len(set(self.values)) == 1


_RDMA_WORDS = {True: "on", False: "off", None: "-"}
PROPERTIES = (
    NodeProperty(title="MACHINE", of=lambda s: s.machine, weight="May"),
    NodeProperty(title="CHIP", of=lambda s: s.chip, weight="May"),
    NodeProperty(title="CPU CORES", of=lambda s: str(s.cpu_cores), weight="May"),
    NodeProperty(title="GPU CORES", of=lambda s: str(s.gpu_cores), weight="May"),
    NodeProperty(title="MEMORY", of=lambda s: quantity.show(s.memory_bytes), weight="May"),
    NodeProperty(title="FOR MODELS", of=lambda s: quantity.show(s.allocatable_bytes), weight="May"),
    NodeProperty(title="SYSTEM", of=lambda s: f"{s.os} {s.os_version}", weight="Must"),
    NodeProperty(title="BUILD", of=lambda s: s.fabric.os_build or "-", weight="Must"),
    NodeProperty(title="MLX", of=lambda s: s.mlx_version or "-", weight="Must"),
    NodeProperty(title="MLX-LM", of=lambda s: s.mlx_lm_version or "-", weight="Must"),
    NodeProperty(title="AGENT", of=lambda s: s.agent_version, weight="Must"),
    NodeProperty(title="THUNDERBOLT", of=lambda s: str(s.fabric.thunderbolt or "-"), weight="May"),
    NodeProperty(title="RDMA", of=lambda s: _RDMA_WORDS[s.fabric.is_rdma_enabled], weight="Must"),
    NodeProperty(title="RDMA PORTS", of=lambda s: _devices(s), weight="Own"),
    NodeProperty(title="ADDRESSES", of=lambda s: _addresses(s), weight="Own"),
)


def _devices(status: NodeStatus) -> str:
    return ",".join(f"{one.name}:{one.state}" for one in status.fabric.rdma) or "-"


def _addresses(status: NodeStatus) -> str:
    found = [f"{one.name}:{one.address}" for one in status.fabric.interfaces]
    return ",".join(found) or status.address or "-"


@click.command(help=_MATRIX_HELP)
@click.argument("group", required=False)
@click.option(
    "-o", "--output", type=click.Choice(["table", "json"]), default="table", show_default=True
)
@store_options
def matrix(group: str | None, output: str, **options: Any) -> None:
    """Compare the Macs of a ShardGroup, or of the fleet."""
    state = run(admission.read_fabric((group,) if group else (), options))
    shard_group = state.groups[0] if group else None
    members = member_names(shard_group.spec, state.nodes) if shard_group else None
    reported = {node.name: node.status for node in state.nodes if node.status is not None}
    selected = sorted(reported) if members is None else members
    nodes = [(name, reported[name]) for name in selected if name in reported]
    if not nodes:
        raise FleetctlError("there is nothing to compare: no agent of these nodes has reported")
    if output == "json":
        click.echo(
            orjson.dumps(matrix_tree(nodes, shard_group), option=orjson.OPT_INDENT_2).decode()
        )
    else:
        click.echo(matrix_text(nodes, shard_group))
    silent = [name for name in members or () if name not in {name for name, _ in nodes}]
    for name in silent:
        click.echo(f"warning: the agent of {name} has never reported", err=True)


Reported = Sequence[tuple[str, NodeStatus]]


def compare_nodes(nodes: Reported) -> list[PropertyRow]:
    """Return one row per property."""
    return [
        PropertyRow(
            title=one.title, values=tuple(one.of(status) for _, status in nodes), weight=one.weight
        )
        for one in PROPERTIES
    ]


def matrix_text(nodes: Reported, group: ShardGroup | None) -> str:
    """Return the comparison as tables."""
    rows = [[row.title, *_value_cells(row), _same_cell(row)] for row in compare_nodes(nodes)]
    parts = [printers.align_columns(rows, ["", *(name for name, _ in nodes), "SAME"])]
    if len(nodes) > 1 and any(status.fabric.ports or status.fabric.rdma for _, status in nodes):
        cells = [[name, *_cable_cells((name, status), nodes, group)] for name, status in nodes]
        titles = ["FROM / TO", *(name for name, _ in nodes)]
        parts += ["", printers.align_columns(cells, titles)]
    return "\n".join(line.rstrip() for line in "\n".join(parts).splitlines())


def _same_cell(row: PropertyRow) -> str:
    if row.weight == "Own":
        return ""
    return "yes" if row.is_same else "no"


def _value_cells(row: PropertyRow) -> list[str]:
    if row.weight == "Own":
        return list(row.values)
    role = _ROLES[row.weight]
    return [one if one == row.usual else terminal.paint(one, role) for one in row.values]


def _cable_cells(
    one: tuple[str, NodeStatus], nodes: Reported, group: ShardGroup | None
) -> list[str]:
    return [
        "" if other[0] == one[0] else _cable_cell(_cables_between(one, other, group))
        for other in nodes
    ]


def _cables_between(
    one: tuple[str, NodeStatus], other: tuple[str, NodeStatus], group: ShardGroup | None
) -> tuple[Cable, ...]:
    members: dict[str, GroupMember] = (
        {member.node: member for member in group.spec.members} if group is not None else {}
    )
    found = cables_between(one, other, members)
    return () if isinstance(found, FabricFault) else found


def _cable_cell(cables: Sequence[Cable]) -> str:
    labels = [
        f"{one.here.device or one.here.interface or '?'}@{cable_speed(one) or '?'}"
        for one in cables
    ]
    return ",".join(labels) or "-"


def matrix_tree(nodes: Reported, group: ShardGroup | None) -> dict[str, Tree]:
    """Return the comparison for `-o json`."""
    names = [name for name, _ in nodes]
    pairs = [(a, b) for at, a in enumerate(nodes) for b in nodes[at + 1 :]]
    return {
        "nodes": list(names),
        "properties": [
            {
                "name": row.title.lower(),
                "values": dict(zip(names, row.values, strict=True)),
                "weight": row.weight,
                "isSame": row.is_same,
            }
            for row in compare_nodes(nodes)
        ],
        "cables": [cable_tree(one) for a, b in pairs for one in _cables_between(a, b, group)],
    }


_VERBS = {
    "bench": "fleetctl.fabric.bench:bench",
    "check": "fleetctl.verbs.fabric:check",
    "history": "fleetctl.fabric.history:history",
    "matrix": "fleetctl.verbs.fabric:matrix",
}


@click.group(cls=LazyGroup, verbs=_VERBS)
def fabric() -> None:
    """Check and measure the Macs and cables of ShardGroups.

    GROUP is a ShardGroup; left out, all of them are looked at.
    """
