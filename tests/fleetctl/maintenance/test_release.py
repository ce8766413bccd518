"""Releases to upgrade to: archives of `fleetctl bundle create`, and versions that are installed."""

import io
import tarfile
import zipfile
from pathlib import Path

import pytest

from fleetctl.cli.errors import FleetctlError
from fleetctl.maintenance.release import find_release, parse_stored
from store import versions

_STORED = "VERSIONS = {'Node': 2}\n"


def archive(path: Path, files: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w") as out:
        for name, content in files.items():
            entry = tarfile.TarInfo(f"mlx-fleet-0.2.0/{name}")
            entry.size = len(content)
            out.addfile(entry, io.BytesIO(content))
    return path


def wheel(code: str) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as out:
        out.writestr("store/versions.py", code)
    return content.getvalue()


def test_an_archive_names_its_version_its_mlx_lm_and_its_stored_versions(tmp_path: Path) -> None:
    files = {
        "SHA256SUMS": b"",
        "release.txt": b"version=0.2.0\nplatform=macos-arm64\n",
        "requirements.txt": b"mlx==0.32.4 \\\nmlx-lm==0.32.2 \\\n    --hash=sha256:00\n",
        "wheels/mlx_fleet-0.2.0-py3-none-any.whl": wheel(_STORED),
    }
    release = find_release(str(archive(tmp_path / "a.tar", files)))
    assert (release.version, release.mlx_lm, release.stored) == ("0.2.0", "0.32.2", {"Node": 2})
    files["wheels/mlx_fleet-0.2.0-py3-none-any.whl"] = wheel("raise SystemExit(1)")
    assert find_release(str(archive(tmp_path / "b.tar", files))).stored is None


@pytest.mark.parametrize(
    ("content", "refusal"),
    [
        (b"no tar at all", "cannot be read"),
        (None, "is not an archive of mlx-fleet; create one with `fleetctl bundle create`"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: bytes | None, refusal: str) -> None:
    path = tmp_path / "x.tar"
    if content is None:
        archive(path, {"README": b""})
    else:
        path.write_bytes(content)
    with pytest.raises(FleetctlError, match=refusal):
        find_release(str(path))


@pytest.mark.parametrize("to", ["nowhere/x.tar", "x.tar", "0.1.0; rm -rf /", "-x"])
def test_what_is_no_version_is_refused(to: str) -> None:
    with pytest.raises(FleetctlError, match="there is no such file, and it is no version"):
        find_release(to)


def test_the_stored_versions_of_this_release_are_read_from_its_own_module(tmp_path: Path) -> None:
    code = Path(versions.__file__).read_text()
    files = {
        "SHA256SUMS": b"",
        "release.txt": b"version=1",
        "wheels/mlx_fleet-1-py3-none-any.whl": wheel(code),
    }
    release = find_release(str(archive(tmp_path / "a.tar", files)))
    assert release.stored == dict(versions.VERSIONS)


def test_an_installed_version_is_taken_by_its_name() -> None:
    assert find_release("0.1.0").archive is None


@pytest.mark.parametrize("text", ["", "[]", '{"Node": "2"}', "Traceback"])
def test_other_output_is_no_stored_versions(text: str) -> None:
    assert parse_stored(text) is None
