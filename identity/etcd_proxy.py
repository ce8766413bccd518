"""The proxy in front of an embedded etcd: other machines reach the store through it alone.

    python -m identity.etcd_proxy --etcd unix:PATH --identity-dir DIR --listen HOST:PORT

etcd itself closes no connection that never begins TLS, counts none by its address, and knows no revocations. The proxy does all of
that, demands a certificate of the fleet, and passes bytes on to etcd's unix socket. It decides nothing about rights: etcd
demands user and password of each client, as before.
"""

import asyncio
import logging
import socket
import sys
from pathlib import Path
from typing import Any, Final, cast

import click
from typing_extensions import override

from identity.credentials import Credentials
from identity.daemon import daemon_options, start_daemon
from identity.names import Role
from identity.trust_sync import TrustSync
from machinery import http_server
from machinery.connection_limits import AddressLimit
from machinery.process_main import GRACE_S, run_until_signal
from machinery.tcp_keepalive import enable_keepalive
from machinery.tls_server import TlsListener, TlsOptions
from store.etcd.connect import connect

log = logging.getLogger(__name__)

CONNECTIONS_PER_ADDRESS: Final = 64
"""A Mac has one for each of its processes, and one for each fleetctl that runs."""
_CLIENTS = frozenset(Role) - {Role.ETCD}
_CONNECT_S = 5.0
_PLAIN = b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


@click.command()
@daemon_options
@click.option("--listen", required=True, metavar="HOST:PORT", help="Address for other machines.")
def main(listen: str, **options: Any) -> None:
    """Pass connections of other machines on to the unix socket of etcd."""
    daemon = start_daemon("etcd-proxy", Role.ETCD, options)
    credentials, address = daemon.credentials, daemon.etcd
    if credentials is None or address.socket is None:
        raise click.UsageError("give --identity-dir of etcd, and its socket: --etcd unix:PATH")
    host, _, port = listen.rpartition(":")
    listener = http_server.listen(host.strip("[]"), int(port))
    proxy = EtcdProxy(listener, credentials, address.socket)

    async def run() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(TrustSync(connect(address), daemon.clock, credentials.folder).run())
            group.create_task(credentials.watch())
            group.create_task(proxy.run())

    sys.exit(run_until_signal(run, grace_s=GRACE_S))


class EtcdProxy:
    """Accepts connections of other machines on a listening socket, and passes their bytes on to a unix socket."""

    def __init__(self, listener: socket.socket, credentials: Credentials, etcd: Path) -> None:
        self._listener = listener
        self._credentials = credentials
        self._etcd = etcd
        self._addresses = AddressLimit(CONNECTIONS_PER_ADDRESS)
        self._clients: set[_ClientEnd] = set()
        self._connecting: set[asyncio.Task[None]] = set()
        credentials.on_change(self._end_revoked)

    async def run(self) -> None:
        """Accept connections until cancelled, and end all of them then."""
        options = TlsOptions(
            certificate=self._credentials.server(_CLIENTS, protocols=("h2", "http/1.1")),
            plain_response=_PLAIN,
        )
        acceptor = TlsListener(self._listener, lambda: _ClientEnd(self), options)
        log.info("etcd is reachable by other machines", extra={"socket": str(self._etcd)})
        try:
            await asyncio.Event().wait()
        finally:
            acceptor.close()
            for client in tuple(self._clients):
                client.abort()

    def add(self, client: "_ClientEnd") -> None:
        """Connect a client with etcd, or end it if its address has too many connections."""
        client.place = self._addresses.enter(client.address)
        if client.place is None:
            client.abort()
            return
        self._clients.add(client)
        task = asyncio.get_running_loop().create_task(self._connect(client))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    def remove(self, client: "_ClientEnd") -> None:
        """Forget a client that has ended."""
        self._clients.discard(client)
        self._addresses.leave(client.place or "")

    async def _connect(self, client: "_ClientEnd") -> None:
        try:
            async with asyncio.timeout(_CONNECT_S):
                await asyncio.get_running_loop().create_unix_connection(
                    lambda: _EtcdEnd(client), str(self._etcd)
                )
        except OSError as error:  # TimeoutError is one
            log.warning("etcd does not accept a connection", extra={"why": str(error)})
            client.abort()

    def _end_revoked(self) -> None:
        for client in tuple(self._clients):
            if self._credentials.is_revoked(client.ssl_object):
                client.abort()


class _End(asyncio.Protocol):
    """One end of a connection through the proxy: what arrives is written to the other end, no faster than that sends."""

    transport: asyncio.Transport | None = None
    other: "_End | None" = None

    @override
    def data_received(self, data: bytes) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.write(data)

    @override
    def pause_writing(self) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.pause_reading()

    @override
    def resume_writing(self) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.resume_reading()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        if self.other is not None and self.other.transport is not None:
            self.other.transport.close()

    def abort(self) -> None:
        """End the connection at once."""
        if self.transport is not None:
            self.transport.abort()


class _ClientEnd(_End):
    """The end of another machine, whose certificate is verified. It is not read before etcd's end is there."""

    def __init__(self, proxy: EtcdProxy) -> None:
        self._proxy = proxy
        self.place: str | None = None
        self.address = ""
        self.ssl_object: object = None

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        found = cast("asyncio.Transport", transport)  # uvloop's is no subclass
        self.transport = found
        found.pause_reading()
        peer = transport.get_extra_info("peername")
        self.address = str(peer[0]) if peer else ""
        self.ssl_object = transport.get_extra_info("ssl_object")
        connection = transport.get_extra_info("socket")
        if connection is not None:
            enable_keepalive(connection)
        self._proxy.add(self)

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._proxy.remove(self)


class _EtcdEnd(_End):
    """The end of etcd."""

    def __init__(self, client: _ClientEnd) -> None:
        self.other = client

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        found = cast("asyncio.Transport", transport)  # uvloop's is no subclass
        self.transport = found
        client = self.other
        assert client is not None
        if client.transport is None:  # it has gone meanwhile
            found.abort()
            return
        client.other = self
        client.transport.resume_reading()


if __name__ == "__main__":
    main()
