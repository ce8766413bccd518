"""`fleetctl node wake`: wakes Macs that sleep, and keeps them awake for a while."""

from datetime import timedelta
from functools import partial
from typing import Any

import click

from fleetctl.cli.arguments import parse_duration
from fleetctl.objects.change import change_objects, change_options, select_of_kind
from insight import edits
from insight.edits import ObjectEdit
from machinery.clock import SystemClock
from store.port import Transport

_HELP = """Wake Macs that sleep, and keep them awake for a while.

\b
  fleetctl node wake mac-2
  fleetctl node wake -l room=lab --for 8h

The command records the wish in spec.awakeUntil. The leading reconciler lets a Mac of the same network send magic packets,
three within 90 s, and counts a Mac as lost that is not back then. `fleetctl wait node/mac-2 --for=condition=Ready` waits
for it.
"""


@click.command("wake", help=_HELP, short_help="Wake Macs that sleep, and keep them awake.")
@change_options("NODE...", is_of_one_kind=True)
@click.option(
    "--for",
    "awake_for",
    default="30m",
    show_default=True,
    help="Time for which they stay awake; 0s ends an earlier wish.",
)
async def wake(
    transport: Transport, words: tuple[str, ...], awake_for: str, **options: Any
) -> None:
    """Wake Macs that sleep, and keep them awake for a while."""
    awake_s = parse_duration(awake_for)
    until = SystemClock().now() + timedelta(seconds=awake_s) if awake_s else None
    change = ObjectEdit(
        edit=partial(edits.with_spec, awake_until=until),
        manager=edits.WAKE_MANAGER,
        done=f"stays awake until {until:%Y-%m-%d %H:%M} UTC" if until else "may sleep again",
        unchanged="may sleep already",
    )
    await change_objects(transport, select_of_kind(words, "nodes", options), change, options)
