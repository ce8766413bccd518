"""`fleetctl init-auth`: users and roles in etcd, so that each process may do its own work and no other.

Whatever interrupts it, it can be run again: each step looks first, and users are asked for passwords
last, when root's is on the disk.
"""

import ipaddress
import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click
from pydantic import TypeAdapter, ValidationError

from fleetctl.cli.connect import cluster_options, run
from fleetctl.cli.errors import FleetctlError, from_store_error
from fleetctl.fleets.etcd_accounts import ROOT_FILE, AccountSetup, PasswordFolder
from schemas.meta import ObjectName
from store.errors import StoreError
from store.etcd import users as etcd_users
from store.etcd.address import EtcdAddress
from store.etcd.flags import address_from_flags
from store.etcd.grpc.admin import AuthClient
from store.etcd.users import Credentials

_NAME = TypeAdapter(ObjectName)


@dataclass(frozen=True, slots=True, kw_only=True)
class InitAuthRequest:
    """What the command was asked for."""

    where: EtcdAddress
    folder: PasswordFolder
    nodes: tuple[str, ...]
    rotated: frozenset[str]


@click.command("init-auth")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    required=True,
    help="Folder for the password files, one a user; made if need be.",
)
@click.option("--node", "nodes", multiple=True, help="Name of a node to add; again for each.")
@click.option(
    "--rotate",
    "rotated",
    multiple=True,
    metavar="USER",
    help="User to give a new password, such as fleet-gateway or root; again for each.",
)
@click.option("--insecure", is_flag=True, help="Send passwords over plain http to another machine.")
@cluster_options
def init_auth(
    out: Path, nodes: tuple[str, ...], rotated: tuple[str, ...], insecure: bool, **options: Any
) -> None:
    """Set up users and roles in etcd: one for each part of the fleet, and one for each node.

    Safe to run again: to add a node, after an upgrade, or when it was interrupted.
    """
    where = address_from_flags(options)
    _check_transport(where, insecure=insecure)
    order = InitAuthRequest(
        where=where,
        folder=PasswordFolder(out),
        nodes=tuple(map(_node_name, nodes)),
        rotated=frozenset(rotated),
    )
    with order.folder.held():
        run(initialize_auth(order, click.echo))


def _check_transport(where: EtcdAddress, *, insecure: bool) -> None:
    """Refuse what passwords must not go to."""
    if where.socket is not None:
        raise FleetctlError(
            "init-auth is for an etcd of several machines: give its URL with --etcd. The etcd of "
            "`fleetctl up` is guarded by its folder, and the processes there have no passwords"
        )
    if where.transport == "http":
        raise FleetctlError(
            "init-auth speaks gRPC alone: run it where gRPC gets through, without "
            "--etcd-transport http. The fleet's processes may use either"
        )
    clear = [url for url in where.endpoints if _is_plain_text(url)]
    if clear and not insecure:
        raise FleetctlError(
            f"{clear[0]} is another machine, and http: passwords would travel in clear. Give etcd "
            "a certificate and write https:// (docs/operations/security.md), or say --insecure if "
            "nobody else is on that network"
        )


def _is_plain_text(url: str) -> bool:
    """Return whether what goes there can be read on the way."""
    parts = urlsplit(url)
    if parts.scheme == "https" or parts.hostname == "localhost":
        return False
    try:
        return not ipaddress.ip_address(parts.hostname or "").is_loopback
    except ValueError:
        return True


def _node_name(name: str) -> str:
    try:
        return _NAME.validate_python(name)
    except ValidationError as error:
        raise click.UsageError(
            f"--node {name}: write the node's name as `fleetctl get nodes` shows it: lower-case "
            "letters, digits, '-' and '.'"
        ) from error


async def initialize_auth(order: InitAuthRequest, say: Callable[[str], None]) -> None:
    """Do what the command was asked for.

    Raises:
        FleetctlError: it could not be done, or not all of it; it can be run again.

    """
    try:
        is_on, administrator = await _administrator(order)
        setup = AccountSetup(administrator, order.folder, say, is_on=is_on, rotated=order.rotated)
        try:
            await _set_up(order, setup, administrator, is_on=is_on)
        finally:
            await administrator.close()
    except StoreError as error:
        raise FleetctlError(
            f"{from_store_error(error).message.rstrip('.')}. What was done so far stays; run the command again to go on"
        ) from error
    _print_next_steps(order, say, is_on=is_on)


async def _administrator(order: InitAuthRequest) -> tuple[bool, AuthClient]:
    """Return whether etcd asks for passwords, and the way to it of somebody who may do everything."""
    nobody = replace(order.where, username="", password="")
    asking = AuthClient(nobody)
    try:
        if not await asking.is_on():
            return False, AuthClient(nobody)
        who = await _find_root(order, asking)
    finally:
        await asking.close()
    found = AuthClient(replace(order.where, username=who.user, password=who.password))
    return True, found


async def _find_root(order: InitAuthRequest, asking: AuthClient) -> Credentials:
    """Return with which user and password we may go on."""
    where, folder = order.where, order.folder
    if where.username:
        if await asking.is_password(where.username, where.password):
            return Credentials(user=where.username, password=where.password)
        raise FleetctlError(
            f"etcd at {where} refuses user {where.username} with that password. Give root's with "
            "--etcd-user root --etcd-password-file FILE"
        )
    for password in (folder.staged(ROOT_FILE), folder.password(ROOT_FILE)):
        if password is not None and await asking.is_password(etcd_users.ROOT_USER, password):
            return Credentials(user=etcd_users.ROOT_USER, password=password)
    file = folder.file(ROOT_FILE)
    why = f"the one in {file} is not root's" if file.exists() else f"there is no {file}"
    raise FleetctlError(
        f"etcd at {where} asks for passwords already, and {why}. Give root's with --etcd-user root "
        "--etcd-password-file FILE, or --out with the folder of the first `init-auth`"
    )


async def _set_up(
    order: InitAuthRequest, setup: AccountSetup, administrator: AuthClient, *, is_on: bool
) -> None:
    prefix = order.where.prefix
    there = [etcd_users.node_of_user(user, prefix=prefix) for user in await administrator.users()]
    nodes = {*order.nodes, *(node for node in there if node is not None)}
    accounts = etcd_users.fleet_accounts(nodes, prefix=prefix)
    _check_rotated(order, [account.user for account in accounts])
    if not is_on:
        await setup.root()
    for account in accounts:
        await setup.account(account)
    if not is_on:
        await administrator.enable()
        return
    # Last, for with it our own token ends.
    await setup.renew_root()


def _check_rotated(order: InitAuthRequest, users: list[str]) -> None:
    known = [etcd_users.ROOT_USER, *users]
    for user in sorted(order.rotated):
        if user not in known:
            raise FleetctlError(f"--rotate {user}: no such user. There are {', '.join(known)}")


def _print_next_steps(order: InitAuthRequest, say: Callable[[str], None], *, is_on: bool) -> None:
    folder = order.folder.path
    if is_on:
        say(f"etcd at {order.where} asks for passwords, as it did before")
        return
    say(f"etcd at {order.where} asks for passwords from now on. Next:")
    say(f"  - keep {folder / ROOT_FILE} somewhere safe; no process needs it")
    say(
        "  - take each file to the machine of its process (mode 0600), start the process again "
        "with --etcd-password-file FILE"
    )
    flags = _flags(order.where)
    admin = shlex.quote(str(folder / "admin.env"))
    say(f"  - fleetctl itself: fleetctl get nodes {flags} --etcd-password-file {admin}")
    say(f"  - a new node: fleetctl init-auth --out {shlex.quote(str(folder))} --node NAME {flags}")


def _flags(where: EtcdAddress) -> str:
    """Return the flags that lead there, as one writes them."""
    given = {
        "--etcd": ",".join(where.endpoints),
        "--etcd-ca": where.ca,
        "--etcd-cert": where.certificate,
        "--etcd-key": where.key,
        "--etcd-prefix": where.prefix,
    }
    return " ".join(f"{flag} {shlex.quote(str(said))}" for flag, said in given.items() if said)
