"""The gateway's process: flags, environment, socket, exit codes. The only file here that sees them.

Exit codes: 0 asked to stop, 1 crashed, 2 a flag is wrong, 3 the address cannot be listened on.
"""

import asyncio
import errno
import gc
import random
import secrets
import sys
from typing import Any

import click
import uvloop

from gateway import advertise
from gateway.routing.table import Origin
from gateway.server import Gateway, Limits
from machinery import logging as fleet_logging
from machinery.clock import SystemClock
from machinery.web import listen
from store.etcd.connect import connect
from store.etcd.flags import address, etcd_options

_EXIT_ADDRESS = 3


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
def main(**flags: Any) -> None:
    """Serve the fleet's models as one OpenAI endpoint."""
    where = address(flags)
    fleet_logging.setup("gateway", flags["log_level"])
    host, port = flags["host"], flags["port"]
    try:
        advertised = advertise.parse(flags["advertise_address"] or "")
    except ValueError as error:
        raise click.UsageError(f"--advertise-address: {error}") from error
    try:
        listener = listen(host, port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            said = f"port {port} is in use on {host}; choose another with --port"
        else:
            said = f"cannot listen on {host}:{port}: {error.strerror or error}"
        click.echo(f"gateway: {said}", err=True)
        sys.exit(_EXIT_ADDRESS)
    limits = Limits(
        max_body_bytes=flags["max_body"],
        request_timeout_s=flags["request_timeout"],
        drain_timeout_s=flags["drain_timeout"],
        hold_timeout_s=flags["hold_timeout"],
        hold_limit=flags["hold_limit"],
    )
    bound = Origin(host, listener.getsockname()[1])
    url = advertise.url(advertised, bound, where.endpoints)

    async def run() -> None:
        transport = connect(where)
        # Request ids and routes' draws must differ between two gateways started at once.
        entropy = random.Random(secrets.randbits(128))
        try:
            await Gateway(transport, SystemClock(), entropy, limits, url=url).run(listener)
        finally:
            await transport.close()

    # What was imported stays for ever: looking through it again and again costs pauses of 50 ms.
    gc.collect()
    gc.freeze()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


if __name__ == "__main__":
    main()
