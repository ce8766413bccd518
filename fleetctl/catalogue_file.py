"""The catalogue that commands use: that of the release, or a newer one that was installed beside the configuration file."""

import asyncio
import os
import tempfile
from importlib import resources
from pathlib import Path
from typing import Final

import aiohttp
import click
from yarl import URL

from fleetctl.cli.errors import FleetctlError
from fleetctl.cli.resolve import config_path
from machinery.files import write_atomically
from machinery.http_body import BodyTooLargeError, read_limited
from models.catalogue import catalogue
from models.catalogue.catalogue import MAX_CATALOGUE_BYTES, CatalogueError, CatalogueFile
from models.hub.connection import open_hub_session

NAMESPACE: Final = "mlx-fleet-catalogue"
"""Namespace of its signatures: one of a release is none of a catalogue."""
IDENTITY: Final = "catalogue@mlx-fleet"

_FILE: Final = "catalogue.json"
_MAX_SIGNATURE_BYTES: Final = 16 << 10
_FETCH_LIMIT_S, _VERIFY_LIMIT_S = 60.0, 10.0


def installed_path() -> Path:
    """Return the path of the installed catalogue of the running command."""
    return config_path(click.get_current_context(), may_be_new=True).with_name(_FILE)


def current_catalogue() -> CatalogueFile:
    """Return the newer one of the installed catalogue and that of the release; say on stderr why one is not read."""
    shipped, path = catalogue.shipped_catalogue(), installed_path()
    try:
        raw = read_file(path, MAX_CATALOGUE_BYTES)
        installed = catalogue.parse_catalogue(raw)
    except FileNotFoundError:
        return shipped
    except (OSError, CatalogueError) as error:
        click.echo(f"{path} is not read: {error}. The list of this release answers", err=True)
        return shipped
    return max(shipped, installed, key=lambda listed: listed.date)


def read_file(path: Path, limit_bytes: int) -> bytes:
    """Return the content of a file, and one byte more than the limit at most. Raises OSError."""
    with path.open("rb") as file:
        return file.read(limit_bytes + 1)


async def install(source: str, signers: Path | None) -> CatalogueFile:
    """Verify the catalogue of a path or URL with the signature at SOURCE.sig, and install it.

    Raises:
        FleetctlError: it cannot be read, its signature is wrong, it is malformed, or it is not newer.

    """
    raw = await _read(source, MAX_CATALOGUE_BYTES)
    if len(raw) > MAX_CATALOGUE_BYTES:
        raise FleetctlError(
            f"{source} has more than {MAX_CATALOGUE_BYTES} bytes: it is no catalogue"
        )
    await _verify(source, raw, await _read(f"{source}.sig", _MAX_SIGNATURE_BYTES), signers)
    try:
        listed = catalogue.parse_catalogue(raw)
    except CatalogueError as error:
        raise FleetctlError(f"{source} is no catalogue that this release reads: {error}") from error
    current = current_catalogue()
    if listed.date <= current.date:
        raise FleetctlError(
            f"{source} is of {listed.date}, and the list of {current.date} is in use: nothing was changed"
        )
    path = installed_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, raw.decode())
    return listed


async def _read(source: str, limit_bytes: int) -> bytes:
    if "://" not in source:
        try:
            return read_file(Path(source).expanduser(), limit_bytes)
        except OSError as error:
            raise FleetctlError(f"cannot read {source}: {error.strerror}") from error
    if URL(source).scheme != "https":
        raise FleetctlError(f"{source}: expected a path or an address that begins with https://")
    try:
        async with (
            asyncio.timeout(_FETCH_LIMIT_S),
            open_hub_session() as session,
            session.get(source) as response,
        ):
            if response.status != 200:
                raise FleetctlError(f"{source} answered {response.status}")
            return await read_limited(response.content.iter_any(), limit_bytes)
    except BodyTooLargeError as error:
        raise FleetctlError(f"{source} has more than {limit_bytes} bytes") from error
    except (aiohttp.ClientError, TimeoutError) as error:
        raise FleetctlError(f"cannot fetch {source}: {str(error) or 'it took too long'}") from error


async def _verify(source: str, raw: bytes, signature: bytes, signers: Path | None) -> None:
    """Compare the signature as OpenSSH does, with the keys of the release or of a file. Raises FleetctlError."""
    if signers is None:
        listed = resources.files("models.catalogue").joinpath("allowed_signers").read_text()
    else:
        listed = read_file(signers, _MAX_SIGNATURE_BYTES).decode(errors="replace")
    if not any(line.strip() and not line.startswith("#") for line in listed.splitlines()):
        raise FleetctlError(
            "this release has no key that signs catalogues; name yours with --allowed-signers FILE"
        )
    with tempfile.TemporaryDirectory() as folder:
        keys, signed = Path(folder, "signers"), Path(folder, "signature")
        keys.write_text(listed)
        signed.write_bytes(signature)
        command = (
            "ssh-keygen",
            "-Y",
            "verify",
            "-f",
            str(keys),
            "-I",
            IDENTITY,
            "-n",
            NAMESPACE,
            "-s",
            str(signed),
        )
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                env={"PATH": os.defpath},
            )
        except OSError as error:
            raise FleetctlError(f"ssh-keygen cannot be started: {error.strerror}") from error
        try:
            async with asyncio.timeout(_VERIFY_LIMIT_S):
                _, said = await process.communicate(raw)
        except TimeoutError as error:
            process.kill()
            raise FleetctlError(f"ssh-keygen took more than {_VERIFY_LIMIT_S:.0f} s") from error
    if process.returncode:
        lines = said.decode(errors="replace").split("\n")
        raise FleetctlError(
            f"{source} has no valid signature of {IDENTITY}: {lines[0] or 'ssh-keygen refused it'}. Nothing was changed"
        )
