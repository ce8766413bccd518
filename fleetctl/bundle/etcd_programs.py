"""The etcd of an archive: the programs of a release of the etcd project, checked and packed anew."""

import gzip
import io
import re
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Final

from fleetctl.bundle.lock import Platform
from fleetctl.cli.errors import FleetctlError
from machinery.mach_o import read_mach_o
from store.etcd.member.binary import is_sound, parse_version_number, unsafe_users

# A release has one folder, as etcd-v3.6.5-darwin-arm64, with the programs and some documentation.
_MEMBER: Final = re.compile(r"etcd-v(\d+\.\d+\.\d+)-([a-z0-9-]+)/(etcd|etcdctl|etcdutl)", re.ASCII)
# Those of 3.6 have 30 MB.
_MAX_PROGRAM_BYTES: Final = 200_000_000


def pack_etcd(source: Path, platform: Platform, target: Path) -> str:
    """Write the programs of a release of etcd (.zip or .tar.gz) into a .tar.gz, and return their version.

    The same release gives the same bytes.

    Raises:
        FleetctlError: the file is not a release for this platform, or one that loses writes or has a known vulnerability.
        OSError: a file cannot be read or written.

    """
    programs: dict[str, bytes] = {}
    labels = set()
    try:
        for name, size, read in _members(source):
            match = _MEMBER.fullmatch(name)
            if match is None:
                continue
            if size > _MAX_PROGRAM_BYTES:
                raise FleetctlError(f"{source}: {name} has {size} bytes; too large")
            labels.add((match[1], match[2]))
            programs[match[3]] = read()
    except (zipfile.BadZipFile, tarfile.TarError, zlib.error, EOFError) as error:
        raise FleetctlError(f"{source} cannot be read: {error}") from error
    if "etcd" not in programs or len(labels) != 1:
        raise FleetctlError(
            f"{source} is not a release of etcd: it has no program etcd-vVERSION-{platform.etcd}/etcd. Get one from "
            "https://github.com/etcd-io/etcd/releases"
        )
    version, system = labels.pop()
    if system != platform.etcd or not _is_for(platform, programs["etcd"]):
        raise FleetctlError(
            f"{source} is etcd for {system}, and {platform.name} needs {platform.etcd}"
        )
    number = parse_version_number(version)
    assert number is not None
    if not is_sound(number) or unsafe_users(number):
        raise FleetctlError(
            f"{source} is etcd {version}, which can lose writes or has a known vulnerability; take 3.5.9 or newer"
        )
    with (
        target.open("wb") as file,
        gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0) as compressed,
        tarfile.open(fileobj=compressed, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for name, program in sorted(programs.items()):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(program), 0o755
            archive.addfile(entry, io.BytesIO(program))
    return version


def _members(path: Path) -> Iterator[tuple[str, int, Callable[[], bytes]]]:
    """Yield name, size and reader of each file of an archive."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            for info in archive.infolist():
                yield info.filename, info.file_size, partial(archive.read, info)
        return
    with tarfile.open(path, "r:gz") as tar:
        for member in tar:
            stream = tar.extractfile(member) if member.isreg() else None
            if stream is not None:
                yield member.name, member.size, stream.read


def _is_for(platform: Platform, program: bytes) -> bool:
    """Return whether a program runs on the platform, by its first bytes."""
    if platform.markers["sys_platform"] != "darwin":
        return program.startswith(b"\x7fELF")
    try:
        return read_mach_o(io.BytesIO(program)).is_arm64
    except ValueError:
        return False
