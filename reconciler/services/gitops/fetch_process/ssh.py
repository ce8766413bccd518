"""ssh for dulwich through asyncssh: one known host, one key, and no ssh configuration of the user.

dulwich blocks while it reads; asyncssh needs an event loop. The loop runs in its own thread, joined by socket pairs.
"""

import asyncio
import io
import socket
from threading import Thread
from typing import TypeVar

import asyncssh
from dulwich.client import SSHVendor
from typing_extensions import override

from reconciler.services.gitops.fetch_process.errors import FetchError, short_message

T = TypeVar("T")

_STDERR_BYTES, _STDERR_S = 4096, 5.0
_BUFFER = 64 * 2**10


class SshChannel:
    """A command on the server, with the interface that dulwich expects."""

    def __init__(
        self,
        sending: socket.socket,
        receiving: socket.socket,
        loop: asyncio.AbstractEventLoop,
        connection: asyncssh.SSHClientConnection,
        process: "asyncssh.SSHClientProcess[bytes]",
    ) -> None:
        """Take over the connection, and the local ends of the sockets that are joined to the process."""
        self._sending = sending
        self._receiving = receiving
        self._loop = loop
        self._connection = connection
        self._process = process
        self._reader = io.BufferedReader(socket.SocketIO(receiving, "rb"), _BUFFER)
        self.read = self._reader.read
        self.stderr = self

    def write(self, data: bytes) -> int:
        self._sending.sendall(data)
        return len(data)

    def can_read(self) -> bool:
        """Return whether a read would not block; buffered data counts."""
        silence_s = self._receiving.gettimeout()
        self._receiving.settimeout(0.0)
        try:
            return bool(self._reader.peek(1))
        except OSError:
            return False
        finally:
            self._receiving.settimeout(silence_s)

    def readlines(self) -> list[bytes]:
        """Return the server's stderr; dulwich reads it when the server closes the connection."""
        try:
            stderr = asyncio.run_coroutine_threadsafe(
                self._process.stderr.read(_STDERR_BYTES), self._loop
            ).result(_STDERR_S)
        except (TimeoutError, OSError, asyncssh.Error):
            stderr = b""
        return stderr.splitlines(keepends=True)

    def close(self) -> None:
        """Close the connection without waiting for the server."""
        self._reader.close()
        self._receiving.close()
        self._sending.close()
        self._loop.call_soon_threadsafe(self._connection.abort)


class AsyncsshVendor(SSHVendor):
    """Runs git-upload-pack over ssh. Raises FetchError, OSError and TimeoutError."""

    def __init__(self, *, key: str, known_hosts: str, silence_s: float) -> None:
        """Use a private key (its text) for hosts in the known_hosts file; starts nothing yet."""
        self._key = key
        self._known_hosts = known_hosts
        self._silence_s = silence_s

    # The signature is dulwich's. Only the key is used to authenticate.
    @override
    def run_command(  # type: ignore[override] # dulwich names its own class for a process
        self,
        host: str,
        command: bytes,
        username: str | None = None,
        port: int | None = None,
        **_others: object,
    ) -> SshChannel:
        loop = asyncio.new_event_loop()
        Thread(target=loop.run_forever, name="ssh", daemon=True).start()
        opening = self._open(loop, host, port or 22, username or "git", command.decode())
        try:
            return asyncio.run_coroutine_threadsafe(opening, loop).result(2 * self._silence_s)
        except (asyncssh.Error, asyncssh.KeyImportError) as error:
            raise _refusal(error, host, username or "git") from error

    async def _open(
        self, loop: asyncio.AbstractEventLoop, host: str, port: int, username: str, command: str
    ) -> SshChannel:
        connection = await asyncssh.connect(
            host,
            port,
            username=username,
            client_keys=[asyncssh.import_private_key(self._key)],
            known_hosts=self._known_hosts,
            config=[],
            agent_path=None,
            preferred_auth="publickey",
            connect_timeout=self._silence_s,
            login_timeout=self._silence_s,
            # Detects a server that went away silently.
            keepalive_interval=self._silence_s / 2,
            keepalive_count_max=2,
        )
        # One pair per direction: asyncssh reads from every socket it gets, even one for writing.
        sending, stdin = socket.socketpair()
        receiving, stdout = socket.socketpair()
        process = await connection.create_process(
            command,
            stdin=stdin,
            stdout=stdout,
            stderr=asyncssh.PIPE,
            encoding=None,
            env={"GIT_PROTOCOL": "version=2"},
        )
        return SshChannel(sending, receiving, loop, connection, process)


def _refusal(error: Exception, host: str, username: str) -> FetchError:
    text = short_message(error)
    match error:
        case asyncssh.HostKeyNotVerifiable():
            hint = "add its key to credentials.knownHostsFile if it is the right one (ssh-keyscan)"
            return FetchError("HostKeyRefused", f"{host} has an unknown host key: {text}; {hint}")
        case asyncssh.PermissionDenied():
            message = f"{host} refuses {username} with the key of credentials.sshKeyFile: {text}"
            return FetchError("AuthenticationFailed", message)
        case asyncssh.KeyImportError():
            message = f"credentials.sshKeyFile is not a usable private key: {text}"
            return FetchError("AuthenticationFailed", message)
        case _:
            return FetchError("Unreachable", f"{host} cannot be reached over ssh: {text}")
