"""The group of verbs `fleetctl fabric`."""

import click

from fleetctl.lazy import LazyGroup

_VERBS = {
    "bench": "fleetctl.fabric.bench:bench",
    "check": "fleetctl.fabric.check:check",
    "matrix": "fleetctl.fabric.matrix:matrix",
}


@click.group(cls=LazyGroup, verbs=_VERBS)
def fabric() -> None:
    """Look at the cables and settings of the Macs that work as one.

    GROUP is a ShardGroup; left out, all of them are looked at.
    """
