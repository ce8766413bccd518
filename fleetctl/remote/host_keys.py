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

_SHOW_KEY: Final = "ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub"


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownHosts:
    """Files with host keys, and keys that the command line vouches for."""

    own: Path
    """The fleet's file, to which confirmed keys are added."""
    others: tuple[Path, ...] = ()
    expected: frozenset[str] = field(default=frozenset())
    """Fingerprints of --host-key, such as SHA256:..."""

    def read(self, target: RemoteTarget) -> "list[HostEntry]":
        """Return the keys of a host in each file that exists.

        Raises:
            HostKeyError: a file is no known_hosts file.

        """
        port = None if target.has_default_port else target.port
        entries = []
        for file in (self.own, *self.others):
            try:
                hosts = asyncssh.read_known_hosts(str(file))
            except OSError:
                continue
            except ValueError as error:
                raise HostKeyError(f"{file}: {error}. Mend or remove that line") from error
            keys, _, revoked, *_ = hosts.match(target.host, "", port)
            entries.append(HostEntry(file, keys, revoked))
        return entries

    def add(self, target: RemoteTarget, key: asyncssh.SSHKey) -> None:
        """Remember a key that a person has confirmed."""
        self.own.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        with os.fdopen(os.open(self.own, flags, 0o600), "w") as file:
            words = key.export_public_key().decode().split()[:2]  # without its comment
            file.write(" ".join([target.known_hosts_name, *words]) + "\n")


@dataclass(frozen=True, slots=True)
class HostEntry:
    """Keys of a host in one file."""

    file: Path
    keys: Sequence[asyncssh.SSHKey]
    revoked: Sequence[asyncssh.SSHKey]


def user_known_hosts(home: Path, expected: Sequence[str] = ()) -> KnownHosts:
    """Return the files of a user.

    Raises:
        HostKeyError: an expected fingerprint is none.

    """
    for fingerprint in expected:
        if not fingerprint.startswith("SHA256:"):
            raise HostKeyError(
                f"--host-key {fingerprint}: expected a fingerprint such as SHA256:jTcE..., which the Mac itself shows with: "
                f"{_SHOW_KEY}"
            )
    ssh = home / ".ssh"
    return KnownHosts(
        own=ssh / "known_hosts.mlx-fleet",
        others=(ssh / "known_hosts", Path("/etc/ssh/ssh_known_hosts")),
        # Some tools print base64's padding.
        expected=frozenset(fingerprint.rstrip("=") for fingerprint in expected),
    )


def algorithms(target: RemoteTarget, hosts: KnownHosts) -> list[str]:
    """Return the algorithms of known keys, so that a server with several keys shows one that can be compared."""
    keys = [key for entry in hosts.read(target) for key in (*entry.keys, *entry.revoked)]
    names = [name.decode() for key in keys for name in key.sig_algorithms]
    return list(dict.fromkeys(names))


async def check(
    target: RemoteTarget, key: asyncssh.SSHKey, hosts: KnownHosts, prompts: Prompts | None
) -> None:
    """Accept the host key that a Mac has shown, or refuse it.

    Raises:
        HostKeyError: it is changed, revoked, another one than expected, or unknown and not confirmed.

    """
    entries = hosts.read(target)
    shown = key.get_fingerprint()
    for entry in entries:
        if key in entry.revoked:
            raise HostKeyError(
                f"{target.host}: its host key {shown} is revoked by {entry.file}. Nothing was sent"
            )
    known = [entry for entry in entries if entry.keys]
    if known and all(key not in entry.keys for entry in known):
        lines = [f"  {e.file}  {old.get_fingerprint()}" for e in known for old in e.keys]
        raise HostKeyError(
            f"{target.host} has changed its host key. Another machine may have taken its address; nothing was sent.\n"
            f"  now  {shown}\nknown:\n" + "\n".join(lines) + "\n"
            f"If macOS was installed anew there, compare the new key on the Mac ({_SHOW_KEY}), and remove the old one: "
            f"ssh-keygen -R '{target.known_hosts_name}' -f {known[0].file}"
        )
    if hosts.expected and shown not in hosts.expected:
        raise HostKeyError(
            f"{target.host}: its host key is {shown}, and --host-key names another one. Nothing was sent. Read the "
            f"fingerprint on the Mac itself: {_SHOW_KEY}"
        )
    if known:
        return
    question = (
        f"The host key of {target.host} is not known: {key.get_algorithm()} {shown}\n"
        f"The Mac itself shows it with: {_SHOW_KEY}\nIs it the same?"
    )
    if not (hosts.expected or (prompts is not None and await prompts.confirm(question))):
        raise HostKeyError(
            f"{target.host}: its host key {shown} is unknown and was not confirmed. Compare it with the one on the Mac "
            f"({_SHOW_KEY}); if they are equal, add: --host-key {shown}"
        )
    hosts.add(target, key)
