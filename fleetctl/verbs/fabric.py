"""The verb `fleetctl fabric check`, and the group that loads `bench` and `setup` on use."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import click

from fleetctl.cli import terminal
from fleetctl.cli.arguments import output_option
from fleetctl.cli.connect import store_options
from fleetctl.cli.documents import print_tree
from fleetctl.cli.program import LazyGroup
from fleetctl.fabric import admission
from fleetctl.output import printers
from insight.doctor.group_admission import (
    AdmissionMember,
    GroupAdmission,
    check_admission,
    unplaced_on,
)
from manifests.trees import Tree
from reconciler.groups.fabric import Cable, CableEnd
from schemas.node import NodeStatus
from schemas.quantity import counted

_CHECK_HELP = """Check whether the Macs of each ShardGroup can work together, and name missing cables and settings.

\b
  fleetctl fabric check
  fleetctl fabric check studio -o json

Uses the agents' reports, which are at most 40 seconds old, and starts nothing; -o json has them side by side.
Deployments of a group that are not placed are listed below it. Exit code 1: a group is not admitted.
JACCL is not yet tested on hardware: docs/hardware.md has the first run.
"""


@click.command(help=_CHECK_HELP)
@click.argument("group", nargs=-1, metavar="[GROUP...]")
@output_option("table", "json")
@store_options
async def check(group: tuple[str, ...], output: str, **options: Any) -> None:
    """Check whether the Macs of each ShardGroup can work together, and name what is missing."""
    state = await admission.read_fabric(group, options)
    admissions = [
        replace(
            check_admission(shard_group, state.nodes, state.ready),
            unplaced=unplaced_on(shard_group, state.deployments),
        )
        for shard_group in state.groups
    ]
    if output == "json":
        statuses = {node.name: node.status for node in state.nodes if node.status is not None}
        trees = {"groups": [admission_tree(group, statuses) for group in admissions]}
        print_tree(trees, "json")
    elif admissions:
        click.echo("\n\n".join(admission_text(group_admission) for group_admission in admissions))
    else:
        click.echo("no shardgroups found; `fleetctl version --nodes` compares the nodes", err=True)
    if not all(group_admission.is_admitted for group_admission in admissions):
        raise click.exceptions.Exit(1)


def admission_text(group: GroupAdmission) -> str:
    """Return the result of one group as text."""
    spec = group.spec
    word = "admitted" if group.is_admitted else "not admitted"
    coloured = terminal.paint(word, "good" if group.is_admitted else "bad")
    size = counted(spec.wanted_size, "node", "nodes")
    head = f"shardgroup/{group.group}: {spec.backend} over {size}, cables and settings: {coloured}"
    rows = [_member_row(member) for member in group.members]
    parts = [head, _indent(printers.align_columns(rows, ["RANK", "NODE", "STATUS", "ADDRESSES"]))]
    if any(group.cables):
        cables = [_cable_row(group, cable) for pair in group.cables for cable in pair]
        parts.append(_indent(printers.align_columns(cables, ["CABLE", "FROM", "TO", "GBIT/S"])))
    parts += [f"  {terminal.paint(fault.reason, 'bad')}: {fault.message}" for fault in group.faults]
    parts += [f"  {terminal.paint('warning', 'warn')}: {warning}" for warning in group.warnings]
    parts += [
        f"  modeldeployment/{deployment.name} is {terminal.paint('not placed', 'bad')} ({deployment.reason}): {deployment.message}"
        for deployment in group.unplaced
    ]
    return "\n".join(parts)


def _member_row(member: AdmissionMember) -> list[str]:
    rank = "spare" if member.rank is None else str(member.rank)
    status = "Ready" if member.is_ready else "NotReady"
    return [rank, member.node, status, ",".join(member.addresses) or "-"]


def _cable_row(group: GroupAdmission, cable: Cable) -> list[str]:
    ranks = {member.node: str(member.rank) for member in group.members}
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
    return min((port for port in ports if port > 0), default=0)


_COMPARED = {
    *("machine", "chip", "cpu_cores", "gpu_cores", "memory_bytes", "allocatable_bytes"),
    *("os", "os_version", "mlx_version", "mlx_build", "mlx_lm_version"),
    *("agent_version", "fabric"),
}
"""The fields that are compared between the Macs of a group."""


def admission_tree(group: GroupAdmission, statuses: Mapping[str, NodeStatus]) -> dict[str, Tree]:
    """Return the result of one group for `-o json`, with what its Macs report."""
    return {
        "group": group.group,
        "backend": group.spec.backend,
        "size": group.spec.wanted_size,
        "isAdmitted": group.is_admitted,
        "members": [
            {
                "node": member.node,
                "rank": member.rank,
                "isReady": member.is_ready,
                "addresses": list(member.addresses),
                "reported": statuses[member.node].model_dump(
                    mode="json", by_alias=True, include=_COMPARED
                )
                if member.node in statuses
                else None,
            }
            for member in group.members
        ],
        "cables": [cable_tree(cable) for pair in group.cables for cable in pair],
        "missing": [{"reason": fault.reason, "message": fault.message} for fault in group.faults],
        "warnings": list(group.warnings),
        "unplaced": [
            {
                "deployment": deployment.name,
                "reason": deployment.reason,
                "message": deployment.message,
            }
            for deployment in group.unplaced
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


_VERBS = {
    "bench": "fleetctl.fabric.bench:bench",
    "check": "fleetctl.verbs.fabric:check",
    "setup": "fleetctl.verbs.fabric_setup:setup",
}


@click.group(cls=LazyGroup, verbs=_VERBS)
def fabric() -> None:
    """Set up, check and measure the Macs and cables of ShardGroups.

    GROUP is a ShardGroup; left out, all of them are looked at.
    """
