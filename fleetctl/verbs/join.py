"""The verb `fleetctl join`: makes this machine a part of a fleet, with a token or by an approval."""

import asyncio
import contextlib
import re
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import click
import platformdirs

from fleetctl.cli.connect import translate_errors
from fleetctl.cli.errors import FleetctlError
from fleetctl.discovery.search import FleetSearch
from fleetctl.discovery.sources import make_sources, read_options, source_options
from fleetctl.fleets import join_client
from fleetctl.fleets.join_client import JoinAddress, parse_addresses
from fleetctl.fleets.join_files import (
    JoinFolder,
    Membership,
    check_answer,
    known_authority,
    role_command,
    role_flags,
)
from fleetctl.services.programs import Part
from fleetctl.verbs.service import Installation, install_joined, open_installation
from fleetctl.verbs.token import parse_name
from identity import announcement
from identity.authority import new_key, read_request, spki_hash
from identity.credentials import Credentials
from identity.folder import IdentityFolder
from identity.join_code import join_code
from identity.join_token import JoinToken, TokenError, parse_token
from identity.names import Identity, Role
from machinery import process_secrets
from machinery.clock import SystemClock
from nodeagent.hardware.probe import read_machine_facts
from nodeagent.hardware.readings import HardwareError, HardwareFacts
from nodeagent.node.identity import dns_label
from schemas.wire.discovery import NO_PORT
from schemas.wire.join import JoinAnswer, JoinBody, Machine, PendingBody, RejoinBody

_TOKEN_MARK = "mf1."  # noqa: S105 - the beginning of every token
_MAX_TOKEN_BYTES = 4096
_TOKEN_S, _APPROVAL_S = 120.0, 3600.0
_PARTS: Final[Mapping[Role, Part]] = {
    Role.NODE: "nodeagent",
    Role.GATEWAY: "gateway",
    Role.RECONCILER: "reconciler",
}

_HELP = """Join a fleet with a token of `fleetctl token create`, or without one by an approval.

\b
  fleetctl join mf1....                                      finds the fleet of the token on the network
  fleetctl join mf1.... control-1:4002
  fleetctl join - control-1:4002,control-2:4002 < token      as ps and the shell's history show arguments
  fleetctl join --token-file token control-1:4002
  fleetctl join control-1:4002                               shows six words, and waits for `fleetctl approve`
  sudo fleetctl join --service mf1.... control-1:4002        and starts the agent, now and at each boot

The fleet proves itself first: the token holds the hash of its authority, and nothing secret is sent to a server that the
authority has not certified. The private key is made here and never leaves this machine. Run the command again after any
failure: the same token counts once.

Without a token the six words take the place of the hash: an administrator compares them with `fleetctl approve`.

A machine that has a certificate of the fleet needs neither: it gets a new certificate, a new password for the store, and the
store's addresses as they are now. Run it on each Mac after `fleetctl restore` on another control Mac.

Without an address the fleet is searched for: at the seeds of a file, on the local network (mDNS), and among the peers of
Tailscale with the tag tag:mlx-fleet. A token decides which of them is trusted. `fleetctl discover` lists what is heard.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinRequest:
    """Arguments of the command."""

    token: JoinToken | None
    """None: an administrator has to approve."""
    addresses: tuple[JoinAddress, ...]
    folder: JoinFolder
    machine: Machine
    limit_s: float


@click.command(
    "join", help=_HELP, short_help="Join a fleet with a token, or without one by an approval."
)
@click.argument("words", nargs=-1, metavar="[TOKEN|-] [HOST:PORT[,HOST:PORT]]")
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
    "--service",
    "is_service",
    is_flag=True,
    help="Start the program of this role as a service of this machine (`fleetctl service install`); on a Mac it needs sudo.",
)
@click.option(
    "--root",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("/"),
    hidden=True,
    help="Folder above all paths of the service, for images and tests.",
)
@click.option(
    "--force",
    is_flag=True,
    help="Join with a new key although the folder holds a valid certificate, such as one that was revoked.",
)
@click.option(
    "--timeout",
    "limit_s",
    type=click.FloatRange(min=1),
    default=None,
    help="Seconds to wait: for a join port that answers (default: 120), or for an approval (default: 3600).",
)
@source_options
@announcement.announce_option
def join(words: tuple[str, ...], token_file: Path | None, **options: Any) -> None:
    """Join a fleet."""
    token_text, addresses = _arguments(words, has_file=token_file is not None)
    # Before anything is sent: a token counts its uses.
    services = open_installation(options["root"]) if options["is_service"] else None
    folder = JoinFolder(IdentityFolder(_folder(options["identity_dir"], services)))
    token = _read_token(token_text, token_file) if token_text or token_file else None
    with translate_errors(), folder.lock():
        known = folder.membership()
        if known is None or not _stays_member(known, token, folder, is_forced=options["force"]):
            # Join; return the identity and the variables of its process.
            facts = read_facts()
            limit_s = options["limit_s"] or (_APPROVAL_S if token is None else _TOKEN_S)
            pinned = None if token is None else token.authority_hash
            waiting = _announced(options, token, addresses, facts)

            async def work() -> tuple[Identity, dict[str, str]]:
                async with announcement.announced(waiting, None, SystemClock()):
                    where = addresses or await _search(options, pinned, limit_s)
                    machine = _machine(options["name"], where, facts)
                    request = JoinRequest(
                        token=token,
                        addresses=where,
                        folder=folder,
                        machine=machine,
                        limit_s=limit_s,
                    )
                    if token is not None:
                        return await join_with_token(request)
                    return await join_with_approval(request, facts, click.echo)

            identity, variables = asyncio.run(work())
            click.echo(f"{identity.role}/{identity.name} joined the fleet {identity.fleet}")
            click.echo(f"  identity: {folder.identity.path}")
            if "FLEET_ETCD" not in variables:
                click.echo(
                    "warning: the reconciler has no https:// address of etcd to give; add --etcd URL, or start the reconciler "
                    "with --advertise-etcd",
                    err=True,
                )
        elif token is None:
            identity, variables = _rejoin(known, addresses, folder, options)
            click.echo(
                f"{identity.role}/{identity.name} joined again with its certificate: it has a new password for the store"
            )
        else:
            identity, variables = known.identity, {}
            click.echo(_member_text(known, folder))
        if services is not None:
            _start_service(identity, variables or folder.read_variables(), services)
        elif variables:
            what = "use it with" if identity.role is Role.ADMIN else "start it with"
            click.echo(f"  {what}: {role_command(identity.role, variables)}")
            click.echo(f"  or with the variables in {folder.environment}")


def _stays_member(
    known: Membership, token: JoinToken | None, folder: JoinFolder, *, is_forced: bool
) -> bool:
    """Return whether the folder's identity stays; otherwise forget its key. Raises FleetctlError: of another fleet."""
    if not _is_member(known, token, SystemClock().now(), folder):
        return False
    if not (is_forced or known.is_revoked):
        folder.forget_key()
        return True
    folder.forget_used_key()
    why = "is revoked" if known.is_revoked else "is replaced"
    click.echo(f"the certificate of {known.identity.uri} {why}: joining with a new key", err=True)
    return False


def _rejoin(
    known: Membership,
    addresses: tuple[JoinAddress, ...],
    folder: JoinFolder,
    options: Mapping[str, Any],
) -> tuple[Identity, dict[str, str]]:
    """Join with the certificate that the folder holds; return its identity and variables. Raises FleetctlError."""
    clock, limit_s = SystemClock(), options["limit_s"] or _TOKEN_S
    facts = read_facts()
    key, request = folder.load_key()

    async def work() -> tuple[Machine, JoinAnswer]:
        where = addresses or await _search(options, known.authority_hashes[0], limit_s)
        machine = _machine(options["name"], where, facts)
        body = RejoinBody(request=request.decode(), machine=machine)
        own = Credentials(folder.identity, clock)
        return machine, await join_client.rejoin(
            where, own, body, clock, limit_s=limit_s, tell=_tell
        )

    machine, answer = asyncio.run(work())
    identity = check_answer(answer, request, known_authority(known, answer))
    variables = process_variables(identity, answer, folder, machine)
    folder.write(key, answer, variables, clock.now())
    return identity, variables


def _start_service(identity: Identity, variables: dict[str, str], services: Installation) -> None:
    """Install the process of the identity as a service, and start it. Raises FleetctlError."""
    part = _PARTS.get(identity.role)
    if part is None:
        raise FleetctlError(
            f"{identity.role}/{identity.name} has no process to run as a service: --service is for the roles "
            f"{', '.join(_PARTS)}"
        )
    # Services have a state folder of their own.
    kept = {name: value for name, value in variables.items() if name != "FLEET_STATE_DIR"}
    asyncio.run(install_joined(part, role_flags(identity.role, kept), services))
    click.echo(f"{part} runs as a service; see `fleetctl service status`")


def _arguments(words: Sequence[str], *, has_file: bool) -> tuple[str, tuple[JoinAddress, ...]]:
    """Return the token's text, "-" for standard input, "" for a file or no token; and the addresses, () to search."""
    is_token = bool(words) and (words[0].startswith(_TOKEN_MARK) or words[0] == "-")
    where = words[1:] if is_token else words
    if len(where) > 1 or (is_token and has_file):
        raise click.UsageError(
            "expected a token and the address of a join port: fleetctl join TOKEN HOST:PORT, with - for a token on "
            "standard input; or --token-file FILE and the address. Without an address the fleet is searched for"
        )
    return (words[0] if is_token else ""), (parse_addresses(where[0]) if where else ())


async def _search(
    options: Mapping[str, Any], authority_hash: bytes | None, limit_s: float
) -> tuple[JoinAddress, ...]:
    """Return the join ports of the fleet with this authority, or of the only one there is. Raises FleetctlError."""
    clock = SystemClock()
    sources = make_sources(read_options(options), clock)
    click.echo("searching for the fleet; `fleetctl discover` lists what is heard", err=True)
    fleet = await FleetSearch(sources, clock, authority_hash).find(limit_s)
    click.echo(f"found the fleet {fleet.title}", err=True)
    return fleet.addresses


def _announced(
    options: Mapping[str, Any],
    token: JoinToken | None,
    addresses: Sequence[JoinAddress],
    facts: HardwareFacts,
) -> announcement.Listener | None:
    """Return the announcement of a machine that waits for an approval; None if it needs none."""
    is_local = bool(addresses) and all(map(_is_local, addresses))
    if token is not None or options["no_announce"] or is_local:
        return None
    name = options["name"] or dns_label(facts.hostname, fallback="mac")
    return announcement.Listener(role="new", host="", port=NO_PORT, name=name)


def _is_local(address: JoinAddress) -> bool:
    return not announcement.Listener(role="new", host=address.host, port=NO_PORT).is_reachable


def _folder(given: Path | None, services: Installation | None) -> Path:
    parent = (
        Path(platformdirs.user_data_dir("mlx-fleet")) if services is None else services.layout.state
    )
    return (given or parent / "identity").expanduser().absolute()


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


def _is_member(
    known: Membership, token: JoinToken | None, now: datetime, folder: JoinFolder
) -> bool:
    """Return whether the folder holds a valid identity of the token's fleet. Raises FleetctlError: of another one."""
    if token is not None and token.authority_hash not in known.authority_hashes:
        raise FleetctlError(
            f"{folder.identity.path} holds {known.identity.uri}, an identity of another fleet than the token's. Give "
            "another folder with --identity-dir, or move this one away"
        )
    return now < known.not_after


def _member_text(known: Membership, folder: JoinFolder) -> str:
    return (
        f"this machine is {known.identity.role}/{known.identity.name} already, until {known.not_after:%Y-%m-%d %H:%M} UTC; "
        f"nothing was sent. Its files are in {folder.identity.path}. If its certificate was revoked, join with --force"
    )


def _machine(name: str | None, addresses: Sequence[JoinAddress], facts: HardwareFacts) -> Machine:
    """Return the description of this machine."""
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
    own_addresses = []
    for peer in peers:
        with contextlib.suppress(OSError):
            family, kind, protocol, _, where = socket.getaddrinfo(
                peer.host, peer.port, type=socket.SOCK_DGRAM
            )[0]
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(where)
                own_addresses.append(probe.getsockname()[0].partition("%")[0])
    return own_addresses


def _tell(text: str) -> None:
    click.echo(text, err=True)


async def join_with_token(request: JoinRequest) -> tuple[Identity, dict[str, str]]:
    """Join, write all files, and return the identity and the variables of its process. Raises FleetctlError."""
    assert request.token is not None
    clock = SystemClock()
    key, signing_request = request.folder.load_key()
    body = JoinBody(
        id=request.token.id,
        secret=request.token.secret_text,
        request=signing_request.decode(),
        machine=request.machine,
    )
    pinned = request.token.authority_hash
    answer = await join_client.join(
        request.addresses, pinned, body, clock, limit_s=request.limit_s, tell=_tell
    )
    identity = check_answer(answer, signing_request, pinned)
    variables = process_variables(identity, answer, request.folder, request.machine)
    request.folder.write(key, answer, variables, clock.now())
    return identity, variables


async def join_with_approval(
    request: JoinRequest, facts: HardwareFacts, say: Callable[[str], None]
) -> tuple[Identity, dict[str, str]]:
    """Ask to join, show the code through `say`, wait for an approval, and write all files. Raises FleetctlError."""
    clock = SystemClock()
    # A new key each time, which no server has seen before: see identity/join_code.py.
    key, signing_request = new_key()
    body = PendingBody(
        request=signing_request.decode(),
        machine=request.machine,
        chip=re.sub(r"[^ -~]", "?", facts.chip)[:100],
        memory_bytes=facts.memory_bytes,
    )
    waiting = await join_client.ask_to_join(request.addresses, key, body, clock)
    pinned = waiting.authority_hash
    name = request.machine.name or request.machine.default_name
    say(f"{name} asks to join. An administrator runs: fleetctl approve {name}")
    say("and types these words, read from this screen:")
    say(f"\n  {join_code(pinned, spki_hash(read_request(signing_request)))}\n")
    try:
        answer = await join_client.wait_for_approval(waiting, clock, limit_s=request.limit_s)
        identity = check_answer(answer, signing_request, pinned)
        variables = process_variables(identity, answer, request.folder, request.machine)
        request.folder.write(key, answer, variables, clock.now())
    finally:
        await join_client.end_request(waiting, clock)
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
