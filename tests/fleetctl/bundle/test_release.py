"""Tests of reading the release in an archive."""

import hashlib
import io
import tarfile
from pathlib import Path

import pytest

from fleetctl.bundle.release import Release, read_release
from fleetctl.cli.errors import FleetctlError


def write(path: Path, files: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w") as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return path


def test_an_archive_says_what_it_installs(tmp_path: Path) -> None:
    listing = b"00  release.txt\n"
    path = write(
        tmp_path / "mlx.tar",
        {
            "mlx-fleet-1.2.3/install.sh": b"#!/bin/sh\n",
            "mlx-fleet-1.2.3/release.txt": b"version=1.2.3\nplatform=macos-arm64\npython=3.11\n",
            "mlx-fleet-1.2.3/SHA256SUMS": listing,
            "mlx-fleet-1.2.3/wheels/release.txt": b"version=9\n",
        },
    )
    assert read_release(path) == Release(
        archive=path,
        folder="mlx-fleet-1.2.3",
        version="1.2.3",
        platform="macos-arm64",
        listing_hash=hashlib.sha256(listing).hexdigest(),
    )


@pytest.mark.parametrize(
    "files",
    [{}, {"a/release.txt": b""}, {"a/release.txt": b"", "b/SHA256SUMS": b""}],
)
def test_another_archive_is_refused(tmp_path: Path, files: dict[str, bytes]) -> None:
    path = write(tmp_path / "other.tar", files)
    with pytest.raises(FleetctlError, match="fleetctl bundle create"):
        read_release(path)


def test_a_file_that_is_no_archive_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mlx.tar"
    path.write_bytes(b"x" * 3000)
    with pytest.raises(FleetctlError, match="cannot be read"):
        read_release(path)
