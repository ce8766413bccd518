"""Host keys of Macs: a known one is accepted, a changed one refused, an unknown one shown to the person.

None is ever trusted silently. Keys that a person has confirmed are kept in the fleet's own file; the user's known_hosts is
read, never written.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import asyncssh

from fleetctl.remote.errors import HostKeyError
from fleetctl.remote.prompts import Prompts
from fleetctl.remote.target import RemoteTarget

_MAX_FILE_BYTES: Final = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownHosts:
    """Files with host keys, and keys that the command line vouches for."""

    own: Path
    """The fleet's file, to which confirmed keys are added."""
    others: tuple[Path, ...] = ()
    expected: frozenset[str] = field(default=frozenset())
    """Fingerprints of --host-key, such as SHA256:..."""

    def find(self, target: RemoteTarget) -> "list[KnownKey]":
        """Return all entries for a host. Entries that cannot be read are skipped, as ssh does."""
        return [entry for file in (self.own, *self.others) for entry in _entries(file, target)]

    def add(self, target: RemoteTarget, key: asyncssh.SSHKey) -> None:
        """Remember a key that a person has confirmed."""
        self.own.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        with os.fdopen(os.open(self.own, flags, 0o600), "w") as file:
            file.write(f"{target.known_hosts_name} {_public_text(key)}\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownKey:
    """One line about a host."""

    file: Path
    line: int
    key: asyncssh.SSHKey
    is_revoked: bool = False


def user_known_hosts(home: Path, expected: Sequence[str] = ()) -> KnownHosts:
    """Return the files of a user.

    Raises:
        HostKeyError: an expected fingerprint is none.

    """
    for one in expected:
        if not one.startswith("SHA256:"):
            raise HostKeyError(
                f"--host-key {one}: expected a fingerprint such as SHA256:jTcE..., which the Mac itself shows with: "
                "ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub"
            )
    ssh = home / ".ssh"
    return KnownHosts(
        own=ssh / "known_hosts.mlx-fleet",
        others=(ssh / "known_hosts", Path("/etc/ssh/ssh_known_hosts")),
        # Some tools print base64's padding.
        expected=frozenset(one.rstrip("=") for one in expected),
    )


def algorithms(known: Sequence[KnownKey]) -> list[str]:
    """Return the algorithms of known keys, so that a server with several keys shows one that can be compared."""
    names = [name.decode() for key in known for name in key.key.sig_algorithms]
    return list(dict.fromkeys(names))


async def check(
    target: RemoteTarget, key: asyncssh.SSHKey, hosts: KnownHosts, prompts: Prompts | None
) -> None:
    """Accept the host key that a Mac has shown, or refuse it.

    Raises:
        HostKeyError: it is changed, revoked, another one than expected, or unknown and not confirmed.

    """
    known = hosts.find(target)
    shown = key.get_fingerprint()
    revoked = [known_key for known_key in known if known_key.is_revoked and known_key.key == key]
    if revoked:
        raise HostKeyError(
            f"{target.host}: its host key {shown} is revoked by {revoked[0].file}:{revoked[0].line}. Nothing was sent"
        )
    known = [known_key for known_key in known if not known_key.is_revoked]
    if known and all(known_key.key != key for known_key in known):
        raise _changed(target, shown, known)
    if hosts.expected and shown not in hosts.expected:
        raise HostKeyError(
            f"{target.host}: its host key is {shown}, and --host-key names another one. Nothing was sent. Read the "
            "fingerprint on the Mac itself: ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub"
        )
    if known:
        return
    if not hosts.expected and not await _is_confirmed(target, key, prompts):
        raise HostKeyError(
            f"{target.host}: its host key {shown} is unknown and was not confirmed. Compare it with the one on the Mac "
            f"(ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub); if they are equal, add: --host-key {shown}"
        )
    hosts.add(target, key)


async def _is_confirmed(
    target: RemoteTarget, key: asyncssh.SSHKey, prompts: Prompts | None
) -> bool:
    if prompts is None:
        return False
    return await prompts.confirm(
        f"The host key of {target.host} is not known: {key.get_algorithm()} {key.get_fingerprint()}\n"
        "The Mac itself shows it with: ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub\nIs it the same?"
    )


def _changed(target: RemoteTarget, shown: str, known: Sequence[KnownKey]) -> HostKeyError:
    lines = [f"  {key.file}:{key.line}  {key.key.get_fingerprint()}" for key in known]
    return HostKeyError(
        f"{target.host} has changed its host key. Another machine may have taken its address; nothing was sent.\n"
        f"  now  {shown}\nknown:\n" + "\n".join(lines) + "\n"
        f"If macOS was installed anew there, compare the new key on the Mac (ssh-keygen -lf "
        f"/etc/ssh/ssh_host_ed25519_key.pub), and remove line {known[0].line} of {known[0].file}"
    )


def _public_text(key: asyncssh.SSHKey) -> str:
    """Return type and key without its comment."""
    return " ".join(key.export_public_key().decode().split()[:2])


def _entries(file: Path, target: RemoteTarget) -> list[KnownKey]:
    try:
        with file.open("rb") as stream:
            text = stream.read(_MAX_FILE_BYTES).decode(errors="replace")
    except OSError:
        return []
    known_keys = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            hosts = asyncssh.import_known_hosts(line)
            port = None if target.port == 22 else target.port
            keys, _, revoked, *_ = hosts.match(target.host, "", port)
        except ValueError:
            continue
        for is_revoked, some in ((False, keys), (True, revoked)):
            known_keys += [
                KnownKey(file=file, line=number, key=key, is_revoked=is_revoked) for key in some
            ]
    return known_keys
