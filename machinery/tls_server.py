"""HTTPS: a certificate that is reloaded when its files change, and a listener that bounds handshakes.

    certificate = ServerCertificate(Path("gateway.crt"), Path("gateway.key"))
    group.create_task(certificate.watch(clock))
    options = TlsOptions(certificate=certificate, plain_response=b"HTTP/1.1 400 ...")
    server = HttpServer(config, on_signal, options.acceptor)

The listener reads the first byte of a connection before TLS begins. A plain connection is served if `accepts_plain`
says so at that moment; otherwise it gets an answer that a person can read.
"""

import asyncio
import contextlib
import errno
import logging
import socket
import ssl
import stat
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, NoReturn, Protocol, TypeAlias

from typing_extensions import Buffer, override

from machinery import process_secrets
from machinery.client_hello import read_server_name
from machinery.clock import Clock
from machinery.connection_limits import client_network

log = logging.getLogger(__name__)

# Mozilla's "intermediate" profile without its finite-field ciphers: forward secrecy and AEAD only. TLS 1.3 has its
# own ciphers, which are all of that kind.
_TLS_1_2_CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"
# TLS 1.3 would also offer finite-field groups. A client that sends any number as its key makes the server compute
# 10 ms with ffdhe8192 (CVE-2002-20001), eight times a usual handshake. Python sets one group only; every client of
# TLS 1.3 has this one.
_GROUP = "prime256v1"
_POLL_S = 1.0
# The content type of a TLS record with a handshake (RFC 8446, 5.1): the first byte of every TLS connection.
_HANDSHAKE_RECORD = b"\x16"
# The content of a TLS record at most (RFC 8446, 5.1).
_MAX_RECORD = 16 << 10
# The rest waits for the next turn of the loop, so that requests are served in between. A flood of connections must not fill
# the kernel's queue, in which those of all addresses wait. A handshake takes a millisecond.
_ACCEPTS_AT_ONCE = 64
_STARTS_AT_ONCE = 4
_OUT_OF_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_OUT_OF_FILES_PAUSE_S = 1.0
# Time for a client to read the answer to plain HTTP while it still sends.
_PLAIN_LINGER_S = 2.0
# The longest time for a client to read the rest of a response after which the connection is closed.
_FLUSH_S = 60.0
# A listener that closes waits this long for handshakes in progress.
_LAST_HANDSHAKES_S = 2.0

_FileState: TypeAlias = tuple[int, ...]


# Reasons of OpenSSL that say what the client has; the number of all others is too large for a metric's label.
_REASONS = {
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "NoCertificate",
    "CERTIFICATE_VERIFY_FAILED": "UntrustedCertificate",
    "UNSUPPORTED_PROTOCOL": "OldProtocol",
    "NO_SHARED_CIPHER": "NoSharedCipher",
    "TLSV1_ALERT_UNKNOWN_CA": "ServerRefused",
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": "ServerRefused",
    "SSLV3_ALERT_BAD_CERTIFICATE": "ServerRefused",
}
PLAIN_REFUSED: Final = "Plain"
"""The reason of a connection that is refused because it is not TLS."""


class CertificateError(Exception):
    """A certificate or its key cannot be used; the message names the file, the reason and what to do."""


class RecordSSLObject(ssl.SSLObject):
    """One TLS connection that is read by the record.

    asyncio and uvloop ask for 256 KiB, and CPython allocates as much for every read, although OpenSSL returns one record.
    By the record TLS costs 6 us of processor time for a small request and its answer, both ends together; else 33 us.
    """

    @override
    def read(self, size: int = 1024, buffer: Buffer | None = None) -> bytes:
        """Return the content of at most one record, or read it into the buffer and return its length."""
        return super().read(min(size, _MAX_RECORD), buffer)


class ContextSource(Protocol):
    """The TLS context for the connections that begin now: of a `ServerCertificate`, or of an identity."""

    @property
    def context(self) -> ssl.SSLContext: ...


def failure_reason(error: OSError | TimeoutError) -> str:
    """Return one word, for metrics, for the reason of a failed handshake."""
    refusal = getattr(error, "refusal", None)  # of an identity's PeerError
    if isinstance(refusal, str):
        return refusal
    if isinstance(error, ssl.SSLError):
        return _REASONS.get(error.reason or "", "Other")
    return "Timeout" if isinstance(error, TimeoutError) else "Closed"


class ServerCertificate:
    """The certificate of a server, with the TLS settings of its connections. `watch` keeps it up to date."""

    def __init__(self, certificate: Path, key: Path) -> None:
        """Load both files, which are PEM.

        Raises:
            CertificateError: a file cannot be used.

        """
        self._certificate = certificate
        self._key = key
        self._tried = self._state()
        self.context = _load(certificate, key)
        """The TLS context for new connections; another object after each reload."""

    async def watch(self, clock: Clock) -> None:
        """Reload the files when they change, forever. Files that cannot be used are logged; the old ones stay."""
        seen = self._tried
        while True:
            await clock.sleep(_POLL_S)
            before, seen = seen, self._state()
            # Two files cannot change at once, so wait until both have settled.
            if seen == self._tried or seen != before:
                continue
            self._tried = seen
            try:
                self.context = _load(self._certificate, self._key)
            except CertificateError as error:
                log.error("certificate not reloaded; the old one stays", extra={"why": str(error)})  # noqa: TRY400 - the reason is in the message
            else:
                log.info("certificate reloaded", extra={"path": str(self._certificate)})

    def _state(self) -> tuple[_FileState, ...]:
        return tuple(_file_state(path) for path in (self._certificate, self._key))


def _file_state(path: Path) -> _FileState:
    """Return what changes with the file; empty if it is missing."""
    try:
        result = path.stat()
    except OSError:
        return ()
    return (result.st_mtime_ns, result.st_size, result.st_ino, result.st_mode)


def _load(certificate: Path, key: Path) -> ssl.SSLContext:
    """Return a server context with the certificate. Raises CertificateError."""
    _check_file(certificate)
    _check_file(key)
    try:
        process_secrets.check_secret_file(key)
    except process_secrets.OpenSecretError as error:
        raise CertificateError(str(error)) from error
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.sslobject_class = RecordSSLObject
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_ciphers(_TLS_1_2_CIPHERS)
    context.set_ecdh_curve(_GROUP)
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(certificate, key, password=partial(_refuse_password, key))
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            why = f"the key {key} does not belong to the certificate {certificate}"
        else:
            why = (
                f"{certificate} and {key} are not a certificate and its key in PEM ({error.reason or error}); "
                "expected -----BEGIN CERTIFICATE-----, with intermediate certificates after it, and "
                "-----BEGIN PRIVATE KEY-----"
            )
        raise CertificateError(why) from error
    except OSError as error:
        raise CertificateError(
            f"{certificate} or {key} cannot be read: {error.strerror or error}"
        ) from error
    return context


def _check_file(path: Path) -> None:
    """Raise CertificateError if the path is not a regular file."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise CertificateError(f"{path} cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(mode):
        raise CertificateError(f"{path} is not a file")


def _refuse_password(key: Path) -> NoReturn:
    """Refuse an encrypted key. Without this, OpenSSL asks for the password on the terminal."""
    raise CertificateError(
        f"{key} is encrypted, and a server has nobody to ask for the password. Write it without one: "
        f"`openssl pkey -in {key} -out NEW.key`"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsOptions:
    """Options of a TLS listener."""

    certificate: ContextSource
    plain_response: bytes
    """The response to a client that speaks plain HTTP."""
    accepts_plain: Callable[[], bool] = lambda: False
    """Returns whether plain connections are served; asked at each of them."""
    context_for: Callable[[str], ssl.SSLContext] | None = None
    """Returns the context for a client that names the server (SNI; empty without a name); None: all get the certificate's."""
    handshake_s: float = 10.0
    """The longest time from the connection to the end of its handshake."""
    unfinished_handshakes: int = 256
    """The number of unfinished handshakes at once. When it is reached, the oldest of the address that has most is ended."""
    on_shed: Callable[[], None] = lambda: None
    """Called when an unfinished handshake is ended to make room."""
    on_failure: Callable[[str], None] = lambda _: None
    """Called with the reason, as one word, when a handshake fails or a plain connection is refused."""

    def acceptor(
        self, listener: socket.socket, make_protocol: Callable[[], asyncio.Protocol]
    ) -> "TlsListener":
        """Return the listener that has these options."""
        return TlsListener(listener, make_protocol, self)


class _Unfinished:
    """A connection before the end of its handshake."""

    __slots__ = ("address", "connection", "deadline", "has_begun", "task", "timer")

    timer: asyncio.TimerHandle
    """Ends the connection if its first byte does not arrive."""

    def __init__(self, connection: socket.socket, address: str, deadline: float) -> None:
        self.connection = connection
        self.address = address
        self.deadline = deadline
        self.task: asyncio.Task[None] | None = None
        """The handshake, once its turn has come."""
        self.has_begun = False

    @property
    def is_open(self) -> bool:
        """False once it is closed."""
        return self.connection.fileno() != -1


class TlsListener:
    """Accepts connections on a listening socket, and hands those over whose handshake succeeds.

    A connection costs little before its first byte has arrived. Then the addresses of clients take turns: a flood of
    hellos, each of which costs a signature, delays other addresses by one handshake of each that takes part. When too
    many are unfinished, the address that has most of them loses its oldest one: a handshake takes a client milliseconds.
    """

    def __init__(
        self,
        listener: socket.socket,
        make_protocol: Callable[[], asyncio.Protocol],
        options: TlsOptions,
    ) -> None:
        self._listener = listener
        self._make_protocol = make_protocol
        self._options = options
        self._loop = asyncio.get_running_loop()
        self._unfinished: dict[str, dict[_Unfinished, None]] = {}
        """By address, oldest first."""
        self._count = 0
        self._turns: dict[str, deque[_Unfinished]] = {}
        """The connections whose first byte has arrived, by address; the first address has the next turn."""
        self._is_drained = asyncio.Event()
        self._pause: asyncio.TimerHandle | None = None
        listener.settimeout(0)
        self._resume()

    def close(self) -> None:
        """Accept no more connections; handshakes in progress go on."""
        self._loop.remove_reader(self._listener)
        if self._pause is not None:
            self._pause.cancel()

    async def wait_closed(self) -> None:
        """Give handshakes in progress a moment to finish, then end them."""
        if not self._count:
            return
        self._is_drained.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_HANDSHAKES_S):
                await self._is_drained.wait()
        for clients in list(self._unfinished.values()):
            for client in list(clients):
                self._abort(client)

    def _resume(self) -> None:
        self._pause = None
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_AT_ONCE):
            try:
                connection, peer = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _OUT_OF_FILES:
                    raise
                if self._count:  # end one for its file; the loop calls again at once
                    self._shed()
                    return
                log.warning("no connection accepted", extra={"why": error.strerror})
                self._loop.remove_reader(self._listener)
                self._pause = self._loop.call_later(_OUT_OF_FILES_PAUSE_S, self._resume)
                return
            host = peer[0] if isinstance(peer, tuple) else ""
            connection.settimeout(0)
            if self._count >= self._options.unfinished_handshakes:
                self._shed()
            deadline = self._loop.time() + self._options.handshake_s
            client = _Unfinished(connection, client_network(host), deadline)
            client.timer = self._loop.call_at(deadline, self._expire, client)
            self._unfinished.setdefault(client.address, {})[client] = None
            self._count += 1
            self._loop.add_reader(connection, self._queue, client)

    def _shed(self) -> None:
        """End the oldest connection of the address that has most."""
        address = max(self._unfinished, key=lambda address: len(self._unfinished[address]))
        self._abort(next(iter(self._unfinished[address])))
        self._options.on_shed()

    def _expire(self, client: _Unfinished) -> None:
        self._abort(client)
        self._options.on_failure(failure_reason(TimeoutError()))

    def _abort(self, client: _Unfinished) -> None:
        self._end(client)
        if client.task is not None and client.has_begun:
            client.task.cancel()  # it closes the connection
            return
        self._loop.remove_reader(client.connection)
        client.connection.close()

    def _end(self, client: _Unfinished) -> None:
        """Count a connection as unfinished no more."""
        own = self._unfinished.get(client.address, {})
        if client not in own:
            return
        client.timer.cancel()
        del own[client]
        if not own:
            del self._unfinished[client.address]
        self._count -= 1
        if not self._count:
            self._is_drained.set()

    def _queue(self, client: _Unfinished) -> None:
        """Let a connection wait for its turn: its first byte has arrived, or its end."""
        self._loop.remove_reader(client.connection)
        if not self._turns:
            self._loop.call_soon(self._start)
        self._turns.setdefault(client.address, deque()).append(client)

    def _start(self) -> None:
        """Start some handshakes, one of each address in turn; the rest waits for the next turn of the loop."""
        started = 0
        while self._turns and started < _STARTS_AT_ONCE:
            address = next(iter(self._turns))
            waiting = self._turns.pop(address)
            client = waiting.popleft()
            if waiting:
                self._turns[address] = waiting
            if client.is_open:
                client.timer.cancel()
                client.task = self._loop.create_task(self._handshake(client))
                started += 1
        if self._turns:
            self._loop.call_soon(self._start)

    async def _handshake(self, client: _Unfinished) -> None:
        """Hand the connection over when its handshake has succeeded; close it if that fails."""
        if not client.is_open:  # shed since its turn came
            return
        client.has_begun = True
        options, connection, is_served = self._options, client.connection, False
        try:
            async with asyncio.timeout_at(client.deadline):
                first = connection.recv(1, socket.MSG_PEEK)
                if first == _HANDSHAKE_RECORD:
                    await self._serve(connection, await self._context(connection))
                    is_served = True
                elif first and options.accepts_plain():
                    await self._serve(connection, None)
                    is_served = True
                elif first:
                    options.on_failure(PLAIN_REFUSED)
                    await self._answer_plain(connection)
        except (OSError, TimeoutError) as error:  # ssl.SSLError is an OSError
            options.on_failure(failure_reason(error))
            log.debug("no TLS connection", extra={"why": str(error)})
        finally:
            self._end(client)
            if not is_served:
                connection.close()

    async def _context(self, connection: socket.socket) -> ssl.SSLContext:
        """Return the TLS context for the connection."""
        if self._options.context_for is None:
            return self._options.certificate.context
        return self._options.context_for(await read_server_name(connection))

    async def _serve(self, connection: socket.socket, context: ssl.SSLContext | None) -> None:
        """Hand the connection over, after its handshake if there is a context."""
        await self._loop.connect_accepted_socket(
            self._make_protocol,
            connection,
            ssl=context,
            ssl_shutdown_timeout=None if context is None else _FLUSH_S,
        )

    async def _answer_plain(self, connection: socket.socket) -> None:
        await self._loop.sock_sendall(connection, self._options.plain_response)
        connection.shutdown(socket.SHUT_WR)
        # Closing while the client still sends would discard the response.
        async with asyncio.timeout(_PLAIN_LINGER_S):
            while await self._loop.sock_recv(connection, 1 << 16):
                pass
