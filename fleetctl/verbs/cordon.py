"""`fleetctl cordon` and `fleetctl uncordon`: whether anything new may be placed on nodes."""

from typing import Any

import click

from fleetctl.cli.connect import open_store, run, store_options
from fleetctl.objects import targets
from fleetctl.objects.kind_args import kind_of
from fleetctl.objects.targets import Edit, Selection
from fleetctl.output.results import ResultPrinter, dry_run_option
from machinery.clock import SystemClock
from schemas.node import Node

MANAGER = "fleetctl-cordon"
"""Who wrote that nodes take nothing new; `fleetctl drain` writes as the same."""


def as_cordoned(node: Node) -> Node | None:
    """Return the node cordoned; None if it is. Pure."""
    return targets.with_spec(node, unschedulable=True)


def as_uncordoned(node: Node) -> Node | None:
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
    chosen = targets.selection(
        kind_of("nodes"), targets.parse_node_names(nodes), labels=selector, is_all=None
    )
    run(_change_all(chosen, options, as_cordoned, "cordoned"))


@click.command()
@click.argument("nodes", nargs=-1, metavar="NODE...")
@targets.selector_option
@dry_run_option
@store_options
def uncordon(nodes: tuple[str, ...], selector: str, **options: Any) -> None:
    """Let nodes take replicas again, after `fleetctl cordon` or `fleetctl drain`.

    What was moved away stays where it is; new replicas may come.
    """
    chosen = targets.selection(
        kind_of("nodes"), targets.parse_node_names(nodes), labels=selector, is_all=None
    )
    run(_change_all(chosen, options, as_uncordoned, "uncordoned"))


async def _change_all(
    chosen: Selection, options: dict[str, Any], edit: Edit[Node], done: str
) -> None:
    clock, results = SystemClock(), ResultPrinter.of(options)
    async with open_store(options) as transport:
        for node in await targets.read_nodes(transport, chosen):
            written = await targets.write_edit(
                transport, clock, node, edit, manager=MANAGER, is_dry=results.is_dry
            )
            results.say(written.obj, done if written.is_news else f"already {done}")
