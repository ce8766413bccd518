"""ssh for dulwich, by asyncssh: one known host, one key, nothing of the user's own ssh configuration.

dulwich reads and blocks; asyncssh needs an event loop. The loop runs in a thread of its own, and pairs of sockets join them.
"""

import asyncio
import io
import socket
from collections.abc import Coroutine
from threading import Thread
from typing import Any, TypeVar

import asyncssh
from dulwich.client import SSHVendor
from typing_extensions import override

from reconciler.gitops.fetch_process.errors import FetchError, short_message

T = TypeVar("T")

_MOST_STDERR, _COMPLAINTS_S = 4096, 5.0
_BUFFER = 64 * 2**10


class SshChannel:
    """A command on the other side, as dulwich wants one."""

    def __init__(
        self,
        sending: socket.socket,
        receiving: socket.socket,
        loop: asyncio.AbstractEventLoop,
        connection: asyncssh.SSHClientConnection,
        process: "asyncssh.SSHClientProcess[bytes]",
    ) -> None:
        """Take over the connection, and our ends of the sockets that are joined to the process."""
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
        """Return whether reading would not wait: what is in the buffer counts."""
        silence_s = self._receiving.gettimeout()
        self._receiving.settimeout(0.0)
        try:
            return bool(self._reader.peek(1))
        except OSError:
            return False
        finally:
            self._receiving.settimeout(silence_s)

    def readlines(self) -> list[bytes]:
        """Return what the other side complained of; dulwich asks its `stderr`, when the other side hung up."""
        try:
            said = self._wait(self._process.stderr.read(_MOST_STDERR), _COMPLAINTS_S)
        except (TimeoutError, OSError, asyncssh.Error):
            said = b""
        return said.splitlines(keepends=True)

    def close(self) -> None:
        """Hang up; what the other side does about it is its own business."""
        self._reader.close()
        self._receiving.close()
        self._sending.close()
        self._loop.call_soon_threadsafe(self._connection.abort)

    def _wait(self, main: Coroutine[Any, Any, T], limit_s: float) -> T:
        return asyncio.run_coroutine_threadsafe(main, self._loop).result(limit_s)


class AsyncsshVendor(SSHVendor):
    """Runs git-upload-pack over ssh. Raises FetchError, OSError and TimeoutError."""

    def __init__(self, *, key: str, known_hosts: str, silence_s: float) -> None:
        """Be who the private key (its text) says, towards hosts in the file; starts nothing yet."""
        self._key = key
        self._known_hosts = known_hosts
        self._silence_s = silence_s

    # The signature is dulwich's; of the ways to be somebody only the key counts here.
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
            # A peer that went away without a word is noticed.
            keepalive_interval=self._silence_s / 2,
            keepalive_count_max=2,
        )
        # One for each way: asyncssh reads from every socket it is given, be it for writing.
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
    said = short_message(error)
    match error:
        case asyncssh.HostKeyNotVerifiable():
            hint = (
                "put its key into credentials.knownHostsFile if it is the right one (ssh-keyscan)"
            )
            return FetchError("HostKeyRefused", f"{host} is not who it should be: {said}; {hint}")
        case asyncssh.PermissionDenied():
            message = (
                f"{host} does not let {username} in with the key of credentials.sshKeyFile: {said}"
            )
            return FetchError("AuthenticationFailed", message)
        case asyncssh.KeyImportError():
            message = f"credentials.sshKeyFile is no private key that can be used: {said}"
            return FetchError("AuthenticationFailed", message)
        case _:
            return FetchError("Unreachable", f"{host} cannot be reached over ssh: {said}")
