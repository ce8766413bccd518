"""A session with a Mac over ssh: commands with limits, sudo and uploads.

Commands are lists of arguments, quoted in one place. Nothing here runs a command that a user typed.
"""

import asyncio
import hashlib
import shlex
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Final

import asyncssh

from fleetctl.remote import host_keys
from fleetctl.remote.errors import (
    HostKeyError,
    LoginRefusedError,
    RemoteError,
    RemoteTimeoutError,
    SudoRefusedError,
    UnreachableHostError,
)
from fleetctl.remote.host_keys import KnownHosts
from fleetctl.remote.prompts import Prompts
from fleetctl.remote.ssh_config import MAX_JUMPS, SshHost, read_ssh_host
from fleetctl.remote.target import RemoteTarget
from machinery import macos_commands

_COMMAND_S: Final = 60.0
# A person may have to find a password.
_LOGIN_S: Final = 120.0
_MAX_OUTPUT: Final = 1 << 20
_PIECE: Final = 64 << 10
# A dead Mac is noticed after 20 s.
_KEEPALIVE_S, _KEEPALIVES = 5.0, 3
# 1 MB/s is a bad Wi-Fi.
_UPLOAD_S, _UPLOAD_RATE = 60.0, 1_000_000
_PASSWORD_TRIES: Final = 3

# sudo always gets the same program: a rule of sudoers that needs no password for some programs only must not decide
# whether the first line of stdin is the password or the input of the command.
# The home of the user may be closed to the user that root becomes next.
_AS_ROOT: Final = ("/bin/sh", "-c", 'cd / && exec "$@"', "sh")
# macOS has shasum; its newer sha256sum takes other flags than Linux's.
_SHA256: Final = '[ -f "$1" ] || exit 66; if command -v shasum >/dev/null; then shasum -a 256 "$1"; else sha256sum "$1"; fi'
_NO_FILE: Final = 66


@dataclass(frozen=True, slots=True, kw_only=True)
class SshPolicy:
    """Settings of a session: trusted host keys, private keys and limits."""

    hosts: KnownHosts
    prompts: Prompts | None = None
    """None in scripts: unknown hosts and passwords are refused."""
    identities: tuple[Path, ...] = ()
    """Private keys of --identity; without them the agent's, those of the configuration, and the user's default keys."""
    config: Path | None = None
    """The user's configuration of ssh; None to read none."""
    connect_limit_s: float = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteResult:
    """The end of a command."""

    argv: tuple[str, ...]
    code: int
    """Exit code; -1 after a signal."""
    signal: str = ""
    out: str = ""
    err: str = ""
    is_truncated: bool = False
    """True if there was more output than was kept."""

    @property
    def is_ok(self) -> bool:
        return self.code == 0

    @property
    def line(self) -> str:
        """The last line that it printed, its errors first; for messages."""
        lines = (self.err.strip() or self.out.strip()).splitlines()
        end = f"signal {self.signal}" if self.signal else f"exit code {self.code}"
        return lines[-1].strip() if lines else end


@asynccontextmanager
async def connect(target: RemoteTarget, policy: SshPolicy) -> "AsyncIterator[RemoteMac]":
    """Connect to a Mac whose host key is accepted, for the duration of a block.

    The first connection asks for the host key and sends nothing. The second one takes this key only.

    Raises:
        UnreachableHostError: nothing answers in time.
        HostKeyError: its host key is refused.
        LoginRefusedError: it refuses the user.

    """
    async with _open(target, policy) as connection:
        yield RemoteMac(connection, target, policy.prompts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The way of a session: the host that is dialled, the connection that it goes through, and the policy."""

    host: SshHost
    policy: SshPolicy
    tunnel: asyncssh.SSHClientConnection | None = None
    """The connection to the last host of ProxyJump; None if the host is dialled directly."""

    @property
    def target(self) -> RemoteTarget:
        return self.host.target


@asynccontextmanager
async def _open(
    target: RemoteTarget,
    policy: SshPolicy,
    tunnel: asyncssh.SSHClientConnection | None = None,
    depth: int = 0,
) -> AsyncIterator[asyncssh.SSHClientConnection]:
    """Log in to a host, for the duration of a block."""
    async with reach(target, policy, tunnel, depth) as (route, key):
        connection = await _log_in(route, key)
        try:
            yield connection
        finally:
            connection.abort()


@asynccontextmanager
async def reach(
    target: RemoteTarget,
    policy: SshPolicy,
    tunnel: asyncssh.SSHClientConnection | None = None,
    depth: int = 0,
) -> AsyncIterator[tuple[Route, asyncssh.SSHKey]]:
    """Log in to the hosts of a host's ProxyJump, and yield the way to it and its host key; all have to prove theirs.

    Raises:
        UnreachableHostError: nothing answers in time.
        HostKeyError: a host key is refused.

    """
    if depth > MAX_JUMPS:
        raise RemoteError(f"{policy.config}: the hosts of ProxyJump lead to each other in a circle")
    host = await read_ssh_host(target, policy.config)
    async with AsyncExitStack() as stack:
        for jump in host.jumps if tunnel is None else ():
            tunnel = await stack.enter_async_context(_open(jump, policy, tunnel, depth + 1))
        route = Route(host=host, policy=policy, tunnel=tunnel)
        key = await _shown_key(route)
        await host_keys.check(route.target, key, policy.hosts, policy.prompts)
        yield route, key


async def _shown_key(route: Route) -> asyncssh.SSHKey:
    """Return the host key; of the type that is known, if the server still has one."""
    known = host_keys.algorithms(route.target, route.policy.hosts)
    try:
        return await _ask_key(route, known)
    except asyncssh.KeyExchangeFailed:
        if not known:
            raise
    return await _ask_key(route, ())


async def _ask_key(route: Route, known: Sequence[str]) -> asyncssh.SSHKey:
    target, limit_s = route.target, route.policy.connect_limit_s
    try:
        async with asyncio.timeout(limit_s):
            key = await asyncssh.get_server_host_key(
                target.host,
                target.port,
                tunnel=route.tunnel,
                server_host_key_algs=list(known) or (),
                config=None,
            )
    except (asyncssh.KeyExchangeFailed, TimeoutError) as error:
        if known and isinstance(error, asyncssh.KeyExchangeFailed):
            raise
        raise unreachable(target, error, limit_s) from error
    except (OSError, asyncssh.Error) as error:
        raise unreachable(target, error, limit_s) from error
    if key is None:
        raise HostKeyError(f"{target.host} shows no host key, so it cannot be verified")
    return key


def unreachable(target: RemoteTarget, error: Exception, limit_s: float) -> UnreachableHostError:
    """Return the error of a host that cannot be reached within a time."""
    reason = f"no answer within {limit_s:g} s" if isinstance(error, TimeoutError) else str(error)
    return UnreachableHostError(
        f"cannot reach {target.host} port {target.port} over ssh: {reason}. Check the name and the network; on a Mac, "
        "System Settings > General > Sharing > Remote Login must be on"
    )


async def _log_in(route: Route, key: asyncssh.SSHKey) -> asyncssh.SSHClientConnection:
    target, policy = route.target, route.policy
    asked = _Asked(target, policy.prompts)
    keys = policy.identities or route.host.identities
    try:
        return await asyncssh.connect(
            target.host,
            target.port,
            tunnel=route.tunnel,
            username=target.user,
            known_hosts=([key], [], []),
            config=None,
            client_keys=[str(path) for path in keys] or (),
            # The agent holds the keys of the configuration that have a passphrase.
            ignore_encrypted=not policy.identities,
            passphrase=asked.passphrase if policy.identities and policy.prompts else None,
            password=asked.password if policy.prompts else None,
            connect_timeout=policy.connect_limit_s,
            login_timeout=_LOGIN_S if policy.prompts else policy.connect_limit_s,
            keepalive_interval=_KEEPALIVE_S,
            keepalive_count_max=_KEEPALIVES,
        )
    except asyncssh.HostKeyNotVerifiable as error:
        raise HostKeyError(
            f"{target.host} showed two host keys, one after the other; nothing was sent. Is another machine at its "
            "address?"
        ) from error
    except asyncssh.PermissionDenied as error:
        raise LoginRefusedError(_refused(target, asked)) from error
    except (asyncssh.KeyImportError, asyncssh.KeyEncryptionError, FileNotFoundError) as error:
        names = ", ".join(map(str, keys))
        raise LoginRefusedError(f"{names}: not a usable private key: {error}") from error
    except (OSError, TimeoutError, asyncssh.Error) as error:
        raise unreachable(target, error, policy.connect_limit_s) from error


def _refused(target: RemoteTarget, asked: "_Asked") -> str:
    what = "the password" if asked.has_password else "every key of the agent and of ~/.ssh"
    return (
        f"{target.host} refuses {target.user} with {what}. Name a key with --identity, or copy yours there: "
        f"ssh-copy-id {target.user}@{target.host}. On a Mac, Remote Login must allow this user"
    )


class _Asked:
    """The secrets that a login asks the person for."""

    def __init__(self, target: RemoteTarget, prompts: Prompts | None) -> None:
        self._target = target
        self._prompts = prompts
        self.has_password = False

    async def password(self) -> str | None:
        if self._prompts is None:
            return None
        self.has_password = True
        return await self._prompts.secret(f"Password of {self._target}")

    async def passphrase(self, filename: str) -> str | None:
        return (
            None
            if self._prompts is None
            else await self._prompts.secret(f"Passphrase of {filename}")
        )


class RemoteMac:
    """A Mac with a session; `connect` makes one."""

    def __init__(
        self,
        connection: asyncssh.SSHClientConnection,
        target: RemoteTarget,
        prompts: Prompts | None,
    ) -> None:
        self._connection = connection
        self._prompts = prompts
        self._has_sudo = target.user == "root"
        self._password: str | None = None
        self.target = target

    async def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        sudo: bool = False,
        limit_s: float = _COMMAND_S,
    ) -> RemoteResult:
        """Run a command to its end; with `sudo` as root. A failing command is a result, not an error.

        Secrets belong into `stdin`: every user of the Mac can read arguments.

        Raises:
            SudoRefusedError: the user may not become root.
            RemoteTimeoutError: it does not end in time.
            UnreachableHostError: the connection broke; the command may have run or not.

        """
        words = tuple(argv)
        if sudo and self.target.user != "root":
            await self.check_sudo()
            words, stdin = self._as_root(words, self._password, stdin)
        return replace(await self._run(words, stdin, limit_s), argv=tuple(argv))

    async def must_run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        sudo: bool = False,
        limit_s: float = _COMMAND_S,
    ) -> RemoteResult:
        """Run a command that has to succeed; see `run`.

        Raises:
            RemoteError: it fails.

        """
        result = await self.run(argv, stdin=stdin, sudo=sudo, limit_s=limit_s)
        if not result.is_ok:
            raise RemoteError(
                f"{self.target.host}: `{shlex.join(result.argv)}` failed: {result.line}"
            )
        return result

    async def check_sudo(self) -> None:
        """Make sure that the user may become root, and ask for the password if sudo needs one.

        Raises:
            SudoRefusedError: the user may not, the password is wrong, or there is no terminal to ask for it.

        """
        if self._has_sudo:
            return
        words, stdin = self._as_root(("true",), None, b"")
        silent = await self._run(words, stdin, _COMMAND_S)
        if not silent.is_ok:
            await self._ask_password(silent)
        self._has_sudo = True

    async def _ask_password(self, silent: RemoteResult) -> None:
        user, host = self.target.user, self.target.host
        if "password is required" not in silent.err or self._prompts is None:
            raise SudoRefusedError(
                f"{host}: {user} cannot become root: {silent.line}. Run this in a terminal, which asks for the password, "
                "or log in as an administrator of that Mac"
            )
        tried = silent
        for _ in range(_PASSWORD_TRIES):
            password = await self._prompts.secret(f"Password of {user} on {host}, for sudo")
            tried = await self._run(*self._as_root(("true",), password, b""), _COMMAND_S)
            if tried.is_ok:
                self._password = password
                return
            if "incorrect password" not in tried.err and "no password" not in tried.err:
                break
        raise SudoRefusedError(
            f"{host}: {user} cannot become root: {tried.line}. Log in as an administrator of that Mac"
        )

    @staticmethod
    def _as_root(
        words: tuple[str, ...], password: str | None, stdin: bytes
    ) -> tuple[tuple[str, ...], bytes]:
        """Return the command line and the input that run a command as root. -k: no remembered password counts."""
        english = ("/usr/bin/env", "LC_ALL=C", "sudo", "-k")
        if password is None:
            return (*english, "-n", *_AS_ROOT, *words), stdin
        return (*english, "-S", "-p", "", *_AS_ROOT, *words), f"{password}\n".encode() + stdin

    async def _run(self, words: tuple[str, ...], stdin: bytes, limit_s: float) -> RemoteResult:
        try:
            async with asyncio.timeout(limit_s):
                return await self._exchange(words, stdin)
        except TimeoutError:
            raise RemoteTimeoutError(
                f"{self.target.host}: a command did not end within {limit_s:g} s: {shlex.join(words)[:200]}"
            ) from None
        except (OSError, asyncssh.Error) as error:
            raise self._broken(error) from error

    async def _exchange(self, words: tuple[str, ...], stdin: bytes) -> RemoteResult:
        """Run one command; it is killed if this is cancelled."""
        process = await self._connection.create_process(shlex.join(words), encoding=None)
        try:
            async with asyncio.TaskGroup() as group:
                out = group.create_task(_read_bounded(process.stdout))
                err = group.create_task(_read_bounded(process.stderr))
                group.create_task(_feed(process.stdin, stdin))
            await process.wait_closed()
            code, end = process.exit_status, process.exit_signal
            if code is None and end is None:
                raise self._broken(None)
        finally:
            if process.exit_status is None:
                with suppress(OSError, asyncssh.Error):
                    process.kill()
            process.close()
        return RemoteResult(
            argv=words,
            code=-1 if code is None else code,
            signal=end[0] if end else "",
            out=out.result()[0].decode(errors="replace"),
            err=err.result()[0].decode(errors="replace"),
            is_truncated=out.result()[1] or err.result()[1],
        )

    def _broken(self, error: BaseException | None) -> UnreachableHostError:
        reason = "it was closed" if error is None else str(error)
        return UnreachableHostError(
            f"the connection to {self.target.host} broke: {reason}. Run the command again: it goes on where it ended"
        )

    async def sha256(self, path: PurePosixPath) -> str | None:
        """Return the SHA-256 of a file there, in hexadecimal; None if there is no such file."""
        result = await self.run(("/bin/sh", "-c", _SHA256, "sh", str(path)), limit_s=_UPLOAD_S)
        if result.code == _NO_FILE:
            return None
        digest = result.out.split(maxsplit=1)[0].lstrip("\\") if result.is_ok and result.out else ""
        if len(digest) != 64:
            raise RemoteError(f"{self.target.host}: cannot read {path}: {result.line}")
        return digest

    async def upload(self, local: Path, path: PurePosixPath) -> bool:
        """Copy a file there: to a temporary name, renamed once its SHA-256 is right. A file that is there stays.

        A relative path is below the home of the user. Missing folders are made, for this user only. Returns True if the
        file was copied.

        Raises:
            RemoteError: it cannot be written there, or arrives changed.
            UnreachableHostError: the connection broke.

        """
        digest = await asyncio.to_thread(_digest, local)
        if await self.sha256(path) == digest:
            return False
        temporary = path.with_name(f".{path.name}.part")
        await self.must_run(("/bin/sh", "-c", 'umask 077; mkdir -p "$1"', "sh", str(path.parent)))
        limit_s = _UPLOAD_S + local.stat().st_size / _UPLOAD_RATE
        try:
            async with asyncio.timeout(limit_s), self._connection.start_sftp_client() as sftp:
                await sftp.put(str(local), str(temporary))
        except TimeoutError:
            raise RemoteTimeoutError(
                f"{self.target.host}: the upload of {local.name} took longer than {limit_s:.0f} s; check the network"
            ) from None
        except (asyncssh.SFTPConnectionLost, asyncssh.SFTPNoConnection) as error:
            raise self._broken(error) from error
        except asyncssh.SFTPError as error:
            raise await self._not_written(temporary, error) from error
        except (OSError, asyncssh.Error) as error:
            raise self._broken(error) from error
        if await self.sha256(temporary) != digest:
            raise RemoteError(
                f"{self.target.host}: {local.name} arrived with another SHA-256; run the command again"
            )
        await self.must_run(("mv", "-f", str(temporary), str(path)))
        return True

    async def _not_written(self, path: PurePosixPath, error: Exception) -> RemoteError:
        """Return the error of an upload. SFTP has no code for a full disk, so the free space is in the message."""
        await self.run(("rm", "-f", str(path)))
        free = await self.run(macos_commands.DISK.words(folder=str(path.parent)))
        fields = free.out.splitlines()[-1].split() if free.is_ok and free.out else []
        space = (
            f"{int(fields[3]) >> 10} MiB are free there"
            if len(fields) > 3 and fields[3].isdigit()
            else "is its disk full?"
        )
        return RemoteError(
            f"{self.target.host}: cannot write {path.parent}: {error}; {space}. Free some space, and run the command again"
        )


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


async def _read_bounded(stream: "asyncssh.SSHReader[bytes]") -> tuple[bytes, bool]:
    """Return the first part of the output, and whether there was more; read it all, so that the command can end.

    A connection that breaks ends the output; the missing exit code tells.
    """
    kept, is_truncated = bytearray(), False
    with suppress(OSError, asyncssh.Error):
        while piece := await stream.read(_PIECE):
            room = _MAX_OUTPUT - len(kept)
            kept += piece[:room]
            is_truncated |= len(piece) > room
    return bytes(kept), is_truncated


async def _feed(stream: "asyncssh.SSHWriter[bytes]", data: bytes) -> None:
    """Write the input; a command that ends without reading it is no error."""
    with suppress(OSError, asyncssh.Error):
        if data:
            stream.write(data)
            await stream.drain()
        stream.write_eof()
