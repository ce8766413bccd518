"""The gateway's process: flags, environment, socket, exit codes. The only file here that sees them.

Exit codes: 0 asked to stop, 1 crashed, 2 a flag is wrong, 3 the address cannot be listened on.
"""

import asyncio
import errno
import gc
import random
import secrets
import ssl
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypedDict, TypeVar, Unpack

import click

from gateway.server import Gateway, Limits, listen
from machinery import logging as fleet_logging
from machinery.clock import SystemClock
from store.address import EtcdAddress
from store.etcd import EtcdTransport

_EXIT_ADDRESS = 3
_DEFAULT_ETCD = "http://127.0.0.1:2379"

F = TypeVar("F", bound=Callable[..., Any])


class _StoreFlags(TypedDict):
    etcd_endpoint: tuple[str, ...]
    etcd_socket: Path | None
    etcd_ca: Path | None
    etcd_cert: Path | None
    etcd_key: Path | None
    etcd_user: str
    etcd_password: str


class _Flags(_StoreFlags):
    host: str
    port: int
    log_level: str
    max_body: int
    request_timeout: float
    drain_timeout: float


def store_options(command: F) -> F:
    """Add the flags that say where etcd is."""
    path = click.Path(path_type=Path)
    options = (
        click.option(
            "--etcd-endpoint",
            multiple=True,
            envvar="FLEET_ETCD_ENDPOINTS",
            metavar="URL",
            help=f"etcd's client URL; may be given again. Default: {_DEFAULT_ETCD}",
        ),
        click.option("--etcd-socket", type=path, envvar="FLEET_ETCD_SOCKET", help="etcd's socket."),
        click.option("--etcd-ca", type=path, envvar="FLEET_ETCD_CA", help="CA of etcd's TLS."),
        click.option("--etcd-cert", type=path, envvar="FLEET_ETCD_CERT", help="Our certificate."),
        click.option("--etcd-key", type=path, envvar="FLEET_ETCD_KEY", help="Its key."),
        click.option("--etcd-user", default="", envvar="FLEET_ETCD_USER", help="etcd user."),
        # Hidden: on a command line everybody on the machine could read it.
        click.option("--etcd-password", default="", envvar="FLEET_ETCD_PASSWORD", hidden=True),
    )
    for option in reversed(options):
        command = option(command)
    return command


@click.command()
@click.option("--host", default="127.0.0.1", envvar="FLEET_GATEWAY_HOST", show_default=True)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=4000,
    envvar="FLEET_GATEWAY_PORT",
    show_default=True,
)
@store_options
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
def main(**flags: Unpack[_Flags]) -> None:
    """Serve the fleet's models as one OpenAI endpoint."""
    address = store_address(flags)
    fleet_logging.setup("gateway", flags["log_level"])
    host, port = flags["host"], flags["port"]
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
    )

    async def run() -> None:
        transport = EtcdTransport(address)
        # Request ids and routes' draws must differ between two gateways started at once.
        entropy = random.Random(secrets.randbits(128))
        try:
            await Gateway(transport, SystemClock(), entropy, limits).run(listener)
        finally:
            await transport.close()

    # What was imported stays for ever: looking through it again and again costs pauses of 50 ms.
    gc.collect()
    gc.freeze()
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(run())


def store_address(flags: _StoreFlags) -> EtcdAddress:
    """Return where etcd is.

    Raises:
        click.UsageError: the flags contradict each other, or a file is unusable.

    """
    endpoints, unix = flags["etcd_endpoint"], flags["etcd_socket"]
    if endpoints and unix is not None:
        raise click.UsageError("--etcd-endpoint and --etcd-socket exclude each other")
    address = EtcdAddress(
        endpoints=endpoints or (() if unix is not None else (_DEFAULT_ETCD,)),
        socket=unix,
        ca=flags["etcd_ca"],
        certificate=flags["etcd_cert"],
        key=flags["etcd_key"],
        username=flags["etcd_user"],
        password=flags["etcd_password"],
    )
    try:
        address.ssl_context()
    except (OSError, ssl.SSLError) as error:
        raise click.UsageError(f"etcd's TLS files cannot be used: {error}") from error
    return address


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return uvloop's event loop if it is there: streams cost half of what they do without."""
    try:
        import uvloop  # noqa: PLC0415 - only where it is installed
    except ImportError:
        return None
    return uvloop.new_event_loop


if __name__ == "__main__":
    main()
