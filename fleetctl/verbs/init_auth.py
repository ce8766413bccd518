"""The verb `fleetctl init-auth`: creates etcd users and roles, each with the permissions of one process.

The command can be interrupted and run again: each step reads the current state first, and etcd starts to enforce
passwords last, when root's password is on disk.
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
    """Arguments of the command."""

    address: EtcdAddress
    folder: PasswordFolder
    nodes: tuple[str, ...]
    rotated: frozenset[str]


@click.command("init-auth")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    required=True,
    help="Folder for the password files, one per user; created if it does not exist.",
)
@click.option("--node", "nodes", multiple=True, help="Name of a node to add; repeatable.")
@click.option(
    "--rotate",
    "rotated",
    multiple=True,
    metavar="USER",
    help="User that gets a new password, such as fleet-gateway or root; repeatable.",
)
@click.option(
    "--insecure", is_flag=True, help="Allow passwords over plain HTTP to another machine."
)
@cluster_options
def init_auth(
    out: Path, nodes: tuple[str, ...], rotated: tuple[str, ...], insecure: bool, **options: Any
) -> None:
    """Create users and roles in etcd: one per fleet component, and one per node.

    Run it again to add a node, after an upgrade, or after an interruption.
    """
    address = address_from_flags(options)
    _check_transport(address, insecure=insecure)
    request = InitAuthRequest(
        address=address,
        folder=PasswordFolder(out),
        nodes=tuple(map(_node_name, nodes)),
        rotated=frozenset(rotated),
    )
    with request.folder.lock():
        run(initialize_auth(request, click.echo))


def _check_transport(address: EtcdAddress, *, insecure: bool) -> None:
    """Refuse connections over which passwords must not be sent."""
    if address.socket is not None:
        raise FleetctlError(
            "init-auth needs an etcd that is reached over the network: give its URL with --etcd. The etcd of "
            "`fleetctl up` is protected by its data folder, and its processes use no passwords"
        )
    if address.transport == "http":
        raise FleetctlError(
            "init-auth needs gRPC: run it without --etcd-transport http, on a machine that reaches etcd's gRPC "
            "port. The fleet's processes may use either transport"
        )
    exposed = [url for url in address.endpoints if _is_plain_text(url)]
    if exposed and not insecure:
        raise FleetctlError(
            f"{exposed[0]} is on another machine and uses http, so passwords would be sent in plain text. Give etcd "
            "a certificate and use https:// (docs/operations/security.md), or pass --insecure if you "
            "trust that network"
        )


def _is_plain_text(url: str) -> bool:
    """Return whether traffic to the URL is neither encrypted nor local."""
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
            f"--node {name}: not a node name. Write it as `fleetctl get nodes` shows it: lower-case "
            "letters, digits, '-' and '.'"
        ) from error


async def initialize_auth(request: InitAuthRequest, say: Callable[[str], None]) -> None:
    """Create or update etcd's users and roles, and report each change through `say`.

    Raises:
        FleetctlError: a step failed; finished steps remain, and the command can be run again.

    """
    try:
        is_on, client = await _open_client(request)
        setup = AccountSetup(client, request.folder, say, is_on=is_on, rotated=request.rotated)
        try:
            await _set_up(request, setup, client, is_on=is_on)
        finally:
            await client.close()
    except StoreError as error:
        raise FleetctlError(
            f"{from_store_error(error).message.rstrip('.')}. Finished steps remain; run the command again to continue"
        ) from error
    _print_next_steps(request, say, is_on=is_on)


async def _open_client(request: InitAuthRequest) -> tuple[bool, AuthClient]:
    """Return whether etcd enforces passwords, and a client with root's permissions."""
    anonymous = replace(request.address, username="", password="")
    probe = AuthClient(anonymous)
    try:
        if not await probe.is_on():
            return False, AuthClient(anonymous)
        root = await _find_root(request, probe)
    finally:
        await probe.close()
    return True, AuthClient(replace(request.address, username=root.user, password=root.password))


async def _find_root(request: InitAuthRequest, probe: AuthClient) -> Credentials:
    """Return valid credentials of root: from the flags, else from the password folder."""
    address, folder = request.address, request.folder
    if address.username:
        if await probe.is_password(address.username, address.password):
            return Credentials(user=address.username, password=address.password)
        raise FleetctlError(
            f"etcd at {address} refuses user {address.username} with this password. Give root's password with "
            "--etcd-user root --etcd-password-file FILE"
        )
    for password in (folder.staged(ROOT_FILE), folder.password(ROOT_FILE)):
        if password is not None and await probe.is_password(etcd_users.ROOT_USER, password):
            return Credentials(user=etcd_users.ROOT_USER, password=password)
    file = folder.file(ROOT_FILE)
    why = f"the password in {file} is not root's" if file.exists() else f"{file} does not exist"
    raise FleetctlError(
        f"etcd at {address} already enforces passwords, and {why}. Give root's password with --etcd-user root "
        "--etcd-password-file FILE, or give the folder of the first `init-auth` with --out"
    )


async def _set_up(
    request: InitAuthRequest, setup: AccountSetup, client: AuthClient, *, is_on: bool
) -> None:
    prefix = request.address.prefix
    existing = [etcd_users.node_of_user(user, prefix=prefix) for user in await client.users()]
    nodes = {*request.nodes, *(node for node in existing if node is not None)}
    accounts = etcd_users.fleet_accounts(nodes, prefix=prefix)
    _check_rotated(request, [account.user for account in accounts])
    if not is_on:
        await setup.create_root()
    for account in accounts:
        await setup.set_up_account(account)
    if not is_on:
        await client.enable()
        return
    # Last, because a new password of root invalidates this client's own token.
    await setup.renew_root()


def _check_rotated(request: InitAuthRequest, users: list[str]) -> None:
    known = [etcd_users.ROOT_USER, *users]
    for user in sorted(request.rotated):
        if user not in known:
            raise FleetctlError(f"--rotate {user}: no such user. Known users: {', '.join(known)}")


def _print_next_steps(request: InitAuthRequest, say: Callable[[str], None], *, is_on: bool) -> None:
    folder = request.folder.path
    if is_on:
        say(f"etcd at {request.address} enforces passwords, as before")
        return
    say(f"etcd at {request.address} now enforces passwords. Next steps:")
    say(f"  - keep {folder / ROOT_FILE} in a safe place; no process needs it")
    say(
        "  - copy each file to the machine of its process (mode 0600), and restart the process "
        "with --etcd-password-file FILE"
    )
    flags = _flags(request.address)
    admin = shlex.quote(str(folder / "admin.env"))
    say(f"  - use fleetctl with: fleetctl get nodes {flags} --etcd-password-file {admin}")
    say(
        f"  - add a node with: fleetctl init-auth --out {shlex.quote(str(folder))} --node NAME {flags}"
    )


def _flags(address: EtcdAddress) -> str:
    """Return the etcd flags of the address, quoted for a shell."""
    values = {
        "--etcd": ",".join(address.endpoints),
        "--etcd-ca": address.ca,
        "--etcd-cert": address.certificate,
        "--etcd-key": address.key,
        "--etcd-prefix": address.prefix,
    }
    return " ".join(f"{flag} {shlex.quote(str(value))}" for flag, value in values.items() if value)
