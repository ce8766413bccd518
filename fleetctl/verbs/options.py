"""`fleetctl options`: the flags with which verbs find their fleet and authenticate."""

from typing import Any

import click

from fleetctl.cli.connect import gateway_options

_HELP = """List the flags with which commands find their fleet.

Commands that talk to a fleet take those of them that they need. A context of `fleetctl config` holds them for each fleet,
and an environment variable stands for a flag: FLEET_ETCD_CA for --etcd-ca.

\b
  fleetctl get nodes --context lab
  fleetctl get nodes --etcd https://10.0.0.2:2379 --identity-dir ~/lab
"""


def _show(**_: Any) -> None:
    context = click.get_current_context()
    click.echo(context.get_help(), color=context.color)


@click.command()
@gateway_options
def _connected(**_: Any) -> None:
    """Take all connection flags."""


options = click.Command("options", params=_connected.params, callback=_show, help=_HELP)
