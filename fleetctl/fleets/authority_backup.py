"""The keys of the fleet's authority in a backup: their flags, and the passphrase that encrypts them."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from fleetctl.cli.errors import FleetctlError
from machinery import process_secrets

Command = Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class SealedAuthority:
    """The encrypted keys."""

    text: str
    new_passphrase: str
    """The passphrase if it was made for this backup, to be shown once; else ""."""


def authority_options(command: Command) -> Command:
    """Add --authority-dir and --passphrase-file."""
    folder = click.option(
        "--authority-dir",
        type=click.Path(file_okay=False, path_type=Path),
        envvar="FLEET_AUTHORITY_DIR",
        help="Folder of the authority: ca.pem, ca.key.",
    )
    passphrase = click.option(
        "--passphrase-file",
        type=click.Path(dir_okay=False, path_type=Path),
        help="File with the passphrase of the authority in the backup (mode 0600).",
    )
    return folder(passphrase(command))


def seal_authority(folder: Path, passphrase_file: Path | None) -> SealedAuthority:
    """Return the authority in the folder, encrypted with the file's passphrase or with a new one."""
    # cryptography takes 60 ms to import, and most backups do without.
    from identity.authority import AuthorityError  # noqa: PLC0415 - see above
    from identity.authority_folder import AuthorityFolder  # noqa: PLC0415 - see above
    from identity.sealed_authority import new_passphrase, seal  # noqa: PLC0415 - see above

    made = "" if passphrase_file is not None else new_passphrase()
    passphrase = made if passphrase_file is None else _read(passphrase_file)
    try:
        text = seal(AuthorityFolder(folder.expanduser().absolute()), passphrase)
    except AuthorityError as error:
        raise FleetctlError(str(error)) from error
    return SealedAuthority(text=text, new_passphrase=made)


def unseal_authority(text: str, folder: Path, passphrase_file: Path | None) -> None:
    """Write the authority in a backup to the folder."""
    from identity.authority import AuthorityError  # noqa: PLC0415 - see above
    from identity.authority_folder import AuthorityFolder  # noqa: PLC0415 - see above
    from identity.sealed_authority import unseal  # noqa: PLC0415 - see above

    try:
        unseal(text, _asked(passphrase_file), AuthorityFolder(folder.expanduser().absolute()))
    except AuthorityError as error:
        raise FleetctlError(str(error)) from error


def _asked(passphrase_file: Path | None) -> str:
    if passphrase_file is not None:
        return _read(passphrase_file)
    if not sys.stdin.isatty():
        raise click.UsageError(
            "the backup's authority needs its passphrase: give --passphrase-file FILE"
        )
    return str(click.prompt("Passphrase of the authority", hide_input=True, err=True))


def _read(path: Path) -> str:
    try:
        return process_secrets.read_secret_file(path).decode().strip()
    except process_secrets.OpenSecretError as error:
        raise FleetctlError(str(error)) from error
    except (OSError, UnicodeDecodeError) as error:
        raise FleetctlError(f"{path} cannot be read: {error}") from error
