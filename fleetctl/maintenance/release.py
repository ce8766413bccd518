"""A release to upgrade to: an archive of `fleetctl bundle create`, or a version that is installed on the Macs."""

import json
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fleetctl.bundle.release import read_release
from fleetctl.cli.errors import FleetctlError

_VERSION: Final = re.compile(r"[0-9A-Za-z][0-9A-Za-z.+_-]{0,63}")
_MAX_TEXT: Final = 4 << 20
_MAX_WHEEL: Final = 256 << 20
_MAX_MEMBERS: Final = 10_000
_READ_S: Final = 20.0
STORED_VERSIONS: Final = (
    "import json\nfrom store.versions import VERSIONS\nprint(json.dumps(dict(VERSIONS)))\n"
)
"""A program that prints the stored versions of the release whose Python runs it."""
# The module needs no other one of ours; packages in an archive would need the rest of the release.
_OF_WHEEL: Final = (
    "import json, sys, zipfile\n"
    "names = {'__name__': '__main__'}\n"
    "exec(zipfile.ZipFile(sys.argv[1]).read('store/versions.py'), names)\n"
    "print(json.dumps(dict(names['VERSIONS'])))\n"
)

StoredVersions = Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetRelease:
    """A release, and what it changes."""

    version: str
    archive: Path | None = None
    """None if it is installed on the Macs already."""
    mlx_lm: str = ""
    """The version of mlx-lm that it brings; "" if unknown."""
    stored: StoredVersions | None = None
    """Stored versions of documents beyond 1; None if unknown."""


def find_release(to: str) -> TargetRelease:
    """Return the release of --to: a file is an archive, everything else a version.

    Raises:
        FleetctlError: it is neither.

    """
    path = Path(to).expanduser()
    if path.is_file():
        return read_archive(path)
    if "/" in to or to.endswith((".tar", ".gz", ".tgz")) or not _VERSION.fullmatch(to):
        raise FleetctlError(
            f"--to {to}: there is no such file, and it is no version. Give an archive of `fleetctl bundle create`, or a "
            "version that is installed on the Macs, such as 0.1.0"
        )
    return TargetRelease(version=to)


def read_archive(path: Path) -> TargetRelease:
    """Return the release in an archive.

    Raises:
        FleetctlError: it is not an archive of `fleetctl bundle create`.

    """
    version = read_release(path).version
    if not _VERSION.fullmatch(version):
        raise FleetctlError(f"{path}: its release.txt names no version; get the archive again")
    try:
        with tarfile.open(path, "r:") as archive, tempfile.TemporaryDirectory() as scratch:
            requirements, wheel = _read_parts(archive, Path(scratch))
            found = re.search(r"^mlx-lm==([0-9][^\s;\\]*)", requirements, re.MULTILINE)
            return TargetRelease(
                version=version,
                archive=path.absolute(),
                mlx_lm=found[1] if found else "",
                stored=_stored_of_wheel(wheel),
            )
    except (tarfile.TarError, OSError, EOFError) as error:
        raise FleetctlError(f"{path} cannot be read: {error}") from error


def _read_parts(archive: tarfile.TarFile, scratch: Path) -> tuple[str, str]:
    """Return the lock file, and the path of a copy of the wheel of mlx-fleet; "" for what is missing."""
    requirements = wheel = ""
    for number, member in enumerate(archive):
        name = member.name.partition("/")[2]
        if number >= _MAX_MEMBERS:
            raise tarfile.TarError(f"it has more than {_MAX_MEMBERS} files")
        stream = archive.extractfile(member) if member.isreg() else None
        if stream is None:
            continue
        if name == "requirements.txt" and member.size <= _MAX_TEXT:
            requirements = stream.read(_MAX_TEXT).decode(errors="replace")
        elif re.fullmatch(r"wheels/mlx_fleet-[^/]+\.whl", name) and member.size <= _MAX_WHEEL:
            copy = scratch / name.rpartition("/")[2]
            copy.write_bytes(stream.read(_MAX_WHEEL))
            wheel = str(copy)
    return requirements, wheel


def _stored_of_wheel(wheel: str) -> StoredVersions | None:
    """Return the stored versions that the code in a wheel knows, as its own Python would say."""
    if not wheel:
        return None
    # -S: no packages of this installation.
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _OF_WHEEL, wheel],
            capture_output=True,
            timeout=_READ_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return parse_stored(done.stdout.decode(errors="replace")) if done.returncode == 0 else None


def parse_stored(text: str) -> StoredVersions | None:
    """Return the stored versions that the program printed; None if it printed something else."""
    try:
        tree = json.loads(text)
    except ValueError:
        return None
    if not isinstance(tree, dict) or not all(type(one) is int for one in tree.values()):
        return None
    return {str(name): int(one) for name, one in tree.items()}


def changed_documents(old: StoredVersions | None, new: StoredVersions | None) -> list[str] | None:
    """Return the documents whose stored version differs, such as `Node (1 to 2)`; None if one side is unknown."""
    if old is None or new is None:
        return None
    names = sorted(old.keys() | new.keys())
    return [
        f"{name} ({old.get(name, 1)} to {new.get(name, 1)})"
        for name in names
        if old.get(name, 1) != new.get(name, 1)
    ]
