"""`fleetctl fabric matrix`: versions, hardware and cables of Macs side by side, with what differs marked."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import click
import orjson

from fleetctl import groups, printers
from fleetctl.connect import run, store_options
from fleetctl.errors import FleetctlError
from fleetctl.fabric import reading
from fleetctl.fabric.check import cable_tree, speed
from manifests.tree import Tree
from reconciler.groups.cables import Cable, between
from reconciler.groups.missing import Missing
from schemas import quantity
from schemas.node import Node, NodeStatus
from schemas.shardgroup import GroupMember, ShardGroup

_HELP = """Put the Macs of a ShardGroup, or of the fleet, side by side: versions, hardware, cables.

\b
  fleetctl fabric matrix studio
  fleetctl fabric matrix -o json

On a terminal, red differs and must not in a group (versions), yellow differs and may (hardware).
"""

Weight = Literal["Must", "May", "Own"]
_COLOURS = {"Must": "red", "May": "yellow"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Property:
    """One line of the comparison."""

    title: str
    of: Callable[[NodeStatus], str]
    weight: Weight
    """Whether it must be the same within a group, may differ, or is each Mac's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One property of every Mac."""

    title: str
    values: tuple[str, ...]
    weight: Weight

    @property
    def usual(self) -> str:
        """Return the value that most have; of equally many the first."""
        return Counter(self.values).most_common(1)[0][0]

    @property
    def is_same(self) -> bool:
        return len(set(self.values)) == 1


_RDMA_WORDS = {True: "on", False: "off", None: "-"}
PROPERTIES = (
    Property(title="MACHINE", of=lambda s: s.machine, weight="May"),
    Property(title="CHIP", of=lambda s: s.chip, weight="May"),
    Property(title="CPU CORES", of=lambda s: str(s.cpu_cores), weight="May"),
    Property(title="GPU CORES", of=lambda s: str(s.gpu_cores), weight="May"),
    Property(title="MEMORY", of=lambda s: quantity.show(s.memory_bytes), weight="May"),
    Property(title="FOR MODELS", of=lambda s: quantity.show(s.allocatable_bytes), weight="May"),
    Property(title="SYSTEM", of=lambda s: f"{s.os} {s.os_version}", weight="Must"),
    Property(title="BUILD", of=lambda s: s.fabric.os_build or "-", weight="Must"),
    Property(title="MLX", of=lambda s: s.mlx_version or "-", weight="Must"),
    Property(title="MLX-LM", of=lambda s: s.mlx_lm_version or "-", weight="Must"),
    Property(title="AGENT", of=lambda s: s.agent_version, weight="Must"),
    Property(title="THUNDERBOLT", of=lambda s: str(s.fabric.thunderbolt or "-"), weight="May"),
    Property(title="RDMA", of=lambda s: _RDMA_WORDS[s.fabric.is_rdma_enabled], weight="Must"),
    Property(title="RDMA PORTS", of=lambda s: _devices(s), weight="Own"),
    Property(title="ADDRESSES", of=lambda s: _addresses(s), weight="Own"),
)


def _devices(status: NodeStatus) -> str:
    return ",".join(f"{one.name}:{one.state}" for one in status.fabric.rdma) or "-"


def _addresses(status: NodeStatus) -> str:
    found = [f"{one.name}:{one.address}" for one in status.fabric.interfaces]
    return ",".join(found) or status.address or "-"


@click.command(help=_HELP)
@click.argument("group", required=False)
@click.option(
    "-o", "--output", type=click.Choice(["table", "json"]), default="table", show_default=True
)
@store_options
def matrix(group: str | None, output: str, **options: Any) -> None:
    """Put the Macs of a ShardGroup, or of the fleet, side by side."""
    seen = run(reading.read((group,) if group else (), options))
    chosen = seen.groups[0] if group else None
    wanted = groups.candidates(chosen.spec, seen.nodes) if chosen else None
    nodes = _in_order(seen.nodes, wanted)
    if not nodes:
        raise FleetctlError("there is nothing to compare: no agent of these nodes has reported")
    if output == "json":
        click.echo(orjson.dumps(tree(nodes, chosen), option=orjson.OPT_INDENT_2).decode())
    else:
        click.echo(text(nodes, chosen))
    lost = [name for name in wanted or () if name not in {name for name, _ in nodes}]
    for name in lost:
        click.echo(f"warning: no agent of {name} has ever reported", err=True)


Reported = Sequence[tuple[str, NodeStatus]]


def _in_order(nodes: Sequence[Node], names: Sequence[str] | None) -> Reported:
    reported = {node.name: node.status for node in nodes if node.status is not None}
    wanted = sorted(reported) if names is None else names
    return [(name, reported[name]) for name in wanted if name in reported]


def compared(nodes: Reported) -> list[Row]:
    """Return every property of the Macs. Pure."""
    return [
        Row(title=one.title, values=tuple(one.of(status) for _, status in nodes), weight=one.weight)
        for one in PROPERTIES
    ]


def text(nodes: Reported, group: ShardGroup | None) -> str:
    """Return the comparison as tables. Pure."""
    rows = [[row.title, *_cells(row), _same(row)] for row in compared(nodes)]
    parts = [printers.lined_up(rows, ["", *(name for name, _ in nodes), "SAME"])]
    if len(nodes) > 1 and any(status.fabric.ports or status.fabric.rdma for _, status in nodes):
        cells = [[name, *_towards((name, status), nodes, group)] for name, status in nodes]
        titles = ["FROM / TO", *(name for name, _ in nodes)]
        parts += ["", printers.lined_up(cells, titles)]
    return "\n".join(line.rstrip() for line in "\n".join(parts).splitlines())


def _same(row: Row) -> str:
    if row.weight == "Own":
        return ""
    return "yes" if row.is_same else "no"


def _cells(row: Row) -> list[str]:
    if row.weight == "Own":
        return list(row.values)
    colour = _COLOURS[row.weight]
    return [one if one == row.usual else click.style(one, fg=colour) for one in row.values]


def _towards(one: tuple[str, NodeStatus], nodes: Reported, group: ShardGroup | None) -> list[str]:
    return ["" if other[0] == one[0] else _cell(_between(one, other, group)) for other in nodes]


def _between(
    one: tuple[str, NodeStatus], other: tuple[str, NodeStatus], group: ShardGroup | None
) -> tuple[Cable, ...]:
    members: dict[str, GroupMember] = (
        {member.node: member for member in group.spec.members} if group is not None else {}
    )
    found = between(one, other, members)
    return () if isinstance(found, Missing) else found


def _cell(cables: Sequence[Cable]) -> str:
    said = [f"{one.here.device or one.here.interface or '?'}@{speed(one) or '?'}" for one in cables]
    return ",".join(said) or "-"


def tree(nodes: Reported, group: ShardGroup | None) -> dict[str, Tree]:
    """Return the comparison for programs. Pure."""
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
            for row in compared(nodes)
        ],
        "cables": [cable_tree(one) for a, b in pairs for one in _between(a, b, group)],
    }
