"""`fleetctl cordon` and `fleetctl uncordon`: disable and enable placement on nodes."""

from typing import Any

import click

from fleetctl.cli import arguments
from fleetctl.cli.arguments import dry_run_option
from fleetctl.cli.connect import open_store, run, store_options
from fleetctl.objects import targets, writer
from fleetctl.objects.kind_args import kind_of
from fleetctl.objects.targets import Selection
from fleetctl.objects.writer import Edit
from fleetctl.output.results import ResultPrinter
from insight import edits
from machinery.clock import SystemClock
from schemas.node import Node

_HELP = """Stop placing new replicas on nodes. Running replicas stay.

\b
  fleetctl cordon mac-1 mac-2
  fleetctl cordon -l site=berlin

`fleetctl drain` also moves running replicas away. `fleetctl uncordon` ends a cordon.
"""


@click.command(help=_HELP)
@click.argument("nodes", nargs=-1, metavar="NODE...")
@arguments.selector_option
@dry_run_option
@store_options
def cordon(nodes: tuple[str, ...], selector: str, **options: Any) -> None:
    """Stop placing new replicas on nodes. Running replicas stay."""
    chosen = targets.selection(
        kind_of("nodes"), targets.parse_node_names(nodes), labels=selector, is_all=None
    )
    run(_change_all(chosen, options, edits.as_cordoned, "cordoned"))


@click.command(short_help="Enable placement on nodes again.")
@click.argument("nodes", nargs=-1, metavar="NODE...")
@arguments.selector_option
@dry_run_option
@store_options
def uncordon(nodes: tuple[str, ...], selector: str, **options: Any) -> None:
    """Enable placement on nodes again, after `fleetctl cordon` or `fleetctl drain`.

    Replicas that were moved away do not return; new replicas may be placed on the nodes.
    """
    chosen = targets.selection(
        kind_of("nodes"), targets.parse_node_names(nodes), labels=selector, is_all=None
    )
    run(_change_all(chosen, options, edits.as_uncordoned, "uncordoned"))


async def _change_all(
    chosen: Selection, options: dict[str, Any], edit: Edit[Node], done: str
) -> None:
    clock, results = SystemClock(), ResultPrinter.of(options)
    async with open_store(options) as transport:
        for node in await targets.read_nodes(transport, chosen):
            written = await writer.write_edit(
                transport, clock, node, edit, manager=edits.CORDON_MANAGER, is_dry=results.is_dry
            )
            results.print_object(written.obj, done if written.is_changed else f"already {done}")
