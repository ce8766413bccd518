"""Sockets of the gateway process: the one for clients, claimed or inherited, a worker's own, and how others learn of them."""

import asyncio
import errno
import socket
import sys
from dataclasses import dataclass
from typing import Any

import click

from gateway import registration
from gateway.handover import HandOver, HandOverError, ListenerClaim, claim_listener
from gateway.workers import WorkerPlace
from identity.announcement import Listener
from machinery.clock import Clock, SystemClock
from machinery.http_server import ListenAddress, listen
from machinery.tls_flags import TransportError, check_plain_http
from schemas.wire.exit_codes import ExitCode
from store.etcd.address import EtcdAddress


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSockets:
    """Listeners of the process, and how others learn of them."""

    claim: ListenerClaim
    own: socket.socket | None
    """Socket at which this worker alone answers; None for the only process of a gateway."""
    handover: HandOver | None
    announcement: Listener | None


def open_sockets(
    flags: dict[str, Any],
    claim: ListenerClaim,
    place: WorkerPlace | None,
    clock: Clock,
    *,
    is_tls: bool,
) -> ProcessSockets:
    """Return the listeners: of a worker also the one where it alone answers."""
    bound = ListenAddress(flags["host"], claim.listener.getsockname()[1])
    path = flags["handover"]
    return ProcessSockets(
        claim=claim,
        own=None if place is None else _own_listener(flags, place),
        handover=path and HandOver(path, claim, bound, clock, is_tls=is_tls),
        announcement=_announced(flags, claim, place, is_tls=is_tls),
    )


def own_url(
    flags: dict[str, Any],
    sockets: ProcessSockets,
    advertised: ListenAddress | None,
    etcd: EtcdAddress,
    *,
    is_tls: bool,
) -> str:
    """Return the URL at which other processes reach this one."""
    answers = sockets.own or sockets.claim.listener
    bound = ListenAddress(flags["host"], answers.getsockname()[1])
    if sockets.own is not None and advertised is not None:
        advertised = advertised._replace(port=bound.port)
    return registration.advertised_url(advertised, bound, etcd.endpoints, is_tls=is_tls)


def _announced(
    flags: dict[str, Any], claim: ListenerClaim, place: WorkerPlace | None, *, is_tls: bool
) -> Listener | None:
    """Return what is announced on the local network; None for nothing. Only the first worker announces."""
    if place is not None and not place.is_first:
        return None
    host, port = claim.listener.getsockname()[:2]
    listener = Listener(role="gateway", host=host, port=port, is_tls=is_tls)
    return listener if listener.is_reachable and not flags["no_announce"] else None


def _own_listener(flags: dict[str, Any], place: WorkerPlace) -> socket.socket:
    """Return the socket at which this worker alone answers. Exit if there is none."""
    first = flags["worker_port"]
    port = first and first + place.number - 1
    try:
        return listen(flags["host"], port)
    except OSError as error:
        why = error.strerror or str(error)
        click.echo(
            f"gateway: worker {place.number} cannot listen on {flags['host']}:{port}: {why}; choose other ports with "
            "--worker-port",
            err=True,
        )
        sys.exit(ExitCode.ADDRESS_IN_USE)


def claim_socket(
    flags: dict[str, Any], place: WorkerPlace | None, *, is_tls: bool
) -> ListenerClaim:
    """Return the socket to listen on: the workers', or from the running gateway if there is one, else a new one.

    Exit if there is none, or if other machines could read what clients send.
    """
    if place is not None:
        return ListenerClaim(place.shared_listener())
    if flags["workers"] > 1 and flags["handover"] is not None:
        raise click.UsageError(
            "--handover: a gateway with --workers has several processes, which cannot give their place to others; "
            "leave out one of the two"
        )
    address = ListenAddress(flags["host"], flags["port"])
    try:
        claim = asyncio.run(
            claim_listener(flags["handover"], address, SystemClock(), is_tls=is_tls)
        )
    except HandOverError as error:
        message = str(error)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            message = f"port {address.port} is in use on {address.host}; choose another with --port"
        else:
            message = f"cannot listen on {address.host}:{address.port}: {error.strerror or error}"
    else:
        try:
            # The address that a name stands for is certain only now. Nothing was accepted yet.
            bound = claim.listener.getsockname()[0]
            check_plain_http(bound, is_insecure=is_tls or flags["insecure_http"])
        except TransportError as error:
            claim.close()
            raise click.UsageError(f"--host {address.host}: {error}") from error
        return claim
    click.echo(f"gateway: {message}", err=True)
    sys.exit(ExitCode.ADDRESS_IN_USE)
