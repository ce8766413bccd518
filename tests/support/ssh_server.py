"""A real ssh server in this process, which runs commands as this user in a folder of the test.

sudo is a small program in its search path: it takes the flags that fleetctl gives, and one password.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import asyncssh
from typing_extensions import override

from fleetctl.remote.host_keys import KnownHosts
from fleetctl.remote.prompts import Prompts
from fleetctl.remote.session import SshPolicy
from fleetctl.remote.target import RemoteTarget
from tests.support.ports import free_port
from tests.support.waiting import until

# What sudo does with: sudo -k (-n | -S -p '') COMMAND...; the password is in the file SUDO, "free" means none.
_SUDO = """#!/bin/sh
rule=$(cat "$HOME/SUDO" 2>/dev/null)
[ "$1" = -k ] || exit 99
shift
if [ "$1" = -n ]; then
  shift
  [ -n "$rule" ] || { echo "admin is not in the sudoers file." >&2; exit 1; }
  [ "$rule" = free ] || { echo "sudo: a password is required" >&2; exit 1; }
else
  shift 3
  IFS= read -r given
  [ "$given" = "$rule" ] || { echo "sudo: 1 incorrect password attempt" >&2; exit 1; }
fi
exec "$@"
"""
_Challenge: TypeAlias = tuple[str, str, str, Sequence[tuple[str, bool]]]
# As shoon/fv-ssh-unlock recorded them from macOS 26.
_LOCKED = """This system is locked. To unlock it, use a local
account name and password. Once successfully
unlocked, you will be able to connect normally.
"""
_UNLOCKED = """System successfully unlocked.
You may now use SSH to authenticate normally.
"""


@dataclass(slots=True)
class Answers:
    """A person who gives the same answers each time."""

    yes: bool = False
    password: str = ""
    questions: list[str] = field(default_factory=list)

    async def confirm(self, question: str) -> bool:
        self.questions.append(question)
        return self.yes

    async def secret(self, question: str) -> str:
        self.questions.append(question)
        return self.password


class SshServer:
    """The server, its host key, and a user `admin` with a key."""

    def __init__(self, root: Path) -> None:
        self.home = root / "home"
        self.key_file = root / "id_test"
        self.host_key = asyncssh.generate_private_key("ssh-ed25519")
        self.password = ""
        self.locked_with = ""
        """The password of FileVault while the disk is locked: nothing else counts, as on macOS 26."""
        self.attempts: list[str] = []
        """Passwords for the locked disk."""
        self.is_silent = False
        """True if a locked Mac ends the connection without a word."""
        self.logins: list[str] = []
        """Users with which clients have begun to log in."""
        self.most_commands = 0
        """The largest number of commands that ran at the same time."""
        self.tunnels: list[tuple[str, int]] = []
        """The addresses to which clients have gone through this server."""
        self.port = free_port()
        self._running = 0
        self._own_known_hosts = root / "known_hosts.mlx-fleet"
        self._key = asyncssh.generate_private_key("ssh-ed25519")
        self._server: asyncssh.SSHAcceptor | None = None
        self._children: set[asyncio.subprocess.Process] = set()
        self.connections: list[asyncssh.SSHServerConnection] = []
        self.home.mkdir()
        self.key_file.write_bytes(self._key.export_private_key())
        self.key_file.chmod(0o600)
        tools = root / "tools"
        tools.mkdir()
        (tools / "sudo").write_text(_SUDO)
        (tools / "sudo").chmod(0o755)
        self._environment = {"HOME": str(self.home), "PATH": f"{tools}:/usr/bin:/bin"}

    @property
    def target(self) -> RemoteTarget:
        return RemoteTarget(user="admin", host="127.0.0.1", port=self.port)

    @property
    def fingerprint(self) -> str:
        return self.host_key.get_fingerprint()

    def hosts(self, *expected: str) -> KnownHosts:
        return KnownHosts(own=self._own_known_hosts, expected=frozenset(expected))

    def policy(self, *expected: str, prompts: Prompts | None = None) -> SshPolicy:
        """Return a policy that vouches for fingerprints, by default for the server's."""
        return SshPolicy(
            hosts=self.hosts(*(expected or (self.fingerprint,))),
            prompts=prompts,
            identities=(self.key_file,),
            connect_limit_s=10.0,
        )

    def allow_sudo(self, rule: str) -> None:
        """Let the user become root with this password; "free" needs none."""
        (self.home / "SUDO").write_text(rule)

    async def start(self, *host_keys: asyncssh.SSHKey) -> None:
        home = self.home

        class Sftp(asyncssh.SFTPServer):
            @override
            def map_path(self, path: bytes) -> bytes:
                return bytes(home / path.decode())

        self._server = await asyncssh.listen(
            "127.0.0.1",
            self.port,
            server_factory=lambda: _Login(self),
            server_host_keys=list(host_keys) or [self.host_key],
            process_factory=self._serve,
            sftp_factory=Sftp,
            encoding=None,
        )

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            for connection in self.connections:
                connection.abort()
            for child in self._children:
                _kill(child)
            await self._server.wait_closed()
            await until(lambda: not self._children, what="end of all commands")

    def accepts(self, key: asyncssh.SSHKey) -> bool:
        return bool(key.public_data == self._key.public_data)

    async def _serve(self, process: "asyncssh.SSHServerProcess[bytes]") -> None:
        child = await asyncio.create_subprocess_exec(
            *("/bin/sh", "-c", process.command or "true"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=self.home,
            env=self._environment,
            start_new_session=True,
        )
        self._children.add(child)
        self._running += 1
        self.most_commands = max(self.most_commands, self._running)
        try:
            assert child.stdin is not None
            assert child.stdout is not None
            assert child.stderr is not None
            async with asyncio.TaskGroup() as group:
                feeding = group.create_task(_copy(process.stdin, child.stdin))
                async with asyncio.TaskGroup() as outputs:
                    outputs.create_task(_copy(child.stdout, process.stdout))
                    outputs.create_task(_copy(child.stderr, process.stderr))
                feeding.cancel()
            code = await child.wait()
            self._running -= 1
            process.exit(code)
        finally:
            _kill(child)
            # Its pipes are read to their end, or they would stay open.
            await child.communicate()
            self._children.discard(child)


def _kill(child: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)


async def _copy(
    source: "asyncio.StreamReader | asyncssh.SSHReader[bytes]",
    sink: "asyncio.StreamWriter | asyncssh.SSHWriter[bytes]",
) -> None:
    with contextlib.suppress(OSError, asyncssh.Error):
        while piece := await source.read(65536):
            sink.write(piece)
            await sink.drain()
        if isinstance(sink, asyncio.StreamWriter):
            sink.close()


class _Login(asyncssh.SSHServer):
    _connection: asyncssh.SSHServerConnection

    def __init__(self, server: SshServer) -> None:
        self._server = server
        self._is_unlocked = False

    @override
    def connection_made(self, conn: asyncssh.SSHServerConnection) -> None:
        self._connection = conn
        self._server.connections.append(conn)

    @override
    def begin_auth(self, username: str) -> bool:
        self._server.logins.append(username)
        if self._server.locked_with:
            self._connection.send_auth_banner(_LOCKED)
        return True

    @override
    def kbdint_auth_supported(self) -> bool:
        return bool(self._server.locked_with)

    @override
    def get_kbdint_challenge(self, username: str, lang: str, submethods: str) -> "_Challenge":
        return "", "", "", [("Password:", False)]

    @override
    def validate_kbdint_response(
        self, username: str, responses: Sequence[str]
    ) -> "bool | _Challenge":
        if self._is_unlocked:
            self._connection.abort()
            return False
        self._server.attempts.append(*responses)
        self._is_unlocked = list(responses) == [self._server.locked_with]
        if not self._is_unlocked:
            return False
        self._server.locked_with = ""
        if self._server.is_silent:
            self._connection.abort()
            return False
        return "", _UNLOCKED, "", []

    @override
    def public_key_auth_supported(self) -> bool:
        return not self._server.locked_with

    @override
    def validate_public_key(self, username: str, key: asyncssh.SSHKey) -> bool:
        return username == "admin" and self._server.accepts(key)

    @override
    def connection_requested(
        self, dest_host: str, dest_port: int, orig_host: str, orig_port: int
    ) -> bool:
        self._server.tunnels.append((dest_host, dest_port))
        return True

    @override
    def password_auth_supported(self) -> bool:
        return bool(self._server.password)

    @override
    def validate_password(self, username: str, password: str) -> bool:
        return username == "admin" and password == self._server.password


@asynccontextmanager
async def ssh_server(root: Path) -> AsyncIterator[SshServer]:
    """Run a server."""
    server = SshServer(root)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()
