"""The etcd of an archive: which releases are taken, and which are refused."""

import tarfile
from pathlib import Path

import pytest

from fleetctl.bundle.etcd_programs import pack_etcd
from fleetctl.bundle.lock import PLATFORMS, Platform
from fleetctl.cli.errors import FleetctlError
from tests.support.release_wheels import PROGRAMS, write_etcd_release

MAC, LINUX = PLATFORMS["macos-arm64"], PLATFORMS["linux-x86_64"]


@pytest.mark.parametrize("platform", [MAC, LINUX], ids=lambda platform: platform.name)
def test_the_programs_of_a_release_are_packed(tmp_path: Path, platform: Platform) -> None:
    source = write_etcd_release(tmp_path / "release", "3.6.5", platform)
    packed, again = tmp_path / "etcd.tar.gz", tmp_path / "again.tar.gz"
    assert pack_etcd(source, platform, packed) == pack_etcd(source, platform, again) == "3.6.5"
    assert packed.read_bytes() == again.read_bytes()
    with tarfile.open(packed) as archive:
        assert [(member.name, member.mode) for member in archive] == [
            ("etcd", 0o755),
            ("etcdctl", 0o755),
        ]
        program = archive.extractfile("etcd")
        assert program is not None
        assert program.read() == PROGRAMS[platform.name]


@pytest.mark.parametrize(
    ("version", "system", "program", "words"),
    [
        ("3.5.1", "darwin-arm64", "macos-arm64", "can lose writes"),
        ("3.5.8", "darwin-arm64", "macos-arm64", "known vulnerability"),
        ("3.6.5", "darwin-amd64", "macos-arm64", "is etcd for darwin-amd64"),
        ("3.6.5", "darwin-arm64", "linux-x86_64", "macos-arm64 needs darwin-arm64"),
        ("three", "darwin-arm64", "macos-arm64", "is not a release of etcd"),
    ],
)
def test_other_releases_are_refused(
    tmp_path: Path, version: str, system: str, program: str, words: str
) -> None:
    data = PROGRAMS[program]
    source = write_etcd_release(tmp_path / "a.zip", version, MAC, program=data, system=system)
    with pytest.raises(FleetctlError, match=words):
        pack_etcd(source, MAC, tmp_path / "etcd.tar.gz")
    assert not (tmp_path / "etcd.tar.gz").exists()


@pytest.mark.parametrize("keep", [0, 40, -30])
@pytest.mark.parametrize("platform", [MAC, LINUX], ids=["zip", "tar"])
def test_half_of_a_download_is_refused(tmp_path: Path, platform: Platform, keep: int) -> None:
    source = write_etcd_release(tmp_path / "release", "3.6.5", platform)
    source.write_bytes(source.read_bytes()[:keep])
    with pytest.raises(FleetctlError, match=r"cannot be read|not a release"):
        pack_etcd(source, platform, tmp_path / "etcd.tar.gz")
