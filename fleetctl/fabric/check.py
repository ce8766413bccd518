"""`fleetctl fabric check`: which groups would be admitted, and what is missing for the others."""

from typing import Any

import click
import orjson

from fleetctl import printers
from fleetctl.connect import run, store_options
from fleetctl.fabric import reading
from fleetctl.fabric.judging import Member, Verdict, judge
from manifests.tree import Tree
from reconciler.groups.cables import Cable, End

_HELP = """Say of each ShardGroup whether its Macs can work as one, and which cable or setting is missing if not.

\b
  fleetctl fabric check
  fleetctl fabric check studio -o json

Reads what agents report, at most 40 seconds old; starts nothing. Exit code 1: something is wrong. Nothing about
JACCL has run on hardware yet: docs/operations/shardgroups.md has a list for whoever is first.
"""


@click.command(help=_HELP)
@click.argument("group", nargs=-1, metavar="[GROUP...]")
@click.option(
    "-o", "--output", type=click.Choice(["table", "json"]), default="table", show_default=True
)
@store_options
def check(group: tuple[str, ...], output: str, **options: Any) -> None:
    """Say of each ShardGroup whether its Macs can work as one, and what is missing if not."""
    verdicts = run(_judged(group, options))
    if output == "json":
        trees = {"groups": [tree(one) for one in verdicts]}
        click.echo(orjson.dumps(trees, option=orjson.OPT_INDENT_2).decode())
    elif verdicts:
        click.echo("\n\n".join(text(one) for one in verdicts))
    else:
        click.echo("no shardgroups found; `fleetctl fabric matrix` compares the nodes", err=True)
    if not all(one.is_admitted for one in verdicts):
        raise click.exceptions.Exit(1)


async def _judged(words: tuple[str, ...], options: dict[str, Any]) -> list[Verdict]:
    seen = await reading.read(words, options)
    return [judge(one, seen.nodes, seen.ready) for one in seen.groups]


def text(verdict: Verdict) -> str:
    """Return what is said of one group. Pure."""
    spec = verdict.spec
    word = "admitted" if verdict.is_admitted else "not admitted"
    # The parts between stay as they are on a pipe: click takes colours out of what is no terminal.
    coloured = click.style(word, fg="green" if verdict.is_admitted else "red")
    head = f"shardgroup/{verdict.group}: {spec.backend} over {spec.wanted_size} Macs, {coloured}"
    rows = [_row(one) for one in verdict.members]
    parts = [head, _indented(printers.lined_up(rows, ["RANK", "NODE", "STATUS", "ADDRESSES"]))]
    if any(verdict.cables):
        cables = [_cable_row(verdict, one) for pair in verdict.cables for one in pair]
        parts.append(_indented(printers.lined_up(cables, ["CABLE", "FROM", "TO", "GBIT/S"])))
    parts += [f"  {click.style(one.reason, fg='red')}: {one.message}" for one in verdict.faults]
    parts += [f"  {click.style('warning', fg='yellow')}: {one}" for one in verdict.warnings]
    return "\n".join(parts)


def _row(member: Member) -> list[str]:
    rank = "spare" if member.rank is None else str(member.rank)
    status = "Ready" if member.is_ready else "NotReady"
    return [rank, member.node, status, ",".join(member.addresses) or "-"]


def _cable_row(verdict: Verdict, cable: Cable) -> list[str]:
    ranks = {one.node: str(one.rank) for one in verdict.members}
    return [
        f"{ranks[cable.here.node]}-{ranks[cable.there.node]}",
        _end(cable.here),
        _end(cable.there),
        str(speed(cable) or "?"),
    ]


def _end(end: End) -> str:
    state = end.seen.state.lower() if end.seen is not None else "not there"
    return f"{end.node} {end.device or '-'} ({state}, {','.join(end.addresses) or 'no address'})"


def speed(cable: Cable) -> int:
    """Return what the cable carries in Gbit/s; 0 if neither end says. Pure."""
    ports = [end.port.speed_gbps for end in (cable.here, cable.there) if end.port is not None]
    return min((one for one in ports if one > 0), default=0)


def tree(verdict: Verdict) -> dict[str, Tree]:
    """Return the same for programs. Pure."""
    return {
        "group": verdict.group,
        "backend": verdict.spec.backend,
        "size": verdict.spec.wanted_size,
        "isAdmitted": verdict.is_admitted,
        "members": [
            {
                "node": one.node,
                "rank": one.rank,
                "isReady": one.is_ready,
                "addresses": list(one.addresses),
            }
            for one in verdict.members
        ],
        "cables": [cable_tree(one) for pair in verdict.cables for one in pair],
        "missing": [{"reason": one.reason, "message": one.message} for one in verdict.faults],
        "warnings": list(verdict.warnings),
    }


def cable_tree(cable: Cable) -> dict[str, Tree]:
    """Return a cable for programs. Pure."""
    ends: dict[str, Tree] = {
        side: {
            "node": end.node,
            "device": end.device,
            "interface": end.interface,
            "addresses": list(end.addresses),
            "state": end.seen.state if end.seen is not None else "Unknown",
        }
        for side, end in (("from", cable.here), ("to", cable.there))
    }
    return {**ends, "gbitPerSecond": speed(cable)}


def _indented(table: str) -> str:
    return "\n".join(f"  {line}".rstrip() for line in table.splitlines())
