"""The settings of a host in ~/.ssh/config, as ssh itself resolves them (`ssh -G`, ssh(1))."""

import asyncio
import os
import shutil
import signal
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import click

from fleetctl.remote.errors import RemoteError
from fleetctl.remote.target import RemoteTarget, is_host, is_user, parse_target

_LIMIT_S: Final = 10.0
_MAX_OUTPUT: Final = 256 << 10
MAX_JUMPS: Final = 8
"""The most hosts on the way to another one."""
_NONE: Final = "none"
# ssh names them whether the file does or not; asyncssh tries them by itself.
_DEFAULT_KEYS: Final = frozenset(
    f"id_{kind}" for kind in ("dsa", "rsa", "ecdsa", "ecdsa_sk", "ed25519", "ed25519_sk", "xmss")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SshHost:
    """The settings of ssh for one name."""

    target: RemoteTarget
    """The user, and the host and port that are dialled."""
    identities: tuple[Path, ...] = ()
    """The private keys that the file names and that exist; empty for the default ones."""
    jumps: tuple[RemoteTarget, ...] = ()
    """The hosts of ProxyJump, the first one first."""


async def read_ssh_host(target: RemoteTarget, file: Path | None) -> SshHost:
    """Return the settings of a target; without a file, or without ssh, the target itself.

    Raises:
        RemoteError: the file has an error, or asks for something that fleetctl does not do.

    """
    ssh = shutil.which("ssh")
    if ssh is None or file is None or not await asyncio.to_thread(file.is_file):
        return SshHost(target=target)
    port = () if target.has_default_port else ("-p", str(target.port))
    user = ("-l", target.user) if target.user else ()
    words = (ssh, "-G", "-F", str(file), *user, *port, "--", target.host)
    process = await asyncio.create_subprocess_exec(
        *words,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,  # its end includes the commands of `Match exec`
    )
    try:
        async with asyncio.timeout(_LIMIT_S):
            out, err = await process.communicate()
    except TimeoutError:
        raise RemoteError(
            f"{file}: `ssh -G` did not end within {_LIMIT_S:g} s. Does a `Match exec` hang?"
        ) from None
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    if process.returncode or len(out) > _MAX_OUTPUT:
        lines = err.decode(errors="replace").strip().splitlines()
        raise RemoteError(f"ssh cannot read {file}: {lines[0] if lines else 'too many settings'}")
    output = out.decode(errors="replace")
    keys: list[Path] = []
    values: dict[str, str] = {}
    for line in output.splitlines():
        keyword, _, value = line.partition(" ")
        if keyword == "identityfile":
            keys.append(Path(value).expanduser())
        else:
            values.setdefault(keyword, value)
    if values.get("proxycommand", _NONE) != _NONE:
        raise RemoteError(
            f"{file} gives {target.host} a ProxyCommand, which fleetctl does not run. Use ProxyJump, or name an address "
            "that this machine reaches"
        )
    return SshHost(
        target=_dialled(target, values, file),
        identities=tuple(key for key in keys if key.name not in _DEFAULT_KEYS and key.is_file()),
        jumps=_jumps(values.get("proxyjump", _NONE), target, file),
    )


def _dialled(target: RemoteTarget, values: Mapping[str, str], file: Path) -> RemoteTarget:
    host, user, port = (
        values.get("hostname", target.host),
        values.get("user", target.user),
        values.get("port", str(target.port)),
    )
    if not (is_host(host) and is_user(user) and port.isdecimal()):
        raise RemoteError(
            f"{file}: {target.host} is {user[:64]}@{host[:253]}:{port[:6]}, which is no address"
        )
    return RemoteTarget(user=user, host=host, port=int(port))


def _jumps(value: str, target: RemoteTarget, file: Path) -> tuple[RemoteTarget, ...]:
    texts = [part.strip().removeprefix("ssh://") for part in value.split(",")]
    if texts == [_NONE]:
        return ()
    if len(texts) > MAX_JUMPS:
        raise RemoteError(f"{file}: ProxyJump of {target.host} has more than {MAX_JUMPS} hosts")
    try:
        return tuple(map(_jump, texts))
    except click.UsageError as error:
        raise RemoteError(f"{file}: ProxyJump of {target.host}: {error.message}") from error


def _jump(text: str) -> RemoteTarget:
    """Return a host of ProxyJump, `[user@]host[:port]`. Raises click.UsageError."""
    if "@" in text:
        return parse_target(text)
    return replace(parse_target(f"nobody@{text}"), user="")
