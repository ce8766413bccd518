"""The command-line flags for identities and authorities, shared by the programs of the fleet."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import click

from identity.authority import AuthorityError
from identity.authority_folder import AuthorityFolder
from identity.credentials import Credentials, CredentialsError
from identity.folder import IdentityFolder
from identity.names import Role
from machinery.clock import Clock
from machinery.options import FOLDER, Option, options
from machinery.tls_client import Trust, TrustError, read_trust
from schemas.wire.identity_files import IdentityFiles, find_identity_files

identity_option: Final = options(
    "FLEET",
    Option(
        "--identity-dir",
        "Folder with the certificate, the key and the authorities of this process (mode 0700), for TLS.",
        type=FOLDER,
    ),
)
"""Adds --identity-dir; the command receives it as `identity_dir`, for `identity_folder`."""
authority_option: Final = options(
    "FLEET",
    Option(
        "--authority-dir",
        "Folder with the key of the fleet's authority (ca.pem, ca.key, root.env; mode 0700), to sign certificates.",
        type=FOLDER,
    ),
)
"""Adds --authority-dir; the command receives it as `authority_dir`, for `authority_folder`."""


def authority_folder(given: Path | None) -> AuthorityFolder | None:
    """Return the folder that the flag gives; None without it.

    Raises:
        click.UsageError: it holds no authority that can be used.

    """
    if given is None:
        return None
    folder = AuthorityFolder(given.expanduser().absolute())
    try:
        folder.load()
    except AuthorityError as error:
        raise click.UsageError(f"--authority-dir: {error}") from error
    return folder


def identity_folder(given: Path | None, default: Path | None = None) -> IdentityFolder | None:
    """Return the folder that the flag gives, or the default; None without both."""
    path = given or default
    return None if path is None else IdentityFolder(path.expanduser().absolute())


def read_identity(folder: IdentityFolder | None, role: Role, clock: Clock) -> Credentials | None:
    """Return the identity in the folder; None without a folder, or if nothing was issued to it yet.

    Raises:
        click.UsageError: its files cannot be used, or it is the identity of another part.

    """
    if folder is None or not folder.is_issued:
        return None
    try:
        credentials = Credentials(folder, clock)
    except CredentialsError as error:
        raise click.UsageError(f"--identity-dir: {error}") from error
    if credentials.identity.role is not role:
        raise click.UsageError(
            f"--identity-dir {folder.path}: it holds {credentials.identity.uri}; this program needs the identity of a {role}"
        )
    return credentials


def gateway_trust(options: Mapping[str, Any]) -> Trust:
    """Return the trust in gateways' certificates that --gateway-ca gives.

    Raises:
        click.UsageError: the file cannot be used.

    """
    authorities: Path | None = options["gateway_ca"]
    try:
        return read_trust(authorities and authorities.expanduser())
    except TrustError as error:
        raise click.UsageError(f"--gateway-ca: {error}") from error


def etcd_files(folder: IdentityFolder | None) -> IdentityFiles | None:
    """Return the files with which the process connects to etcd; None without an identity."""
    return find_identity_files(None if folder is None else folder.path)
