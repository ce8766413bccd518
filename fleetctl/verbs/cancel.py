"""`fleetctl cancel`: ends requests in flight by their ids, at their gateway and engine."""

from typing import Any
from urllib.parse import quote

import click

from fleetctl.cli.arguments import parse_urls
from fleetctl.cli.connect import api_key_options, gateway_option, process_options
from fleetctl.cli.errors import FleetctlError
from fleetctl.fleets import gateway_api, gateways
from fleetctl.fleets.gateway_api import GatewayAnswer, GatewayQuestion

_HELP = """End requests in flight by their ids.

An id is the `x-request-id` of a request; `fleetctl routes --in-flight` lists them.

\b
  fleetctl cancel 3f2a9c41-1b
  fleetctl cancel 3f2a9c41-1b 3f2a9c41-1c --api-key-file key     the key needs the role operator

The client of a cancelled request gets an error with the code request_cancelled, and no other engine continues it.
"""


@click.command(help=_HELP)
@click.argument("ids", metavar="ID...", nargs=-1, required=True)
@gateway_option("Gateway to ask (default: all gateways of the fleet). Can be repeated.")
@api_key_options
@process_options
async def cancel(ids: tuple[str, ...], gateway: tuple[str, ...], **options: Any) -> None:
    """End requests in flight by their ids."""
    named, key = parse_urls(gateway), gateways.read_api_key(options)
    missing = []
    for id_ in dict.fromkeys(ids):
        question = GatewayQuestion(
            method="POST",
            path=f"/api/requests/{quote(id_, safe='')}/cancel",
            key=key,
            role="operator",
            accepted=frozenset({200, 404}),
        )
        if sum(await gateway_api.ask_all(named, question, options, _count)):
            click.echo(f"request/{id_} cancelled")
        else:
            missing.append(id_)
    if missing:
        raise FleetctlError(
            f"not in flight at any gateway: {', '.join(missing)}. `fleetctl routes --in-flight` lists what is; "
            "`fleetctl routes` shows what has ended"
        )


def _count(answer: GatewayAnswer) -> int:
    """Return the number of requests that one gateway has ended; 404 means that it has none with the id."""
    return int(answer.body["cancelled"]) if answer.status == 200 else 0
