"""The archive that `fleetctl bundle create` writes: our wheel, an install script, and for offline machines all they need.

Everything comes from the wheel: its lock files say which packages belong to it. pip downloads them by hash.
"""

import hashlib
import importlib.util
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from packaging.utils import InvalidWheelFilename, parse_wheel_filename

from fleetctl.bundle.etcd_programs import pack_etcd
from fleetctl.bundle.lock import Pin, Platform, read_pins, render_lock
from fleetctl.cli.errors import FleetctlError
from machinery.environment import environment_without_secrets

_PARTS: Final = "fleetctl/bundle/"
# 74 wheels for a Mac are 300 MB; a slow line gets half an hour.
_DOWNLOAD_LIMIT_S: Final = 1800.0
# Lock files and the script are 300 KB; uv is 60 MB.
_MAX_PART_BYTES: Final = 10_000_000
_MAX_UV_BYTES: Final = 300_000_000

INSTALL = "install.sh"
LISTING = "SHA256SUMS"


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleContents:
    """Contents of an archive. Without a platform it has neither packages nor uv; the machine downloads them."""

    wheel: Path
    platform: Platform | None
    python: str
    python_archive: Path | None = None
    etcd_archive: Path | None = None
    """A release of etcd for the platform."""

    @property
    def version(self) -> str:
        """The version that the wheel's name says.

        Raises:
            FleetctlError: it is not a wheel of mlx-fleet.

        """
        try:
            name, version, _, _ = parse_wheel_filename(self.wheel.name)
        except InvalidWheelFilename as error:
            raise FleetctlError(f"{self.wheel} is not a wheel: {error}") from error
        if name != "mlx-fleet":
            raise FleetctlError(f"{self.wheel} is a wheel of {name}; expected one of mlx-fleet")
        return str(version)

    @property
    def folder_name(self) -> str:
        """The name of the archive's only folder."""
        platform = f"-{self.platform.name}" if self.platform is not None else ""
        return f"mlx-fleet-{self.version}{platform}"


def fill(contents: BundleContents, folder: Path, report: Callable[[str], None]) -> None:
    """Put all files of the archive into the empty folder.

    Raises:
        FleetctlError: the wheel is not one of `make dist`, or a package cannot be had.
        OSError: a file cannot be read or written.

    """
    wheels = folder / "wheels"
    wheels.mkdir()
    with zipfile.ZipFile(contents.wheel) as archive:
        parts = {
            name: _read_part(archive, name, contents.wheel)
            for name in (INSTALL, "requirements.txt", "requirements-build.txt")
        }
        commit = _read_commit(archive)
    lock = parts["requirements.txt"].decode()
    if contents.platform is not None:
        _fill_offline(contents, contents.platform, parts, folder, report)
        lock = render_lock(pins_of(wheels))
    shutil.copyfile(contents.wheel, wheels / contents.wheel.name)
    ours = render_lock([_pin_of([contents.wheel])])
    (folder / "requirements.txt").write_text(lock + ours, encoding="utf-8")
    (folder / INSTALL).write_bytes(parts[INSTALL])
    if contents.python_archive is not None:
        shutil.copyfile(contents.python_archive, folder / "python.tar.gz")
    platform = contents.platform.name if contents.platform is not None else "any"
    fields = {"version": contents.version, "commit": commit, "platform": platform}
    if contents.etcd_archive is not None:
        assert contents.platform is not None, "an etcd is for one platform"
        fields["etcd"] = pack_etcd(contents.etcd_archive, contents.platform, folder / "etcd.tar.gz")
    lines = [f"{name}={value}\n" for name, value in (fields | {"python": contents.python}).items()]
    (folder / "release.txt").write_text("".join(lines), encoding="utf-8")
    (folder / LISTING).write_text(_listing(folder), encoding="utf-8")


def _fill_offline(
    contents: BundleContents,
    platform: Platform,
    parts: dict[str, bytes],
    folder: Path,
    report: Callable[[str], None],
) -> None:
    """Download uv and the packages that the platform needs."""
    source = f"requirements.txt of {contents.wheel.name}"
    pins = read_pins(parts["requirements.txt"].decode(), source=source)
    tools = read_pins(parts["requirements-build.txt"].decode(), source=f"-build, {source}")
    needed = [pin for pin in pins if platform.needs(pin, contents.python)]
    report(f"downloading {len(needed)} packages for {platform.name}, Python {contents.python}")
    download_packages(needed, platform, contents.python, folder / "wheels")
    report("downloading uv")
    tool_folder = folder / "bin"
    tool_folder.mkdir()
    uv = [pin for pin in tools if pin.name == "uv"]
    download_packages(uv, platform, contents.python, tool_folder)
    for wheel in list(tool_folder.glob("*.whl")):
        target = tool_folder / "uv"
        with zipfile.ZipFile(wheel) as archive:
            infos = [
                info for info in archive.infolist() if info.filename.endswith(".data/scripts/uv")
            ]
            if len(infos) != 1 or infos[0].file_size > _MAX_UV_BYTES:
                raise FleetctlError(
                    f"{wheel.name} does not contain the program uv where wheels have programs"
                )
            target.write_bytes(archive.read(infos[0]))
            target.chmod(0o755)
        wheel.unlink()
    if not (tool_folder / "uv").is_file():
        raise FleetctlError(f"requirements-build.txt of {contents.wheel.name} does not name uv")


def write_tar(folder: Path, name: str, out: BinaryIO) -> None:
    """Write the folder as a tar archive with one folder; the same files give the same bytes."""
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            relative = path.relative_to(folder)
            entry = tarfile.TarInfo(f"{name}/{relative.as_posix()}")
            entry.size = path.stat().st_size
            entry.mode = 0o755 if relative.name in (INSTALL, "uv") else 0o644
            with path.open("rb") as file:
                archive.addfile(entry, file)


def _read_part(archive: zipfile.ZipFile, name: str, wheel: Path) -> bytes:
    try:
        info = archive.getinfo(_PARTS + name)
    except KeyError as error:
        raise FleetctlError(
            f"{wheel} lacks {_PARTS}{name}: it was not built by `make dist`. Build it with `make dist`"
        ) from error
    if info.file_size > _MAX_PART_BYTES:
        raise FleetctlError(f"{wheel}: {info.filename} has {info.file_size} bytes; too large")
    return archive.read(info)


def _read_commit(archive: zipfile.ZipFile) -> str:
    try:
        return archive.read("machinery/commit.txt").decode().strip()[:64]
    except KeyError:
        return ""


def download_packages(pins: Sequence[Pin], platform: Platform, python: str, folder: Path) -> None:
    """Download the wheels of the packages, and all builds for newer systems; pip compares their hashes with the pins'.

    Raises:
        FleetctlError: a package cannot be had, or has another hash.

    """
    _download(pins, platform.tags, python, folder)
    for tag in dict.fromkeys(tag for tags in platform.builds.values() for tag in tags):
        builds = [pin for pin in pins if tag in platform.builds.get(pin.name, ())]
        if builds:
            _download(builds, (tag,), python, folder)


def _download(pins: Sequence[Pin], tags: Sequence[str], python: str, folder: Path) -> None:
    lock = folder / "lock.txt"
    lock.write_text(render_lock(pins), encoding="utf-8")
    command = [*_pip_command(), "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary", ":all:", "--require-hashes", "--dest", str(folder)]
    command += ["--python-version", python, "--implementation", "cp"]
    for tag in tags:
        command += ["--platform", tag]
    command += ["--requirement", str(lock)]
    try:
        done = subprocess.run(
            command,
            env=environment_without_secrets("PYTHONPATH"),
            capture_output=True,
            text=True,
            timeout=_DOWNLOAD_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise FleetctlError(
            f"the packages did not arrive within {_DOWNLOAD_LIMIT_S:.0f} s; try again, pip keeps what it has"
        ) from error
    lock.unlink()
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if "ERROR" in line]
        raise FleetctlError(
            f"pip could not download the packages for {tags[0]}: {' '.join(lines[-2:]) or 'no output'}"
        )


def _pip_command() -> list[str]:
    """Return the command of pip: uv runs it where this environment has none.

    Raises:
        FleetctlError: neither is here.

    """
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    beside = Path(sys.executable).with_name("uv")
    uv = str(beside) if beside.is_file() else shutil.which("uv")
    if uv is None:
        raise FleetctlError(
            "downloading packages needs pip or uv; install uv: `brew install uv` or `pip install uv`"
        )
    return [uv, "tool", "run", "--quiet", "pip"]


def pins_of(folder: Path) -> Iterable[Pin]:
    """Return a pin for each package, with the hashes of all its wheels."""
    wheels: dict[str, list[Path]] = {}
    for wheel in sorted(folder.glob("*.whl")):
        wheels.setdefault(parse_wheel_filename(wheel.name)[0], []).append(wheel)
    return [_pin_of(wheels[name]) for name in sorted(wheels)]


def _pin_of(wheels: Sequence[Path]) -> Pin:
    """Return the pin of exactly these files of one package."""
    name, version, _, _ = parse_wheel_filename(wheels[0].name)
    hashes = tuple(f"sha256:{_sha256(wheel)}" for wheel in wheels)
    return Pin(name=name, version=str(version), marker="", hashes=hashes)


def _listing(folder: Path) -> str:
    """Return the SHA-256 of each file, as sha256sum prints it."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return "".join(
        f"{_sha256(path)}  {path.relative_to(folder).as_posix()}\n"
        for path in files
        if path.name != LISTING
    )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
