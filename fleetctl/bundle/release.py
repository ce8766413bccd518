"""The release in an archive of `fleetctl bundle create`, read without unpacking it."""

import hashlib
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fleetctl.cli.errors import FleetctlError

_MAX_PART_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """An archive, and what its release.txt says."""

    archive: Path
    folder: str
    """The archive's only folder."""
    version: str
    platform: str
    """macos-arm64, linux-x86_64, or any: the machine downloads its packages."""
    listing_hash: str
    """SHA-256 of SHA256SUMS: install.sh marks a complete version with it."""

    @property
    def needed_bytes(self) -> int:
        """The space that the archive, the unpacked files and the installed packages take."""
        size = self.archive.stat().st_size
        return size * 6 if self.platform != "any" else size * 2 + (2 << 30)


def read_release(path: Path) -> Release:
    """Return the release in an archive.

    Raises:
        FleetctlError: it is not an archive of `fleetctl bundle create`.

    """
    try:
        with tarfile.open(path, "r:") as archive:
            parts = {
                member.name: _read(archive, member)
                for member in archive
                if member.name.count("/") == 1
                and member.name.endswith(("/release.txt", "/SHA256SUMS"))
            }
    except (OSError, tarfile.TarError) as error:
        raise FleetctlError(f"{path} cannot be read: {error}") from error
    folders = {name.partition("/")[0] for name in parts}
    if len(parts) != 2 or len(folders) != 1:
        raise FleetctlError(
            f"{path} is not an archive of mlx-fleet; create one with `fleetctl bundle create`"
        )
    folder = folders.pop()
    pairs = [line.partition("=") for line in parts[f"{folder}/release.txt"].decode().splitlines()]
    fields = {name: value for name, _, value in pairs}
    return Release(
        archive=path,
        folder=folder,
        version=fields.get("version", ""),
        platform=fields.get("platform", ""),
        listing_hash=hashlib.sha256(parts[f"{folder}/SHA256SUMS"]).hexdigest(),
    )


def _read(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = archive.extractfile(member)
    if file is None or member.size > _MAX_PART_BYTES:
        raise tarfile.TarError(f"{member.name} is not a small file")
    return file.read()
