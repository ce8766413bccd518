"""Small real wheels: a release of mlx-fleet with one dependency, and a uv that runs the real one."""

import hashlib
import io
import shutil
import sys
import sysconfig
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

import fleetctl.bundle
from fleetctl.bundle import archive
from fleetctl.bundle.archive import BundleContents
from fleetctl.bundle.lock import PLATFORMS, Platform
from machinery.version import version

PLATFORM = PLATFORMS["macos-arm64" if sys.platform == "darwin" else "linux-x86_64"]
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
SCRIPT = Path(str(fleetctl.bundle.__file__)).parent / archive.INSTALL


def real_uv() -> Path:
    """Return the uv of this environment; skip the test where none is (`make setup` installs it)."""
    beside = Path(sys.executable).with_name("uv")
    found = str(beside) if beside.is_file() else shutil.which("uv")
    if found is None:
        pytest.skip("uv is neither in this environment nor on PATH")
    return Path(found).resolve()


def write_wheel(
    folder: Path, stem: str, files: dict[str, str], *, tag: str = "py3-none-any"
) -> Path:
    """Write a wheel of this name and version, such as `six-1.0`."""
    path = folder / f"{stem}-{tag}.whl"
    name, version = stem.split("-")
    info = f"{stem}.dist-info"
    files = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n",
    }
    record = f"{info}/RECORD"
    files[record] = "".join(f"{one},,\n" for one in [*files, record])
    with zipfile.ZipFile(path, "w") as wheel:
        for one, text in files.items():
            wheel.writestr(zipfile.ZipInfo(one), text)
    return path


def locked(*wheels: Path) -> str:
    """Return the lines of a lock file for the wheels of one package."""
    name, version = wheels[0].name.split("-")[:2]
    digests = sorted(hashlib.sha256(wheel.read_bytes()).hexdigest() for wheel in wheels)
    hashes = "".join(f" \\\n    --hash=sha256:{digest}" for digest in digests)
    return f"{name.replace('_', '-')}=={version}{hashes}\n"


# Beginnings of real programs: an ELF header, and the load commands of a library for arm64 Macs.
_MACH_O = Path(__file__).parents[1] / "machinery" / "mach_o" / "libmlx-0.32.4-macosx_15_0.head"
PROGRAMS = {"macos-arm64": _MACH_O.read_bytes(), "linux-x86_64": b"\x7fELF\2\1\1" + bytes(57)}


def write_etcd_release(
    path: Path, version: str, platform: Platform, *, program: bytes = b"", system: str = ""
) -> Path:
    """Write the archive of a release of etcd: a zip for macOS, as the project has them."""
    top = f"etcd-v{version}-{system or platform.etcd}"
    files = {f"{top}/{name}": program or PROGRAMS[platform.name] for name in ("etcd", "etcdctl")}
    files[f"{top}/README.md"] = b"etcd"
    if platform.name == "macos-arm64":
        with zipfile.ZipFile(path, "w") as archive:
            for name, data in files.items():
                archive.writestr(name, data)
        return path
    with tarfile.open(path, "w:gz") as tar:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    return path


@dataclass(frozen=True, slots=True)
class Index:
    """A folder of wheels that pip takes for the only source of packages."""

    folder: Path

    @classmethod
    def create(cls, folder: Path, patch: pytest.MonkeyPatch) -> "Index":
        """Make the folder, and pip's and uv's settings."""
        folder.mkdir()
        for tool in ("PIP", "UV"):
            patch.setenv(f"{tool}_NO_INDEX", "1")
            patch.setenv(f"{tool}_FIND_LINKS", str(folder))
        patch.setenv("PIP_CONFIG_FILE", "/dev/null")
        write_wheel(folder, "dependency-1.0", {"dependency.py": "ANSWER = 42\n"})
        for system in (14, 15, 26):
            tag = f"py3-none-macosx_{system}_0_arm64"
            write_wheel(folder, "mlx_metal-1.0", {"mlx/system.txt": f"{system}"}, tag=tag)
        runs_uv = f'#!/bin/sh\nexec "{real_uv()}" "$@"\n'
        write_wheel(folder, "uv-0.1", {"uv-0.1.data/scripts/uv": runs_uv})
        return cls(folder)

    def release(
        self, folder: Path, version: str, *, code: str = "", platform: Platform = PLATFORM
    ) -> Path:
        """Write a wheel of mlx-fleet as `make dist` does, whose fleetctl runs `code` and says its version."""
        program = f"""\
import dependency
def main():
    {code or "assert dependency.ANSWER == 42"}
    print("fleetctl: {version} (0123456789ab)")
"""
        folder.mkdir(exist_ok=True)
        stem = f"mlx_fleet-{version}"
        parts = {
            "small_fleetctl.py": program,
            f"{stem}.dist-info/entry_points.txt": "[console_scripts]\n"
            "fleetctl = small_fleetctl:main\nmlx-fleet = small_fleetctl:main\n",
            "machinery/commit.txt": "0123456789ab\n",
            **self._parts(platform),
        }
        return write_wheel(folder, stem, parts)

    def runnable(self, root: Path) -> Path:
        """Write the archive of a release whose programs run this checkout, in this environment; return its path."""
        stem = f"mlx_fleet-{version()}"
        programs = {"fleetctl": "fleetctl", "fleet-nodeagent": "nodeagent"}
        lines = "".join(f"{name} = {room}.__main__:main\n" for name, room in programs.items())
        paths = (Path(fleetctl.bundle.__file__).parents[2], Path(sysconfig.get_path("purelib")))
        parts = {
            "checkout.pth": "".join(f"{path}\n" for path in paths),
            f"{stem}.dist-info/entry_points.txt": f"[console_scripts]\n{lines}",
            **self._parts(PLATFORM),
        }
        (root / "dist").mkdir()
        wheel = write_wheel(root / "dist", stem, parts)
        contents = BundleContents(wheel=wheel, platform=PLATFORM, python=PYTHON)
        folder = root / "contents"
        folder.mkdir()
        archive.fill(contents, folder, lambda _: None)
        out = root / f"{contents.folder_name}.tar"
        with out.open("wb") as file:
            archive.write_tar(folder, contents.folder_name, file)
        return out

    def _parts(self, platform: Platform) -> dict[str, str]:
        """Return the files of a wheel from which archives are made."""
        lock = locked(self.folder / "dependency-1.0-py3-none-any.whl")
        if platform.name == "macos-arm64":
            lock += locked(*self.folder.glob("mlx_metal-*"))
        return {
            "fleetctl/bundle/install.sh": SCRIPT.read_text(),
            "fleetctl/bundle/requirements.txt": lock,
            "fleetctl/bundle/requirements-build.txt": locked(
                self.folder / "uv-0.1-py3-none-any.whl"
            ),
        }

    def unpacked(
        self,
        root: Path,
        version: str,
        *,
        code: str = "",
        platform: Platform = PLATFORM,
        **parts: Path,
    ) -> Path:
        """Return the folder of a release's archive; `parts` are archives of Python and etcd."""
        wheel = self.release(root / "dist", version, code=code, platform=platform)
        contents = BundleContents(wheel=wheel, platform=platform, python=PYTHON, **parts)
        folder = root / contents.folder_name
        folder.mkdir()
        archive.fill(contents, folder, lambda _: None)
        (folder / archive.INSTALL).chmod(0o755)
        (folder / "bin" / "uv").chmod(0o755)
        return folder
