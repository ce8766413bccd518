"""The gateway's process: flags, environment, socket, exit codes. The only file here that sees them.

Exit codes: 0 asked to stop, 1 crashed, 2 a flag is wrong, 3 the address cannot be listened on.
"""

import asyncio
import contextlib
import errno
import gc
import importlib
import random
import resource
import secrets
import sys
from pathlib import Path
from typing import Any

import click
import uvloop

from gateway import registration
from gateway.auth import access_control
from gateway.handover import HandOver, HandOverError, ListenerClaim, claim_listener
from gateway.http.cors import AllowedOrigins
from gateway.routing.table import Origin
from gateway.server import Gateway, GatewayLimits
from gateway.telemetry.recorder import Tracer
from machinery import environment
from machinery import process_log as fleet_logging
from machinery.clock import SystemClock
from machinery.process_log import LogRing
from store.etcd.connect import connect
from store.etcd.flags import address_from_flags, etcd_options

_EXIT_ADDRESS = 3
# What macOS allows a process as long as nobody raised it (OPEN_MAX in sys/syslimits.h), whatever the hard limit is.
_FILES_OF_MACOS = 10_240


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--host", default="127.0.0.1", envvar="FLEET_GATEWAY_HOST", show_default=True)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=4000,
    envvar="FLEET_GATEWAY_PORT",
    show_default=True,
)
@click.option(
    "--advertise-address",
    envvar="FLEET_GATEWAY_ADVERTISE_ADDRESS",
    metavar="HOST[:PORT]",
    help="Where the reconciler reaches this gateway for its figures (else --host; for 0.0.0.0 the "
    "address of this machine that leads to etcd).",
)
@etcd_options
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    envvar="FLEET_LOG_LEVEL",
    show_default=True,
)
@click.option(
    "--max-body",
    type=click.IntRange(min=1),
    default=8 << 20,
    envvar="FLEET_GATEWAY_MAX_BODY",
    show_default=True,
    help="Largest request body, in bytes.",
)
@click.option(
    "--request-timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=600.0,
    envvar="FLEET_GATEWAY_REQUEST_TIMEOUT",
    show_default=True,
    help="Longest silence of an engine, in seconds.",
)
@click.option(
    "--drain-timeout",
    type=click.FloatRange(min=0),
    default=30.0,
    envvar="FLEET_GATEWAY_DRAIN_TIMEOUT",
    show_default=True,
    help="How long open streams may go on after SIGTERM, in seconds.",
)
@click.option(
    "--hold-timeout",
    type=click.FloatRange(min=0),
    default=120.0,
    envvar="FLEET_GATEWAY_HOLD_TIMEOUT",
    show_default=True,
    help="How long a request waits for a model that was scaled to zero, in seconds.",
)
@click.option(
    "--hold-limit",
    type=click.IntRange(min=0),
    default=64,
    envvar="FLEET_GATEWAY_HOLD_LIMIT",
    show_default=True,
    help="How many requests may wait for one such model.",
)
@click.option(
    "--auth",
    type=click.Choice(["auto", "on", "off"]),
    default="auto",
    envvar="FLEET_GATEWAY_AUTH",
    show_default=True,
    help="Whether requests need an API key (`fleetctl create apikey`); auto: unless it listens on loopback.",
)
@click.option(
    "--state-dir",
    type=click.Path(file_okay=False, path_type=Path),
    envvar="FLEET_GATEWAY_STATE_DIR",
    help="Folder of this fleet's gateways here: what they know is kept in it for a start without etcd.",
)
@click.option(
    "--site",
    default="",
    envvar="FLEET_GATEWAY_SITE",
    help="Where this gateway is: Macs with the same label `site` are asked first.",
)
@click.option(
    "--journal-size",
    type=click.IntRange(1, 1_000_000),
    default=10_000,
    envvar="FLEET_GATEWAY_JOURNAL_SIZE",
    show_default=True,
    help="How many of the last requests are kept in memory for `fleetctl routes`.",
)
@click.option(
    "--journal-file",
    type=click.Path(dir_okay=False, path_type=Path),
    envvar="FLEET_GATEWAY_JOURNAL_FILE",
    help="File that all requests are written to as JSON lines, without prompts and answers; with four older ones.",
)
@click.option(
    "--cors-origin",
    multiple=True,
    envvar="FLEET_GATEWAY_CORS_ORIGIN",
    metavar="ORIGIN",
    help="Whose web pages may use this gateway besides those of this machine, such as https://chat.example.com, "
    "or * for all; may be repeated.",
)
@click.option(
    "--handover",
    type=click.Path(dir_okay=False, path_type=Path),
    envvar="FLEET_GATEWAY_HANDOVER",
    help="Unix socket by which a running gateway gives its place to the next that is started with the same "
    "path, --host and --port: no connection is refused in between.",
)
def main(**flags: Any) -> None:
    """Serve the fleet's models as one OpenAI endpoint."""
    where = address_from_flags(flags)
    ring = LogRing()
    fleet_logging.setup("gateway", flags["log_level"], ring=ring)
    tracer = _tracer()
    try:
        advertised = registration.parse_address(flags["advertise_address"] or "")
    except ValueError as error:
        raise click.UsageError(f"--advertise-address: {error}") from error
    try:
        origins = AllowedOrigins(flags["cors_origin"])
    except ValueError as error:
        raise click.UsageError(f"--cors-origin: {error}") from error
    _allow_many_connections()
    claimed = _claimed(flags)
    bound = Origin(flags["host"], claimed.listener.getsockname()[1])
    limits = GatewayLimits(
        max_body_bytes=flags["max_body"],
        request_timeout_s=flags["request_timeout"],
        drain_timeout_s=flags["drain_timeout"],
        hold_timeout_s=flags["hold_timeout"],
        hold_limit=flags["hold_limit"],
        origins=origins,
        asks_for_keys=access_control.requires_keys(
            flags["auth"], claimed.listener.getsockname()[0]
        ),
        state_dir=flags["state_dir"] and flags["state_dir"].expanduser(),
        site=flags["site"],
        journal_size=flags["journal_size"],
        journal_file=flags["journal_file"],
        ring=ring,
    )
    path, clock = flags["handover"], SystemClock()
    handover = None if path is None else HandOver(path, claimed, bound, clock)
    url = registration.advertised_url(advertised, bound, where.endpoints)

    async def run() -> None:
        transport = connect(where)
        # Request ids and routes' draws must differ between two gateways started at once.
        entropy = random.Random(secrets.randbits(128))
        try:
            gateway = Gateway(transport, clock, entropy, limits, url=url, tracer=tracer)
            await gateway.run(claimed.listener, handover)
        finally:
            await transport.close()

    # What was imported stays for ever: looking through it again and again costs pauses of 50 ms.
    gc.collect()
    gc.freeze()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())
    if tracer is not None:
        tracer.close()


def _claimed(flags: dict[str, Any]) -> ListenerClaim:
    """Return the socket to listen on, from the gateway that runs if there is one; else exit."""
    where = Origin(flags["host"], flags["port"])
    try:
        return asyncio.run(claim_listener(flags["handover"], where, SystemClock()))
    except HandOverError as error:
        said = str(error)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            said = f"port {where.port} is in use on {where.host}; choose another with --port"
        else:
            said = f"cannot listen on {where.host}:{where.port}: {error.strerror or error}"
    click.echo(f"gateway: {said}", err=True)
    sys.exit(_EXIT_ADDRESS)


def _allow_many_connections() -> None:
    """Raise the number of open files to what the system allows: each connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for wanted in (hard, _FILES_OF_MACOS):
        if soft == resource.RLIM_INFINITY or 0 <= wanted <= soft:
            return
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            return


def _tracer() -> Tracer | None:
    """Return who records traces; None if nobody wants any."""
    try:
        if not environment.are_traces_enabled():
            return None
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    # Loading OpenTelemetry takes 90 ms and 4 MB, which is nothing to ask of those who do not use it.
    tracer: Tracer = importlib.import_module("gateway.telemetry.otel").OtelTracer()
    return tracer


if __name__ == "__main__":
    main()
