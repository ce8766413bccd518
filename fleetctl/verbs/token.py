"""The verb `fleetctl token`: creates, lists and revokes join tokens, with which Macs get a certificate of the fleet."""

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import click
from pydantic import TypeAdapter, ValidationError

from fleetctl.cli.arguments import output_option, parse_duration, reason_option
from fleetctl.cli.connect import with_store
from fleetctl.cli.errors import FleetctlError, program_name
from fleetctl.cli.program import SuggestingGroup
from fleetctl.fleets.join_material import create_token, is_local_address, join_addresses
from fleetctl.objects import key_values
from fleetctl.output import printers
from fleetctl.output.columns import age
from identity import token_store
from identity.token_store import MAX_LIFETIME, TokenOptions
from machinery.clock import SystemClock
from machinery.os_user import current_user
from schemas.meta import ObjectName
from schemas.pools import NodePool
from schemas.trust import MAX_TOKEN_USES, JoinTokenRecord
from store import objects
from store.port import Transport

_NAME = TypeAdapter(ObjectName)
_UNKNOWN_ADDRESS = "HOST:4002"
_TOO_LONG_S = 2 * MAX_LIFETIME.total_seconds()


@click.group("token", cls=SuggestingGroup)
def token() -> None:
    """Create, list and revoke join tokens."""


@token.command()
@click.option(
    "--ttl",
    default="1h",
    show_default=True,
    metavar="30m|12h|7d",
    help="Lifetime of the token; at most 30d.",
)
@click.option(
    "--uses",
    type=click.IntRange(1, MAX_TOKEN_USES),
    default=1,
    show_default=True,
    help="Number of machines that may join with it.",
)
@click.option(
    "--role",
    type=click.Choice(["node", "gateway", "reconciler", "admin"]),
    default="node",
    show_default=True,
    help="Role of the machine or person in the fleet.",
)
@click.option(
    "--node",
    "name",
    metavar="NAME",
    help="The only name that may join, also one that the fleet has, of a Mac that lost its key (default: any new name).",
)
@click.option("--pool", metavar="NAME", help="Pool to join: the node gets the labels it selects.")
@click.option(
    "--label", "labels", multiple=True, metavar="KEY=VALUE", help="Label of the node; repeatable."
)
@click.option(
    "--address",
    metavar="HOST:PORT",
    help="Address of the join port in the printed command (default: those of the reconcilers).",
)
@output_option(
    "command", "token", text="Print the whole command for the other machine, or the token alone."
)
@reason_option
@with_store
async def create(transport: Transport, name: str | None, pool: str | None, **options: Any) -> None:
    """Create a join token and print the command that uses it. It cannot be shown again."""
    clock = SystemClock()
    lifetime = parse_lifetime(options["ttl"])
    labels = dict(key_values.parse(options["labels"], "labels").put)
    role = options["role"]
    if (pool or labels) and role != "node":
        raise click.UsageError("--pool and --label need --role node: only nodes have labels")
    wanted = TokenOptions(
        lifetime=lifetime,
        uses=options["uses"],
        role=role,
        name=None if name is None else parse_name(name),
        pool=pool,
        labels=labels,
        created_by=current_user(),
    )
    wanted = await _with_pool_labels(transport, wanted)
    addresses = [options["address"]] if options["address"] else await join_addresses(transport)
    made, now = await create_token(transport, clock, wanted), clock.now()
    uses = "one machine" if wanted.uses == 1 else f"{wanted.uses} machines"
    end = f"{now + wanted.lifetime:%Y-%m-%d %H:%M} UTC"
    click.echo(
        f"token/{made.id} created for {uses} with the role {wanted.role}, until {end}.", err=True
    )
    if options["output"] == "token":
        click.echo(made.render())
        return
    where = ",".join(addresses) or _UNKNOWN_ADDRESS
    click.echo("It is shown only once. Run this on the other machine:", err=True)
    click.echo(f"{program_name()} join {made.render()} {where}")
    if addresses and all(map(is_local_address, addresses)):
        click.echo(
            f"warning: only this machine reaches {where}; start the reconciler with --api-host, or name its address with "
            "--advertise-join",
            err=True,
        )
    if not addresses:
        click.echo(
            "warning: no reconciler of this fleet has a join port; start one with --authority-dir, and put its "
            f"address in the place of {_UNKNOWN_ADDRESS}",
            err=True,
        )


@token.command("list")
@click.option("--no-headers", is_flag=True, help="Do not print column titles.")
@with_store
async def list_(transport: Transport, no_headers: bool, **_: Any) -> None:
    """List the join tokens that are valid. Their secrets are not stored."""
    now, records = SystemClock().now(), await token_store.list_tokens(transport)
    if not records:
        click.echo("No join tokens found.", err=True)
        return
    titles = ("ID", "ROLE", "NAME", "USES LEFT", "EXPIRES", "AGE", "CREATED BY")
    rows = [_row(record, now) for record in records]
    click.echo(printers.align_columns(rows, () if no_headers else titles))


def _row(one: JoinTokenRecord, now: datetime) -> tuple[str, ...]:
    left = f"{one.uses_left} of {one.most_uses}"
    expires = "expired" if one.expires <= now else f"in {age(now, one.expires)}"
    name = one.name or "<any>"
    return (one.id, one.role, name, left, expires, age(one.created, now), one.created_by)


@token.command()
@click.argument("ids", nargs=-1, required=True, metavar="ID...")
@reason_option
@with_store
async def revoke(transport: Transport, ids: tuple[str, ...], **_: Any) -> None:
    """Revoke join tokens. Machines that have joined with them stay in the fleet."""
    missing = [id_ for id_ in ids if not await token_store.revoke_token(transport, _id(id_))]
    for id_ in ids:
        if id_ not in missing:
            click.echo(f"token/{_id(id_)} revoked")
    if missing:
        raise FleetctlError(
            f"there is no token {_id(missing[0])}: it has expired, or was revoked before. "
            "`fleetctl token list` shows all"
        )


def _id(text: str) -> str:
    """Return the id in an argument, which may be the whole token: its secret must not be printed."""
    parts = text.removeprefix("token/").split(".")
    return parts[2] if len(parts) == 4 else parts[0][:64]


def parse_name(text: str) -> str:
    """Return a node's name. Raises click.UsageError."""
    try:
        return _NAME.validate_python(text)
    except ValidationError as error:
        raise click.UsageError(
            f"{text!r} is not a name: expected lower-case letters, digits, '-' and '.', at most 128 characters"
        ) from error


def parse_lifetime(text: str) -> timedelta:
    """Return the lifetime of `30m`, `12h` or `7d`. Raises click.UsageError."""
    lifetime = timedelta(seconds=min(parse_duration(text, "--ttl"), _TOO_LONG_S))
    if not timedelta(0) < lifetime <= MAX_LIFETIME:
        raise click.UsageError(
            f"--ttl: {text} is not between 1s and {MAX_LIFETIME.days}d; a token that lives longer is a password"
        )
    return lifetime


async def _with_pool_labels(transport: Transport, wanted: TokenOptions) -> TokenOptions:
    """Add the labels that the pool selects; without a pool, return the options as they are."""
    if wanted.pool is None:
        return wanted
    pool = await objects.get(transport, NodePool, wanted.pool)
    if pool is None:
        raise FleetctlError(
            f"there is no pool {wanted.pool}; `fleetctl get nodepools` lists the pools"
        )
    selected = pool.spec.selector.match_labels if pool.spec.selector is not None else {}
    if not selected:
        raise FleetctlError(
            f"pool {wanted.pool} selects no labels, so a label cannot put a node into it; add the node to spec.nodes "
            "of the pool instead, or give the pool a selector with matchLabels"
        )
    return replace(wanted, labels={**selected, **wanted.labels})
