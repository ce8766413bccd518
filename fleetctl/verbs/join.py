"""The verb `fleetctl join`: makes this machine a part of a fleet, with a token."""

import asyncio
import contextlib
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import click
import platformdirs

from fleetctl.cli.connect import translate_errors
from fleetctl.cli.errors import FleetctlError
from fleetctl.fleets import join_client
from fleetctl.fleets.join_client import JoinAddress, parse_addresses
from fleetctl.fleets.join_files import JoinFolder, Membership, check_answer, role_command
from fleetctl.verbs.token import parse_name
from identity.folder import IdentityFolder
from identity.join_token import JoinToken, TokenError, parse_token
from identity.names import Identity, Role
from machinery import process_secrets
from machinery.clock import SystemClock
from nodeagent.hardware.probe import read_machine_facts
from nodeagent.hardware.readings import HardwareError, HardwareFacts
from nodeagent.node.identity import dns_label
from schemas.wire.join import JoinAnswer, JoinBody, Machine

_TOKEN_MARK = "mf1."  # noqa: S105 - the beginning of every token
_MAX_TOKEN_BYTES = 4096

_HELP = """Join a fleet with a token of `fleetctl token create`.

\b
  fleetctl join mf1.... control-1:4002
  fleetctl join - control-1:4002,control-2:4002 < token      as ps and the shell's history show arguments
  fleetctl join --token-file token control-1:4002

The fleet proves itself first: the token holds the hash of its authority, and nothing secret is sent to a server that the
authority has not certified. The private key is made here and never leaves this machine. Run the command again after any
failure: the same token counts once.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinRequest:
    """Arguments of the command."""

    token: JoinToken
    addresses: tuple[JoinAddress, ...]
    folder: JoinFolder
    machine: Machine
    limit_s: float


@click.command("join", help=_HELP)
@click.argument("words", nargs=-1, metavar="[TOKEN|-] HOST:PORT[,HOST:PORT]")
@click.option(
    "--token-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="File with the token, not readable by other users.",
)
@click.option("--name", help="Name in the fleet (default: the token's, or the host name).")
@click.option(
    "--identity-dir",
    type=click.Path(file_okay=False, path_type=Path),
    envvar="FLEET_IDENTITY_DIR",
    help="Folder for certificate and key (default: identity in the user's data folder).",
)
@click.option(
    "--timeout",
    "limit_s",
    type=click.FloatRange(min=1),
    default=120.0,
    show_default=True,
    help="Seconds to try again while no join port answers.",
)
def join(words: tuple[str, ...], token_file: Path | None, **options: Any) -> None:
    """Join a fleet."""
    token_text, addresses = _arguments(words, has_file=token_file is not None)
    folder = JoinFolder(IdentityFolder(_folder(options["identity_dir"])))
    token = _read_token(token_text, token_file)
    with translate_errors(), folder.lock():
        known = folder.membership()
        if known is not None and _is_member(known, token, SystemClock().now(), folder):
            click.echo(_member_text(known, folder))
            return
        request = JoinRequest(
            token=token,
            addresses=addresses,
            folder=folder,
            machine=_machine(options["name"], addresses),
            limit_s=options["limit_s"],
        )
        identity, variables = asyncio.run(join_with_token(request))
    _print_next(identity, variables, folder)


def _arguments(words: Sequence[str], *, has_file: bool) -> tuple[str, tuple[JoinAddress, ...]]:
    """Return the token's text, "-" for standard input, "" for a file; and the addresses."""
    expected = 1 if has_file else 2
    if len(words) != expected:
        if any(word.startswith(_TOKEN_MARK) for word in words[-1:]):
            raise click.UsageError("the address is missing: fleetctl join TOKEN HOST:PORT")
        raise click.UsageError(
            "expected a token and the address of a join port: fleetctl join TOKEN HOST:PORT, with - for a token on "
            "standard input; or --token-file FILE and the address"
        )
    return ("" if has_file else words[0]), parse_addresses(words[-1])


def _folder(given: Path | None) -> Path:
    default = Path(platformdirs.user_data_dir("mlx-fleet")) / "identity"
    return (given or default).expanduser().absolute()


def _read_token(text: str, file: Path | None) -> JoinToken:
    if file is not None:
        try:
            text = process_secrets.read_secret_file(file).decode(errors="replace")
        except OSError as error:
            raise FleetctlError(f"--token-file: {error}") from error
    elif text == "-":
        text = sys.stdin.read(_MAX_TOKEN_BYTES)
    try:
        return parse_token(text)
    except TokenError as error:
        raise FleetctlError(str(error)) from error


def _is_member(known: Membership, token: JoinToken, now: datetime, folder: JoinFolder) -> bool:
    """Return whether the folder holds a valid identity of the token's fleet. Raises FleetctlError: of another one."""
    if token.authority_hash not in known.authority_hashes:
        raise FleetctlError(
            f"{folder.identity.path} holds {known.identity.uri}, an identity of another fleet than the token's. Give "
            "another folder with --identity-dir, or move this one away"
        )
    return now < known.not_after


def _member_text(known: Membership, folder: JoinFolder) -> str:
    return (
        f"this machine is {known.identity.role}/{known.identity.name} already, until {known.not_after:%Y-%m-%d %H:%M} UTC; "
        f"the token was not used. Its files are in {folder.identity.path}"
    )


def _machine(name: str | None, addresses: Sequence[JoinAddress]) -> Machine:
    """Return the description of this machine. Raises FleetctlError."""
    facts = read_facts()
    default = dns_label(facts.hostname, fallback="mac")
    return Machine(
        name=None if name is None else parse_name(name),
        default_name=default,
        hardware_uuid=facts.hardware_uuid.strip().lower(),
        addresses=tuple(dict.fromkeys([*_own_addresses(addresses), facts.hostname.lower()])),
    )


def read_facts() -> HardwareFacts:
    """Return the facts of this machine. Raises FleetctlError."""
    try:
        return asyncio.run(read_machine_facts())
    except HardwareError as error:
        raise FleetctlError(str(error)) from error


def _own_addresses(peers: Sequence[JoinAddress]) -> list[str]:
    """Return the addresses from which this machine reaches the join ports; nothing is sent."""
    found = []
    for peer in peers:
        with contextlib.suppress(OSError):
            family, kind, protocol, _, where = socket.getaddrinfo(
                peer.host, peer.port, type=socket.SOCK_DGRAM
            )[0]
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(where)
                found.append(probe.getsockname()[0].partition("%")[0])
    return found


async def join_with_token(request: JoinRequest) -> tuple[Identity, dict[str, str]]:
    """Join, write all files, and return the identity and the variables of its process. Raises FleetctlError."""
    clock = SystemClock()
    key, signing_request = request.folder.load_key()
    body = JoinBody(
        id=request.token.id,
        secret=request.token.secret_text,
        request=signing_request.decode(),
        machine=request.machine,
    )
    pinned = request.token.authority_hash
    answer = await join_client.join(request.addresses, pinned, body, clock, limit_s=request.limit_s)
    identity = check_answer(answer, signing_request, pinned)
    variables = process_variables(identity, answer, request.folder, request.machine)
    request.folder.write(key, answer, variables, clock.now())
    return identity, variables


def process_variables(
    identity: Identity, answer: JoinAnswer, folder: JoinFolder, machine: Machine
) -> dict[str, str]:
    """Return the environment variables with which the process is started."""
    own = folder.identity
    found = {"FLEET_IDENTITY_DIR": str(own.path)}
    if answer.etcd:
        found["FLEET_ETCD"] = ",".join(answer.etcd)
    if answer.etcd_prefix:
        found["FLEET_ETCD_PREFIX"] = answer.etcd_prefix
    if answer.etcd_user:
        found["FLEET_ETCD_PASSWORD_FILE"] = str(folder.password)
    if identity.role is Role.NODE:
        found["FLEET_NODE_NAME"] = identity.name
        found["FLEET_STATE_DIR"] = str(own.path.parent / "agent")
        if machine.addresses:
            found["FLEET_NODE_ADDRESS"] = machine.addresses[0]
    if identity.role is Role.ADMIN:
        found["FLEET_ETCD_CA"] = str(own.authorities)
        found["FLEET_ETCD_CERT"] = found["FLEET_ETCD_KEY"] = str(own.identity)
    return found


def _print_next(identity: Identity, variables: dict[str, str], folder: JoinFolder) -> None:
    click.echo(f"{identity.role}/{identity.name} joined the fleet {identity.fleet}")
    click.echo(f"  identity: {folder.identity.path}")
    what = "use it with" if identity.role is Role.ADMIN else "start it with"
    click.echo(f"  {what}: {role_command(identity.role, variables)}")
    click.echo(f"  or with the variables in {folder.environment}")
    if "FLEET_ETCD" not in variables:
        click.echo(
            "warning: the reconciler has no https:// address of etcd to give; add --etcd URL, or start the reconciler "
            "with --advertise-etcd",
            err=True,
        )
