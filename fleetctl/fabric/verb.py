"""The group of verbs `fleetctl fabric`."""

import importlib

import click
from typing_extensions import override

# Verb to module: what one of them imports is paid for by that one alone.
_VERBS = {
    "bench": "fleetctl.fabric.bench",
    "check": "fleetctl.fabric.check",
    "matrix": "fleetctl.fabric.matrix",
}


class _Verbs(click.Group):
    """A group whose commands are imported on use; each is named as its module."""

    @override
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_VERBS)

    @override
    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _VERBS:
            return None
        command: click.Command = getattr(importlib.import_module(_VERBS[cmd_name]), cmd_name)
        return command


@click.group(cls=_Verbs)
def fabric() -> None:
    """Look at the cables and settings of the Macs that work as one.

    GROUP is a ShardGroup; left out, all of them are looked at.
    """
