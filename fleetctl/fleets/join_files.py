"""The files of a machine that joins: its key before the request, and its identity after the answer.

The certificate is written last. A command that was killed before leaves a key without one, and the next one sends the
same key again: for the fleet that is the same use of the token.
"""

import fcntl
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Final

from fleetctl.cli.errors import FleetctlError
from identity.authority import (
    AuthorityError,
    identity_of,
    load_authorities,
    load_certificate,
    new_key,
    read_request,
    request_for,
    serial_text,
    spki_hash,
)
from identity.folder import FolderError, IdentityFolder
from identity.names import Identity, Role, parse_identity
from machinery import process_secrets
from machinery.files import make_private_folder, write_atomically
from schemas.trust import TrustSnapshot
from schemas.wire.join import JoinAnswer
from store.etcd.users import Credentials, render_credentials

_STORE: Final = "etcd.env"
_ENVIRONMENT: Final = "fleet.env"
_KEY: Final = "join.key"


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """The identity that a folder holds already."""

    identity: Identity
    not_after: datetime
    authority_hashes: tuple[bytes, ...]
    is_revoked: bool
    """True if the fleet has revoked it, as far as this machine has heard."""


@dataclass(frozen=True, slots=True)
class JoinFolder:
    """The folder of an identity, with the files of a join beside it."""

    identity: IdentityFolder

    @property
    def password(self) -> Path:
        """The file with the store's password."""
        return self.identity.path / _STORE

    @property
    def environment(self) -> Path:
        """The file with the variables of the process."""
        return self.identity.path / _ENVIRONMENT

    @property
    def key(self) -> Path:
        """The file with the key for which a certificate is asked."""
        return self.identity.path / _KEY

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Create the folder and lock it: one command joins at a time. Raises FleetctlError."""
        try:
            make_private_folder(self.identity.path)
            lock = (self.identity.path / ".join.lock").open("w")
        except OSError as error:
            raise FleetctlError(
                f"{self.identity.path} cannot be used: {error.strerror or error}. It needs to be yours alone (chmod 700), "
                "or give another folder with --identity-dir"
            ) from error
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise FleetctlError(
                    f"another `fleetctl join` uses {self.identity.path}; wait until it has finished"
                ) from error
            yield

    def membership(self) -> Membership | None:
        """Return the identity in the folder; None if there is none. Raises FleetctlError."""
        if not self.identity.is_issued:
            return None
        try:
            certificate = load_certificate(self.identity.certificate())
            known = load_authorities(self.identity.read_authorities())
            trust = self.identity.read_trust()
            return Membership(
                identity=identity_of(certificate),
                not_after=certificate.not_valid_after_utc,
                authority_hashes=tuple(spki_hash(one.public_key()) for one in known),
                is_revoked=trust is not None and serial_text(certificate) in trust.revoked,
            )
        except (FolderError, AuthorityError) as error:
            raise FleetctlError(
                f"{self.identity.path} holds an identity that cannot be used: {error}. Move the folder away, and join again"
            ) from error

    def load_key(self) -> tuple[bytes, bytes]:
        """Return the key and its request: of an interrupted join, or new ones, whose key is written. Raises FleetctlError."""
        try:
            key = process_secrets.read_secret_file(self.key)
            return key, request_for(key)
        except FileNotFoundError:
            pass
        except (OSError, AuthorityError) as error:
            raise FleetctlError(
                f"{self.key} cannot be used: {error}. Delete it, and a new key is made"
            ) from error
        key, request = new_key()
        self._write(self.key, key.decode())
        return key, request

    def read_variables(self) -> dict[str, str]:
        """Return the variables that an earlier join has written. Raises FleetctlError."""
        try:
            return read_variables(self.environment.read_text(encoding="utf-8"))
        except OSError as error:
            raise FleetctlError(
                f"{self.environment} cannot be read: {error.strerror}. Join again with --force"
            ) from error

    def write(
        self, key: bytes, answer: JoinAnswer, variables: Mapping[str, str], now: datetime
    ) -> None:
        """Write everything that the process needs, the certificate last. Raises FleetctlError."""
        folder = self.identity
        try:
            if answer.etcd_user:
                account = Credentials(user=answer.etcd_user, password=answer.etcd_password)
                text = render_credentials(account, "written by `fleetctl join`; keep it private")
                self._write(self.password, text)
            lines = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
            head = "# written by `fleetctl join`: for a shell, or systemd's EnvironmentFile"
            self._write(self.environment, "\n".join([head, *lines]) + "\n")
            folder.write_authorities(answer.authorities)
            folder.write_trust(TrustSnapshot(fleet=answer.fleet, mode=answer.mode, seen=now))
            folder.write_identity(key, answer.certificate)
        except FolderError as error:
            raise FleetctlError(str(error)) from error
        self.forget_key()

    def forget_key(self) -> None:
        """Delete the second copy of the key, which the identity holds now. Raises FleetctlError."""
        try:
            self.key.unlink(missing_ok=True)
        except OSError as error:
            raise FleetctlError(f"{self.key} cannot be deleted: {error.strerror}") from error

    def forget_used_key(self) -> None:
        """Delete the second copy of the identity's key, so that the next join makes a new one. Raises FleetctlError.

        The key of an interrupted join is another one, and stays: the use of its token is counted already.
        """
        if not self.key.exists():
            return
        used = load_certificate(self.identity.certificate()).public_key()
        if spki_hash(read_request(self.load_key()[1])) == spki_hash(used):
            self.forget_key()

    def _write(self, path: Path, content: str) -> None:
        try:
            make_private_folder(self.identity.path)
            write_atomically(path, content, mode=0o600)
        except OSError as error:
            raise FleetctlError(f"{path} cannot be written: {error.strerror or error}") from error


def known_authority(known: Membership, answer: JoinAnswer) -> bytes:
    """Return the hash of an authority in the answer that this machine trusts already. Raises FleetctlError: there is none."""
    try:
        shown = [
            spki_hash(authority.public_key()) for authority in load_authorities(answer.authorities)
        ]
    except AuthorityError as error:
        raise FleetctlError(f"the fleet's answer cannot be used: {error}") from error
    found = next((one for one in shown if one in known.authority_hashes), None)
    if found is None:
        raise FleetctlError(
            "the fleet's answer cannot be used: none of its authorities is known to this machine. Join with a token"
        )
    return found


def check_answer(answer: JoinAnswer, request: bytes, authority_hash: bytes) -> Identity:
    """Return the identity in the answer's certificate, which must be for our key and of the pinned authority.

    Raises:
        FleetctlError: it is not.

    """
    try:
        certificate = load_certificate(answer.certificate)
        identity = identity_of(certificate)
        ours = spki_hash(read_request(request))
        authorities = load_authorities(answer.authorities)
        pinned = [
            authority
            for authority in authorities
            if spki_hash(authority.public_key()) == authority_hash
        ]
        is_ours = bool(pinned) and spki_hash(certificate.public_key()) == ours
        if is_ours and identity == parse_identity(answer.identity):
            return identity
    except (AuthorityError, ValueError) as error:
        raise FleetctlError(f"the fleet's answer cannot be used: {error}") from error
    raise FleetctlError(
        "the fleet's answer cannot be used: its certificate is for another key or of another authority"
    )


def role_command(role: Role, variables: Mapping[str, str]) -> str:
    """Return the command that starts the process with its identity, or the one that makes fleetctl use it."""
    command = " ".join([_PROGRAMS[role], *map(shlex.quote, role_flags(role, variables))])
    return f"{command} && fleetctl config use-context {_CONTEXT}" if role is Role.ADMIN else command


def role_flags(role: Role, variables: Mapping[str, str]) -> list[str]:
    """Return the flags of the role's process that say the same as the variables."""
    flags = _FLAGS[role]
    return [
        word for name, value in variables.items() if name in flags for word in (flags[name], value)
    ]


def read_variables(text: str) -> dict[str, str]:
    """Return the variables in the file that `JoinFolder.environment` names."""
    pairs = [word.partition("=") for word in shlex.split(text, comments=True)]
    return {name: value for name, _, value in pairs}


_SHARED = {
    "FLEET_ETCD": "--etcd",
    "FLEET_ETCD_PREFIX": "--etcd-prefix",
    "FLEET_ETCD_PASSWORD_FILE": "--etcd-password-file",
    "FLEET_IDENTITY_DIR": "--identity-dir",
}
_NODE = {
    "FLEET_NODE_NAME": "--name",
    "FLEET_NODE_ADDRESS": "--address",
    "FLEET_STATE_DIR": "--state-dir",
}
_FLAGS: Final[Mapping[Role, Mapping[str, str]]] = {
    Role.NODE: {**_NODE, **_SHARED},
    Role.GATEWAY: _SHARED,
    Role.RECONCILER: _SHARED,
    Role.DASHBOARD: _SHARED,
    Role.ADMIN: _SHARED,
    Role.ETCD: {},
}
_CONTEXT: Final = "my-fleet"
_PROGRAMS: Final[Mapping[Role, str]] = {
    Role.NODE: "fleet-nodeagent",
    Role.GATEWAY: "fleet-gateway",
    Role.RECONCILER: "fleet-reconciler",
    Role.DASHBOARD: "fleet-dashboard",
    Role.ADMIN: f"fleetctl config set-context {_CONTEXT}",
    Role.ETCD: "etcd",
}
