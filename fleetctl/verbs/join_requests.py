"""The verbs `fleetctl approve` and `fleetctl deny`, and `fleetctl get joinrequests`: machines that wait for an approval."""

import hmac
from collections.abc import Sequence
from typing import Any

import click

from fleetctl.cli.arguments import reason_option
from fleetctl.cli.connect import open_store, run, with_store
from fleetctl.cli.documents import print_tree
from fleetctl.cli.errors import FleetctlError
from fleetctl.discovery.suggestions import Suggestion
from fleetctl.fleets import join_approvals
from fleetctl.fleets.join_approvals import TITLES, WaitingMachine
from fleetctl.output import printers
from identity import join_requests
from identity.join_code import normalize_code
from identity.names import Identity, Role
from identity.signer import find_binding, name_taken
from machinery.clock import SystemClock
from machinery.os_user import current_user
from schemas.trust import FleetTrust
from store import codec, keys
from store.port import Transport

_LISTEN_S = 1.2
"""The time for which the local network is heard for new machines."""
_MAX_HEARD = 20


def show(names: Sequence[str], options: dict[str, Any]) -> None:
    """Print the requests: `fleetctl get joinrequests`."""
    output = options["output"]
    if output not in ("table", "wide", "json", "name"):
        raise click.UsageError("joinrequests are printed as table, wide, json or name")

    is_listening = output in ("table", "wide") and not names

    async def read() -> tuple[list[WaitingMachine], list[Suggestion]]:
        async with open_store(options) as transport:
            machines = await join_approvals.list_machines(transport)
        return machines, await _listen() if is_listening else []

    waiting_machines, heard = run(read())
    if names:
        waiting_machines = [join_approvals.pick(waiting_machines, name) for name in names]
    if output == "json":
        items = [machine.tree() for machine in waiting_machines]
        print_tree({"kind": "List", "items": items}, "json")
        return
    if not waiting_machines:
        click.echo("No machines wait for an approval.", err=True)
    if output == "name":
        for machine in waiting_machines:
            click.echo(f"joinrequest/{machine.request.id}")
    else:
        has_titles = not options["no_headers"]
        now = SystemClock().now()
        known = {machine.request.name for machine in waiting_machines}
        new = [suggestion for suggestion in heard if suggestion.name not in known][:_MAX_HEARD]
        rows = [*(machine.row(now) for machine in waiting_machines), *map(_heard_row, new)]
        if rows:
            click.echo(printers.align_columns(rows, TITLES if has_titles else ()))


async def _listen() -> list[Suggestion]:
    """Return the new machines of the local network, which may not have reached the fleet yet."""
    from fleetctl.discovery import local_network  # noqa: PLC0415 - zeroconf takes 170 ms

    heard = (await local_network.LocalNetwork(SystemClock(), _LISTEN_S).suggest()).suggestions
    new = {suggestion.name: suggestion for suggestion in heard if suggestion.role == "new"}
    return [new[name] for name in sorted(new)]


def _heard_row(one: Suggestion) -> tuple[str, ...]:
    """Return the cells of a machine that is only heard of: it has no request, and nothing of it is proven."""
    return ("<none>", one.name, "", "", one.address.host, "Heard", f"{one.age_s or 0:.0f}s")


@click.command(short_help="Let a machine join that asked without a token.")
@click.argument("machine", metavar="NAME|ID")
@click.option("--code", default=None, help="The six words that the machine shows.")
@click.option(
    "--yes-i-compared",
    is_flag=True,
    help="Do not ask for the code: you know by other means that no server sits between the machine and the fleet.",
)
@reason_option
@with_store
async def approve(
    transport: Transport, machine: str, code: str | None, yes_i_compared: bool, **_: Any
) -> None:
    """Let a machine join that ran `fleetctl join HOST:PORT` without a token.

    It shows six words. Read them from its own screen: they prove that no server sits between it and the fleet.
    """
    waiting = join_approvals.pick(await join_approvals.list_machines(transport), machine)
    await _check_name(transport, waiting)
    _compare(waiting, code, is_compared=yes_i_compared)
    request, clock = waiting.request, SystemClock()
    await join_requests.decide(transport, clock, request, current_user(), is_approved=True)
    click.echo(f"joinrequest/{request.id} approved: {request.name} gets its certificate")


@click.command()
@click.argument("machine", metavar="NAME|ID")
@reason_option
@with_store
async def deny(transport: Transport, machine: str, **_: Any) -> None:
    """Refuse a machine that asks to join."""
    waiting = join_approvals.pick(await join_approvals.list_machines(transport), machine)
    request, clock = waiting.request, SystemClock()
    await join_requests.decide(transport, clock, request, current_user(), is_approved=False)
    click.echo(f"joinrequest/{request.id} denied")
    if request.is_issued:
        click.echo(
            f"warning: {request.name} has its certificate already; `fleetctl delete node {request.name}` "
            "removes it from the fleet",
            err=True,
        )


def _compare(found: WaitingMachine, code: str | None, *, is_compared: bool) -> None:
    """Check the code that a person has read from the machine. Raises FleetctlError: it is another one."""
    request = found.request
    if is_compared:
        return
    if code is None:
        memory = f"{request.memory_bytes >> 30}Gi"
        click.echo(
            f"{request.name} asks to join: {request.chip or 'unknown chip'}, {memory}, from {request.source}, hardware "
            f"UUID {request.hardware_uuid}",
            err=True,
        )
        code = click.prompt("The six words on its screen", err=True)
    expected = normalize_code(found.code)
    if not hmac.compare_digest(normalize_code(code).encode(), expected.encode()):
        raise FleetctlError(
            f"these are not the words of {request.name}, which was not approved. If they are what its own screen shows, a "
            "server may sit between it and the fleet: deny the request, and find out what answers at the address that the "
            "machine was given"
        )


async def _check_name(transport: Transport, found: WaitingMachine) -> None:
    """Refuse a name that the fleet has, before the comparison. Raises FleetctlError."""
    item = await transport.get(keys.FLEET_TRUST)
    assert item is not None  # the code was made of it
    identity = Identity(codec.decode(FleetTrust, item).fleet, Role.NODE, found.request.name)
    bound = await find_binding(transport, identity)
    is_new = bound is None and await transport.get(keys.spec_key("Node", identity.name)) is None
    if not is_new and (bound is None or bound.record.key_hash != found.request.key_hash):
        raise FleetctlError(name_taken(identity))
