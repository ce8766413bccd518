"""`fleetctl cordon` and `fleetctl uncordon`: disable and enable placement on nodes."""

from typing import Any

import click

from fleetctl.objects.change import change_options, select_of_kind, take_action
from store.port import Transport

_HELP = """Stop placing new replicas on nodes. Running replicas stay.

\b
  fleetctl cordon mac-1 mac-2
  fleetctl cordon -l site=berlin

`fleetctl drain` also moves running replicas away. `fleetctl uncordon` ends a cordon.
"""


@click.command(help=_HELP)
@change_options("NODE...", is_of_one_kind=True)
async def cordon(transport: Transport, words: tuple[str, ...], **options: Any) -> None:
    """Stop placing new replicas on nodes. Running replicas stay."""
    await take_action(transport, "cordon", select_of_kind(words, "nodes", options), options)


@click.command(short_help="Enable placement on nodes again.")
@change_options("NODE...", is_of_one_kind=True)
async def uncordon(transport: Transport, words: tuple[str, ...], **options: Any) -> None:
    """Enable placement on nodes again, after `fleetctl cordon` or `fleetctl drain`.

    Replicas that were moved away do not return; new replicas may be placed on the nodes.
    """
    await take_action(transport, "uncordon", select_of_kind(words, "nodes", options), options)
