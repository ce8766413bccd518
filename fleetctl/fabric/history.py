"""The verb `fleetctl fabric history`: the results of the regular checks of ShardGroups' cables."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any

import click
import orjson

from fleetctl.cli import terminal
from fleetctl.cli.connect import run, store_options
from fleetctl.fabric import admission
from fleetctl.output import printers
from machinery.clock import SystemClock
from manifests.trees import Tree
from schemas.meta import find_condition
from schemas.shardgroup import FabricCheck, ShardGroup

TITLES = ("AGE", "RESULT", "SPEED", "USUAL", "MACS", "REASON", "MESSAGE")
_ROLES: dict[str, terminal.Role] = {"Healthy": "good", "Unhealthy": "bad", "Failed": "warn"}
_HELP = """Show the results of the regular checks of each ShardGroup's cables, the newest first.

\b
  fleetctl fabric history
  fleetctl fabric history studio -o json

Groups with spec.fabric are checked every spec.fabric.checkInterval while no replica is placed on them. SPEED is that of
the slowest rank at 64 MB, USUAL the median of the earlier healthy checks of the same Macs. Exit code 1: the last check
of a group found its cables unhealthy.
"""


@click.command(help=_HELP)
@click.argument("group", nargs=-1, metavar="[GROUP...]")
@click.option(
    "-o", "--output", type=click.Choice(["table", "json"]), default="table", show_default=True
)
@store_options
def history(group: tuple[str, ...], output: str, **options: Any) -> None:
    """Show the results of the regular checks of cables."""
    groups = run(admission.read_fabric(group, options)).groups
    now = SystemClock().now()
    if output == "json":
        trees = {"groups": [history_tree(one) for one in groups]}
        click.echo(orjson.dumps(trees, option=orjson.OPT_INDENT_2).decode())
    elif groups:
        click.echo("\n\n".join(history_text(one, now) for one in groups))
    else:
        click.echo("no shardgroups found", err=True)
    if any(one[-1].outcome == "Unhealthy" for one in map(checks_of, groups) if one):
        raise click.exceptions.Exit(1)


def checks_of(group: ShardGroup) -> Sequence[FabricCheck]:
    """Return the checks in the group's status, the newest last."""
    return group.status.fabric_checks if group.status is not None else ()


def history_text(group: ShardGroup, now: datetime) -> str:
    """Return the history of one group as text."""
    policy = group.spec.fabric
    often = "no regular checks; set spec.fabric.checkInterval"
    if policy is not None:
        often = f"checked every {policy.check_interval}"
    lines = [f"shardgroup/{group.name}: {often}"]
    found = (
        None if group.status is None else find_condition(group.status.conditions, "FabricHealthy")
    )
    if found is not None:
        lines.append(f"  FabricHealthy={found.status} ({found.reason}): {found.message}")
    rows = check_rows(checks_of(group), now)
    if rows:
        lines += [f"  {line}" for line in printers.align_columns(rows, TITLES).splitlines()]
    return "\n".join(lines)


def check_rows(checks: Sequence[FabricCheck], now: datetime) -> list[tuple[str, ...]]:
    """Return one row per check, the newest first."""
    return [
        (
            printers.age(one.at, now),
            terminal.paint(one.outcome, _ROLES[one.outcome]),
            _speed(one.gb_per_second),
            _speed(one.usual_gb_per_second),
            ",".join(one.nodes),
            one.reason,
            one.message,
        )
        for one in reversed(checks)
    ]


def _speed(gb_per_second: float | None) -> str:
    return "-" if gb_per_second is None else f"{gb_per_second:g} GB/s"


def history_tree(group: ShardGroup) -> dict[str, Tree]:
    """Return the history of one group for `-o json`, the oldest check first."""
    policy = group.spec.fabric
    return {
        "group": group.name,
        "checkInterval": None if policy is None else policy.check_interval,
        "checks": [
            one.model_dump(mode="json", by_alias=True, exclude_none=True)
            for one in checks_of(group)
        ],
    }
