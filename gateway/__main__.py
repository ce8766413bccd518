"""Entry point of the gateway process: flags, environment, socket and exit codes.

Exit codes (schemas/wire/exit_codes.py): 0 asked to stop, 1 crashed, 2 a flag is wrong, 3 the
address cannot be listened on.
"""

import asyncio
import contextlib
import ctypes
import gc
import importlib
import ipaddress
import os
import random
import secrets
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import click
import uvloop

from gateway import registration
from gateway.auth import access_control
from gateway.auth.rate_limits import Limits
from gateway.floating_address.holder import FloatingAddress
from gateway.floating_address.interfaces import FloatingAddressError, parse_address
from gateway.floating_address.links import check_rights, find_interface
from gateway.handover import ListenerClaim
from gateway.http.cors import AllowedHosts, AllowedOrigins
from gateway.limits import GatewayLimits
from gateway.process_sockets import ProcessSockets, claim_socket, open_sockets, own_url
from gateway.server import Gateway
from gateway.telemetry.recorder import Tracer
from gateway.workers import MOST_WORKERS, WorkerGroup, WorkerPlace, run_workers, watch_parent
from identity.announcement import announce_option, announced
from identity.daemon import daemon_options, start_daemon
from identity.listeners import api_security
from identity.metrics_access import metrics_flags
from identity.names import Role
from machinery import environment, unix_sockets
from machinery.clock import Clock
from machinery.connection_limits import is_loopback
from machinery.file_limit import raise_file_limit
from machinery.http_server import ListenAddress
from machinery.options import (
    AUTH,
    COUNT,
    FILE,
    FOLDER,
    PORT,
    POSITIVE,
    POSITIVE_SECONDS,
    SECONDS,
    Option,
    options,
)
from machinery.tls_flags import TransportError, read_certificate, tls_flags
from machinery.tls_server import ServerCertificate
from schemas.routing import MAX_RATE
from store.etcd.address import EtcdAddress
from store.etcd.connect import connect

# <malloc.h> of glibc.
_M_MMAP_THRESHOLD = -3
_LARGE_BLOCK_BYTES = 256 << 10


OPTIONS: Final = (
    Option("--host", default="127.0.0.1"),
    Option("--port", type=PORT, default=4000),
    Option(
        "--advertise-address",
        "Address at which the reconciler reads this gateway's metrics. Default: --host, or for 0.0.0.0 the "
        "local address of the route to etcd.",
        metavar="HOST[:PORT]",
    ),
    Option(
        "--max-body",
        "Largest request body, in bytes.",
        type=POSITIVE,
        default=GatewayLimits().max_body_bytes,
    ),
    Option(
        "--max-body-memory",
        "Memory for the request bodies of all clients until they are answered, in bytes; at least --max-body. One API "
        "key gets half of it.",
        type=POSITIVE,
        default=GatewayLimits().max_body_memory_bytes,
    ),
    Option(
        "--max-connections-per-address",
        "Connections that one client address (IPv6: each /64) may have; 0 for no limit. Default: 1024, and no limit for "
        "this machine. Behind a proxy on another machine all clients have its address.",
        type=COUNT,
    ),
    Option(
        "--request-timeout",
        "Longest time without progress of an engine, in seconds: before the first token and between tokens.",
        type=POSITIVE_SECONDS,
        default=GatewayLimits().request_timeout_s,
    ),
    Option(
        "--send-timeout",
        "Longest time that a client may read nothing of a stream before it is disconnected, in seconds.",
        type=POSITIVE_SECONDS,
        default=GatewayLimits().send_timeout_s,
    ),
    Option(
        "--drain-timeout",
        "Time for running streams to finish after SIGTERM, in seconds.",
        type=SECONDS,
        default=30.0,
    ),
    Option(
        "--hold-timeout",
        "Longest wait of a request for a first replica, or for a free slot of one, in seconds.",
        type=SECONDS,
        default=120.0,
    ),
    Option(
        "--hold-limit",
        "Number of requests that may wait for one model, for each of its ready replicas.",
        type=COUNT,
        default=64,
    ),
    AUTH,
    Option(
        "--anonymous-requests-per-minute",
        "Rate limit of requests to models without an API key, for each client address (IPv6: each /64). For gateways "
        "that require no keys.",
        type=click.IntRange(1, MAX_RATE),
    ),
    Option(
        "--anonymous-tokens-per-minute",
        "The same for tokens of prompts and answers.",
        type=click.IntRange(1, MAX_RATE),
    ),
    Option(
        "--anonymous-concurrency",
        "The same for concurrent requests.",
        type=click.IntRange(1, MAX_RATE),
    ),
    Option(
        "--state-dir",
        "Folder for the saved fleet state, with which a gateway starts while etcd is unreachable, and for the last "
        "requests.",
        type=FOLDER,
    ),
    Option(
        "--site", "Site of this gateway: Macs with the same label `site` are preferred.", default=""
    ),
    Option(
        "--default-model",
        "Model of OpenAI requests without `model` (default: the only one there is).",
        default="",
    ),
    Option(
        "--compat-names",
        "Use names of mlx-serving beside those of the fleet: `healthy` and figures of a worker in /health, the code "
        "MODEL_NOT_LOADED, and metrics mlx_worker_*.",
        is_flag=True,
    ),
    Option(
        "--engine-sockets",
        "Folder of the sockets of engines on this machine, as given to its agents. Engines on sockets elsewhere are "
        "not used.",
        type=FOLDER,
        variable="FLEET_ENGINE_SOCKETS",
    ),
    Option(
        "--journal-size",
        "Number of requests kept in memory for `fleetctl routes`.",
        type=click.IntRange(1, 1_000_000),
        default=10_000,
    ),
    Option(
        "--journal-file",
        "File for all requests as JSON lines, without prompts and answers; four older files are kept.",
        type=FILE,
    ),
    Option(
        "--allowed-host",
        "Name or address by which clients may address this gateway besides localhost, 127.0.0.1, [::1] and --host, "
        "or * for all; may be repeated. Checked on a gateway that listens on loopback and requires no keys, and on any "
        "other once a host is given.",
        multiple=True,
        metavar="HOST",
    ),
    Option(
        "--cors-origin",
        "Origin of web pages that may use this gateway besides those of this machine, such as "
        "https://chat.example.com, or * for all; may be repeated.",
        multiple=True,
        metavar="ORIGIN",
    ),
    Option(
        "--handover",
        "Unix socket by which a running gateway gives its place to the next that is started with the same "
        "path, --host and --port: no connection is refused in between.",
        type=FILE,
    ),
    Option(
        "--floating-address",
        "IPv4 address for clients, such as 192.168.1.50/24, which one of the gateways with this flag has on its "
        "interface at any time. Needs root, or CAP_NET_ADMIN and CAP_NET_RAW, and --host 0.0.0.0.",
        default="",
        metavar="ADDRESS/LENGTH",
    ),
    Option(
        "--floating-interface",
        "Interface for --floating-address, such as en0. Default: the one in whose network the address is.",
        default="",
        metavar="NAME",
    ),
    Option(
        "--workers",
        "Number of processes that serve clients on --port, each on one core. Every worker registers as a gateway of "
        "its own.",
        type=click.IntRange(1, MOST_WORKERS),
        default=1,
    ),
    Option(
        "--worker-port",
        "First of the ports at which the workers answer one by one, for their metrics; 0: any free ports.",
        type=click.IntRange(0, 65535 - MOST_WORKERS),
        default=0,
    ),
    Option("--worker", type=int, nargs=2, default=None, hidden=True, variable=None),
)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@options("FLEET_GATEWAY", *OPTIONS)
@tls_flags
@daemon_options
@metrics_flags
@announce_option
def main(**flags: Any) -> None:
    """Serve the models of the fleet as one OpenAI-compatible endpoint."""
    inherited = dict(os.environ)
    log_file = _log_file(flags["log_file"], flags["worker"])
    daemon = start_daemon("gateway", Role.GATEWAY, {**flags, "log_file": log_file})
    clock, etcd, credentials = daemon.clock, daemon.etcd, daemon.credentials
    tracer, advertised = _tracer(), _advertised(flags)
    certificate, security = _certificate(flags), api_security(flags)
    # With an identity there is TLS for clients, whether or not plain HTTP is accepted as well.
    is_tls = certificate is not None or credentials is not None
    limits = _limits(flags)
    place = None if flags["worker"] is None else WorkerPlace(*flags["worker"])
    claimed = claim_socket(flags, place, is_tls=is_tls)
    if flags["workers"] > 1 and place is None:
        group = WorkerGroup(
            claimed.listener,
            flags["workers"],
            clock,
            arguments=sys.argv[1:],
            environment=inherited,
        )
        sys.exit(run_workers(group))
    address = claimed.listener.getsockname()[0]
    sockets = open_sockets(flags, claimed, place, clock, is_tls=is_tls)
    requires_keys = access_control.requires_keys(flags["auth"], address)
    hosts = _allowed_hosts(flags, address, advertised, requires_keys=requires_keys)
    limits = replace(
        limits,
        certificate=certificate,
        hosts=hosts,
        origins=_allowed_origins(flags),
        asks_for_keys=requires_keys,
        anonymous=_anonymous_limits(flags, claimed, requires_keys=requires_keys),
        ring=daemon.ring,
        has_store_password=bool(etcd.password),
        identity_folder=daemon.folder,
        identity_addresses=_client_hosts(flags),
        credentials=credentials,
        accepts_plain=flags["insecure_http"] or is_loopback(address),
        security=security,
        is_announced=sockets.announcement is not None,
        place=place,
    )
    url = own_url(flags, sockets, advertised, etcd, is_tls=certificate is not None)
    # Let glibc give each large block back to the system when it is freed. It raises its threshold
    # with each such block, and bodies then leave holes in a heap that never shrinks.
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError):  # another C library
            ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE_BLOCK_BYTES)
    # Imported objects stay for the life of the process: to scan them would cost pauses of 50 ms.
    gc.collect()
    gc.freeze()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(etcd, clock, limits, url, sockets, tracer))
    if tracer is not None:
        tracer.close()


async def _serve(
    etcd: EtcdAddress,
    clock: Clock,
    limits: GatewayLimits,
    url: str,
    sockets: ProcessSockets,
    tracer: Tracer | None,
) -> None:
    """Serve until a signal or the end of the parent stops the process."""
    transport = connect(etcd)
    # Two gateways that start at the same time must draw different request ids and routes.
    entropy = random.Random(secrets.randbits(128))
    try:
        gateway = Gateway(transport, clock, entropy, limits, url=url, tracer=tracer)
        if limits.place is not None:
            watch_parent(gateway.stop)
        async with announced(sockets.announcement, limits.credentials, clock):
            await gateway.run(sockets.claim.listener, sockets.handover, own=sockets.own)
    finally:
        await transport.close()


def _log_file(path: Path | None, worker: tuple[int, int] | None) -> Path | None:
    """Return the log of this process: workers have one each, since two processes cannot rotate one file."""
    return path if path is None or not worker else path.with_name(f"{path.name}.worker-{worker[0]}")


def _advertised(flags: dict[str, Any]) -> ListenAddress | None:
    """Return the address for other processes; None to derive it."""
    try:
        return registration.parse_address(flags["advertise_address"] or "")
    except ValueError as error:
        raise click.UsageError(f"--advertise-address: {error}") from error


def _floating_address(flags: dict[str, Any]) -> FloatingAddress | None:
    """Return the floating address; None without the flag. Refuse one that this process cannot hold."""
    text = flags["floating_address"]
    if flags["worker"] is not None and flags["worker"][0] > 1:
        return None  # one of the workers holds it for all
    if not text:
        if flags["floating_interface"]:
            raise click.UsageError("--floating-interface belongs to --floating-address")
        return None
    if not registration.is_any(flags["host"]):
        raise click.UsageError(
            f"--floating-address: a gateway that listens on {flags['host']} alone does not serve it; add --host 0.0.0.0"
        )
    try:
        address = parse_address(text)
        check_rights()
        interface = find_interface(address, flags["floating_interface"])
    except FloatingAddressError as error:
        raise click.UsageError(f"--floating-address: {error}") from error
    return FloatingAddress(address=address, interface=interface.name)


def _client_hosts(flags: dict[str, Any]) -> tuple[str, ...]:
    """Return the names and addresses in flags by which clients address the gateway."""
    floating = flags["floating_address"].partition("/")[0]
    return (flags["host"], *flags["allowed_host"], *((floating,) if floating else ()))


def _limits(flags: dict[str, Any]) -> GatewayLimits:
    """Return the limits and options that flags alone decide."""
    return GatewayLimits(
        max_body_bytes=flags["max_body"],
        max_body_memory_bytes=flags["max_body_memory"],
        max_connections_per_address=flags["max_connections_per_address"],
        max_files=raise_file_limit(),
        request_timeout_s=flags["request_timeout"],
        send_timeout_s=flags["send_timeout"],
        drain_timeout_s=flags["drain_timeout"],
        hold_timeout_s=flags["hold_timeout"],
        hold_limit=flags["hold_limit"],
        state_dir=flags["state_dir"] and flags["state_dir"].expanduser(),
        site=flags["site"],
        default_model=flags["default_model"],
        has_compat_names=flags["compat_names"],
        engine_sockets=_engine_sockets(flags["engine_sockets"]),
        journal_size=flags["journal_size"],
        journal_file=_of_worker(flags["journal_file"], flags),
        saved_journal=_of_worker(_saved_journal(flags), flags),
        floating=_floating_address(flags),
    )


def _saved_journal(flags: dict[str, Any]) -> Path | None:
    """Return the file with the last requests in the state folder; None without one."""
    folder: Path | None = flags["state_dir"]
    return None if folder is None else folder.expanduser() / "requests.jsonl"


def _of_worker(path: Path | None, flags: dict[str, Any]) -> Path | None:
    """Return the file of this process; each worker has one of its own, such as requests-2.jsonl."""
    if path is None or flags["worker"] is None:
        return path
    return path.with_stem(f"{path.stem}-{flags['worker'][0]}")


def _engine_sockets(folder: Path | None) -> Path | None:
    """Return the absolute path of the folder, which exists then and is accessible by its owner only."""
    try:
        return folder and unix_sockets.make_folder(folder.expanduser().absolute())
    except (unix_sockets.SocketFolderError, OSError) as error:
        raise click.UsageError(f"--engine-sockets: {error}") from error


def _certificate(flags: dict[str, Any]) -> ServerCertificate | None:
    """Return the certificate for clients; None for plain HTTP."""
    try:
        return read_certificate(
            flags["tls_cert"], flags["tls_key"], is_insecure=flags["insecure_http"]
        )
    except TransportError as error:
        raise click.UsageError(str(error)) from error


def _allowed_hosts(
    flags: dict[str, Any], address: str, advertised: ListenAddress | None, *, requires_keys: bool
) -> AllowedHosts:
    """Return the host names by which clients may address the gateway, which listens on `address`."""
    is_open = requires_keys or not ipaddress.ip_address(address).is_loopback
    if is_open and not flags["allowed_host"]:
        return AllowedHosts()
    own = [address, *([advertised.host] if advertised else [])]
    try:
        return AllowedHosts([*own, *_client_hosts(flags)])
    except ValueError as error:
        raise click.UsageError(f"--allowed-host: {error}") from error


def _anonymous_limits(
    flags: dict[str, Any], claim: ListenerClaim, *, requires_keys: bool
) -> Limits | None:
    """Return the limits of each client without a key; None if there are none."""
    limits = Limits(
        requests_per_minute=flags["anonymous_requests_per_minute"],
        tokens_per_minute=flags["anonymous_tokens_per_minute"],
        concurrency=flags["anonymous_concurrency"],
    )
    if limits == Limits():
        return None
    if requires_keys:
        claim.close()
        raise click.UsageError(
            "--anonymous-requests-per-minute and the like: this gateway requires keys (--auth), so no request comes "
            "without one; limit the keys: fleetctl create apikey NAME --requests-per-minute N"
        )
    return limits


def _allowed_origins(flags: dict[str, Any]) -> AllowedOrigins:
    try:
        return AllowedOrigins(flags["cors_origin"])
    except ValueError as error:
        raise click.UsageError(f"--cors-origin: {error}") from error


def _tracer() -> Tracer | None:
    """Return the tracer, or None if tracing is not configured."""
    try:
        if not environment.are_traces_enabled():
            return None
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    # Importing OpenTelemetry takes 90 ms and 4 MB, so only gateways that trace pay for it.
    tracer: Tracer = importlib.import_module("gateway.telemetry.otel").OtelTracer()
    return tracer


if __name__ == "__main__":
    main()
