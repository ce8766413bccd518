"""`fleetctl cordon` and `fleetctl uncordon`: whether anything new may be placed on nodes."""

from typing import Any

import click

from fleetctl import targets
from fleetctl.connect import opened, run, store_options
from fleetctl.kinds import kind_of
from fleetctl.results import Results, dry_run_option
from fleetctl.targets import Choice, Edit
from machinery.clock import SystemClock
from schemas.node import Node

MANAGER = "fleetctl-cordon"
"""Who wrote that nodes take nothing new; `fleetctl drain` writes as the same."""


def closed(node: Node) -> Node | None:
    """Return the node cordoned; None if it is. Pure."""
    return targets.with_spec(node, unschedulable=True)


def opened_again(node: Node) -> Node | None:
    """Return the node neither cordoned nor draining; None if it is that. Pure."""
    return targets.with_spec(node, unschedulable=False, draining=False)


_HELP = """Place nothing new on nodes; what runs there goes on.

\b
  fleetctl cordon mac-1 mac-2
  fleetctl cordon -l site=berlin

`fleetctl drain` moves away what runs as well, `fleetctl uncordon` ends it.
"""


@click.command(help=_HELP)
@click.argument("nodes", nargs=-1, metavar="NODE...")
@targets.selector_option
@dry_run_option
@store_options
def cordon(nodes: tuple[str, ...], selector: str, **options: Any) -> None:
    """Place nothing new on nodes; what runs there goes on."""
    chosen = targets.choice(
        kind_of("nodes"), targets.node_names(nodes), labels=selector, is_all=None
    )
    run(_change_all(chosen, options, closed, "cordoned"))


@click.command()
@click.argument("nodes", nargs=-1, metavar="NODE...")
@targets.selector_option
@dry_run_option
@store_options
def uncordon(nodes: tuple[str, ...], selector: str, **options: Any) -> None:
    """Let nodes take replicas again, after `fleetctl cordon` or `fleetctl drain`.

    What was moved away stays where it is; new replicas may come.
    """
    chosen = targets.choice(
        kind_of("nodes"), targets.node_names(nodes), labels=selector, is_all=None
    )
    run(_change_all(chosen, options, opened_again, "uncordoned"))


async def _change_all(chosen: Choice, options: dict[str, Any], edit: Edit[Node], done: str) -> None:
    clock, results = SystemClock(), Results.of(options)
    async with opened(options) as transport:
        for node in await targets.nodes_of(transport, chosen):
            written = await targets.write(
                transport, clock, node, edit, manager=MANAGER, is_dry=results.is_dry
            )
            results.say(written.obj, done if written.is_news else f"already {done}")
