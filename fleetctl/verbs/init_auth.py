"""The verb `fleetctl init-auth`: creates etcd users and roles, each with the permissions of one process.

It has two steps. `--prepare` makes users, roles and password files, and locks no process out. `--enable` makes etcd
enforce passwords, when every live process has one. Each step reads the current state first, and can be interrupted and run
again.
"""

import ipaddress
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import click
from pydantic import TypeAdapter, ValidationError

from fleetctl.cli.connect import cluster_options, run
from fleetctl.cli.errors import FleetctlError, from_store_error
from fleetctl.fleets.etcd_accounts import (
    ROOT_FILE,
    AccountSetup,
    PasswordFolder,
    StoreClient,
    list_clients,
)
from schemas.meta import ObjectName
from store.errors import StoreError
from store.etcd import users as etcd_users
from store.etcd.address import EtcdAddress
from store.etcd.connect import connect
from store.etcd.flags import address_from_flags
from store.etcd.grpc.admin import AuthClient, member_addresses
from store.etcd.member.binary import parse_version_number, unsafe_users
from store.etcd.users import Credentials

_NAME = TypeAdapter(ObjectName)


@dataclass(frozen=True, slots=True, kw_only=True)
class InitAuthRequest:
    """Arguments of the command."""

    address: EtcdAddress
    folder: PasswordFolder
    nodes: tuple[str, ...]
    rotated: frozenset[str]
    step: Literal["", "prepare", "enable"] = ""
    """The step to take; "" to say which one is next."""
    is_forced: bool = False
    """True to enable though processes have no password."""
    dashboard_writes: bool | None = None
    """True to let the dashboard change what users declare, False to end that, None to leave it as it is."""


_HELP = """Create users and roles in etcd, then make etcd enforce passwords.

\b
  fleetctl init-auth --out fleet-auth --prepare --node mac-1 ...    users, roles, files
  (copy each file to its machine, and restart the process with --etcd-password-file)
  fleetctl init-auth --out fleet-auth --enable ...                  etcd enforces passwords

Without a step, says which one is next. Run --prepare again to add a node, after an upgrade, or
after an interruption.
"""


@click.command(
    "init-auth", help=_HELP, short_help="Create users in etcd, then make it enforce passwords."
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    required=True,
    help="Folder for the password files, one per user; created if it does not exist.",
)
@click.option(
    "--prepare",
    "step",
    flag_value="prepare",
    help="Create or update users, roles and password files. No process is locked out.",
)
@click.option(
    "--enable",
    "step",
    flag_value="enable",
    help="Make etcd enforce passwords. Refused while a live process has none.",
)
@click.option(
    "--force",
    "is_forced",
    is_flag=True,
    help="With --enable: lock out the processes that have no password.",
)
@click.option(
    "--node", "nodes", multiple=True, help="With --prepare: name of a node to add; repeatable."
)
@click.option(
    "--rotate",
    "rotated",
    multiple=True,
    metavar="USER",
    help="With --prepare: user that gets a new password, such as fleet-gateway or root; repeatable.",
)
@click.option(
    "--dashboard-writes/--no-dashboard-writes",
    default=None,
    help="With --prepare: let the dashboard change the fleet for people with the role operator or admin; it is then as "
    "powerful as fleet-admin. It also needs --allow-writes. Default: as before, at first no.",
)
@click.option(
    "--insecure", is_flag=True, help="Allow passwords over plain HTTP to another machine."
)
@cluster_options
def init_auth(
    out: Path, nodes: tuple[str, ...], rotated: tuple[str, ...], insecure: bool, **options: Any
) -> None:
    """Take one of the two steps, or say which one is next."""
    address = address_from_flags(options)
    # Refuse connections over which passwords must not be sent.
    if address.socket is not None:
        raise FleetctlError(
            "init-auth needs an etcd that is reached over the network: give its URL with --etcd. The etcd of "
            "`fleetctl up` is protected by its data folder, and its processes use no passwords"
        )
    exposed = [url for url in address.endpoints if _is_plain_text(url)]
    if exposed and not insecure:
        raise FleetctlError(
            f"{exposed[0]} is on another machine and uses http, so passwords would be sent in plain text. Give etcd "
            "a certificate and use https:// (docs/operations/etcd-security.md), or pass --insecure if you "
            "trust that network"
        )
    step: Literal["", "prepare", "enable"] = options["step"] or ""
    if (nodes or rotated) and step != "prepare":
        raise click.UsageError("--node and --rotate need --prepare")
    if options["dashboard_writes"] is not None and step != "prepare":
        raise click.UsageError("--dashboard-writes needs --prepare")
    if options["is_forced"] and step != "enable":
        raise click.UsageError("--force needs --enable")
    request = InitAuthRequest(
        address=address,
        folder=PasswordFolder(out),
        nodes=tuple(map(_node_name, nodes)),
        rotated=frozenset(rotated),
        step=step,
        is_forced=options["is_forced"],
        dashboard_writes=options["dashboard_writes"],
    )
    with request.folder.lock():
        try:
            run(initialize_auth(request, click.echo))
        except FleetctlError as error:
            if address.transport == "grpc":
                raise
            raise FleetctlError(
                f"{error}\ninit-auth uses gRPC whatever --etcd-transport says: run it on a machine that reaches etcd's "
                "gRPC port. The fleet's processes may use either transport"
            ) from error


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
    """Take the requested step, and report each change through `say`.

    Raises:
        FleetctlError: a step failed or is refused; finished parts remain, and the command can be run again.

    """
    try:
        is_on, client = await _open_client(request)
        try:
            await _take_step(request, client, say, is_on=is_on)
        finally:
            await client.close()
    except StoreError as error:
        raise FleetctlError(
            f"{from_store_error(error).message.rstrip('.')}. Finished steps remain; run the command again to continue"
        ) from error


async def _take_step(
    request: InitAuthRequest, client: AuthClient, say: Callable[[str], None], *, is_on: bool
) -> None:
    if request.step == "prepare":
        await _warn_of_version(request.address, say)
        setup = AccountSetup(client, request.folder, say, is_on=is_on, rotated=request.rotated)
        prefix = request.address.prefix
        existing = [etcd_users.node_of_user(user, prefix=prefix) for user in await client.users()]
        nodes = {*request.nodes, *(node for node in existing if node is not None)}
        writes = request.dashboard_writes
        if writes is None:
            writes = await _may_dashboard_write(client, prefix)
        accounts = etcd_users.fleet_accounts(nodes, prefix=prefix, dashboard_writes=writes)
        _check_rotated(request, [account.user for account in accounts])
        if not is_on:
            await setup.create_root()
        for account in accounts:
            await setup.set_up_account(account)
        if is_on:
            # Last, because a new password of root invalidates this client's own token.
            await setup.renew_root()
        await _print_next_step(request, client, say, is_on=is_on)
    elif request.step == "enable" and not is_on:
        await _warn_of_version(request.address, say)
        missing = await _missing_users(request, client)
        if missing:
            raise FleetctlError(
                f"etcd has no user {missing[0]} yet. Run `{_command(request, '--prepare')}` first"
            )
        if request.folder.password(ROOT_FILE) is None:
            raise FleetctlError(
                f"{request.folder.file(ROOT_FILE)} does not exist, and without root's password nobody could change "
                "users again. Give the folder of --prepare with --out"
            )
        locked_out = [
            store_client.name
            for store_client in await _clients(request)
            if not store_client.has_password
        ]
        if locked_out and not request.is_forced:
            raise FleetctlError(
                f"{_count(locked_out)} without a password for etcd would be locked out: {', '.join(locked_out)}. Restart "
                f"each with --etcd-password-file FILE (the files are in {request.folder.path}), then run this again; "
                "--force enables passwords all the same (for processes with a certificate whose CN is their user)"
            )
        await client.enable()
        say(f"etcd at {request.address} now enforces passwords")
        for name in locked_out:
            say(f"warning: {name} is locked out until it is restarted with its password")
        _print_hints(request, say)
    else:
        await _print_next_step(request, client, say, is_on=is_on)


async def _warn_of_version(address: EtcdAddress, say: Callable[[str], None]) -> None:
    """Warn of versions of etcd whose users are not as safe as they should be."""
    for member in member_addresses(address):
        transport = connect(replace(member, username="", password=""))
        try:
            text = (await transport.status()).version
        except StoreError:
            continue  # the next step reports members that do not answer
        finally:
            await transport.close()
        why = unsafe_users(parse_version_number(text))
        if why:
            say(f"warning: etcd at {member} is {text}: {why}")


def _count(names: Sequence[str]) -> str:
    return "1 process" if len(names) == 1 else f"{len(names)} processes"


async def _clients(request: InitAuthRequest) -> Sequence[StoreClient]:
    """Return the live processes; only while etcd enforces no passwords, so without one."""
    transport = connect(replace(request.address, username="", password=""))
    try:
        return await list_clients(transport)
    finally:
        await transport.close()


async def _missing_users(request: InitAuthRequest, client: AuthClient) -> list[str]:
    """Return the users that --prepare has still to create."""
    wanted = [
        account.user for account in etcd_users.fleet_accounts((), prefix=request.address.prefix)
    ]
    existing = await client.users()
    return [user for user in (etcd_users.ROOT_USER, *wanted) if user not in existing]


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


async def _may_dashboard_write(client: AuthClient, prefix: str) -> bool:
    """Return whether an earlier run let the dashboard write."""
    (role,) = (
        account.role
        for account in etcd_users.fleet_accounts((), prefix=prefix)
        if account.file == "dashboard.env"
    )
    if role not in await client.roles():
        return False
    return etcd_users.dashboard_may_write(await client.permissions_of(role), prefix=prefix)


def _check_rotated(request: InitAuthRequest, users: list[str]) -> None:
    known = [etcd_users.ROOT_USER, *users]
    for user in sorted(request.rotated):
        if user not in known:
            raise FleetctlError(f"--rotate {user}: no such user. Known users: {', '.join(known)}")


async def _print_next_step(
    request: InitAuthRequest, client: AuthClient, say: Callable[[str], None], *, is_on: bool
) -> None:
    if is_on:
        say(f"etcd at {request.address} enforces passwords, as before")
        _print_hints(request, say)
        return
    if await _missing_users(request, client):
        say(f"etcd at {request.address} has no users yet, and enforces no passwords. Next step:")
        say(f"  {_command(request, '--prepare')} --node NAME")
        return
    say(f"etcd at {request.address} has the users, and does not enforce passwords yet. Next steps:")
    clients = await _clients(request)
    without = [store_client.name for store_client in clients if not store_client.has_password]
    say(
        f"  - copy each file in {request.folder.path} to the machine of its process (mode 0600), and restart the "
        "process with --etcd-password-file FILE"
    )
    for name in without:
        say(f"      {name} has no password yet")
    if clients and not without:
        say("      done: every live process has a password")
    say(f"  - then run: {_command(request, '--enable')}")


def _print_hints(request: InitAuthRequest, say: Callable[[str], None]) -> None:
    folder, flags = request.folder.path, _flags(request.address)
    say(f"  - keep {folder / ROOT_FILE} in a safe place; no process needs it")
    admin = shlex.quote(str(folder / "admin.env"))
    say(f"  - use fleetctl with: fleetctl get nodes {flags} --etcd-password-file {admin}")
    say(f"  - add a node with: {_command(request, '--prepare')} --node NAME")


def _command(request: InitAuthRequest, step: str) -> str:
    """Return the command of a step, quoted for a shell."""
    out = shlex.quote(str(request.folder.path))
    return f"fleetctl init-auth {step} --out {out} {_flags(request.address)}"


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
