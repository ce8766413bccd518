"""`fleetctl bundle create`: what an archive contains, and which wheels it is made of."""

import hashlib
import tarfile
from pathlib import Path

import pytest

from fleetctl.bundle.lock import PLATFORMS, read_pins, render_lock
from fleetctl.cli.errors import FleetctlError
from tests.support.fleet import from_scratch
from tests.support.release_wheels import PLATFORM, PYTHON, Index, locked, write_wheel

ROOT = Path(__file__).parent.parent.parent.parent


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    """Return a package index with one dependency, and uv."""
    return Index.create(tmp_path / "index", monkeypatch)


async def create(wheel: Path, out: Path, *flags: str) -> str:
    """Run the command, and return its error."""
    words = ("--wheel", str(wheel), "--out", str(out), "--platform", PLATFORM.name)
    # A fork would have the settings of pip that were there when the first test began.
    code, _, error = await from_scratch(
        ("bundle", "create", *words, "--python-version", PYTHON, *flags), b""
    )
    assert (code == 0) == out.exists(), error
    return error.decode()


def contents(archive: Path) -> dict[str, bytes]:
    """Return the files of a tar archive."""
    with tarfile.open(archive) as tar:
        opened = {entry.name: tar.extractfile(entry) for entry in tar}
        return {name: file.read() for name, file in opened.items() if file is not None}


@pytest.mark.ci
async def test_an_archive_lists_the_hash_of_every_file(tmp_path: Path, index: Index) -> None:
    wheel = index.release(tmp_path / "dist", "1.0.0")
    path, other = tmp_path / "one.tar", tmp_path / "other.tar"
    await create(wheel, path)
    await create(wheel, other)
    assert path.read_bytes() == other.read_bytes()
    top = f"mlx-fleet-1.0.0-{PLATFORM.name}"
    found = {name.removeprefix(f"{top}/"): data for name, data in contents(path).items()}
    assert set(found) == {
        "SHA256SUMS",
        "bin/uv",
        "install.sh",
        "release.txt",
        "requirements.txt",
        "wheels/dependency-1.0-py3-none-any.whl",
        "wheels/mlx_fleet-1.0.0-py3-none-any.whl",
    }
    lines = (line.split("  ", 1) for line in found.pop("SHA256SUMS").decode().splitlines())
    listed = {name: digest for digest, name in lines}
    assert listed == {name: hashlib.sha256(data).hexdigest() for name, data in found.items()}
    pins = read_pins(found["requirements.txt"].decode(), source="the archive")
    assert [pin.requirement for pin in pins] == ["dependency==1.0", "mlx-fleet==1.0.0"]
    assert f"platform={PLATFORM.name}\n" in found["release.txt"].decode()


async def test_an_online_archive_has_our_wheel_only(tmp_path: Path, index: Index) -> None:
    out = tmp_path / "out.tar"
    await create(index.release(tmp_path / "dist", "1.0.0"), out, "--online")
    names = {name.partition("/")[2] for name in contents(out)}
    assert "wheels/mlx_fleet-1.0.0-py3-none-any.whl" in names
    assert not names & {"bin/uv", "wheels/dependency-1.0-py3-none-any.whl"}


async def test_a_package_with_another_hash_is_refused(tmp_path: Path, index: Index) -> None:
    wheel = index.release(tmp_path / "dist", "1.0.0")
    write_wheel(index.folder, "dependency-1.0", {"dependency.py": "ANSWER = 43\n"})
    refusal = await create(wheel, tmp_path / "out.tar")
    assert "pip could not download" in refusal
    assert "DO NOT MATCH THE HASHES" in refusal


async def test_a_wheel_of_another_build_is_refused(tmp_path: Path, index: Index) -> None:
    plain = write_wheel(tmp_path, "mlx_fleet-1.0.0", {})
    assert "was not built by `make dist`" in await create(plain, tmp_path / "out.tar")
    other = index.folder / "dependency-1.0-py3-none-any.whl"
    assert "expected one of mlx-fleet" in await create(other, tmp_path / "out.tar")


@pytest.mark.parametrize(
    ("platform", "expected"),
    [
        ("macos-arm64", {"mlx", "mlx-metal", "numpy"}),
        ("linux-x86_64", {"mlx", "mlx-cpu", "numpy"}),
    ],
)
def test_a_platform_needs_what_its_markers_say(platform: str, expected: set[str]) -> None:
    pins = read_pins((ROOT / "requirements.txt").read_text(), source="requirements.txt")
    for python, version in (("3.11", "2.4.6"), ("3.12", "2.5.5")):
        needed = [pin for pin in pins if PLATFORMS[platform].needs(pin, python)]
        assert expected == {pin.name for pin in needed} & {"mlx", "mlx-metal", "mlx-cpu", "numpy"}
        assert [pin.version for pin in needed if pin.name == "numpy"] == [version]
        assert "colorama" not in {pin.name for pin in needed}


def test_a_lock_file_can_be_read_again(tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path, "dependency-1.0", {})
    text = locked(wheel)
    assert render_lock(read_pins(text, source="lock")) == text


@pytest.mark.parametrize("line", ["numpy>=2", "numpy==2.0", "?", "numpy @ file:///tmp/numpy.whl"])
def test_lines_without_a_version_or_a_hash_are_refused(line: str) -> None:
    with pytest.raises(FleetctlError, match=r"^lock\.txt: "):
        read_pins(line + "\n", source="lock.txt")
