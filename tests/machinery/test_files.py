"""Files are replaced in one step or not at all."""

import errno
import fcntl
import os
import stat
import subprocess
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from machinery.files import make_owner_folder, open_replacement, sync, write_atomically


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_made_with_its_folders_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "file"
    write_atomically(path, "grüße 日本")
    assert path.read_text(encoding="utf-8") == "grüße 日本"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    write_atomically(path, "new", mode=0o644)
    assert (path.read_text(), stat.S_IMODE(path.stat().st_mode)) == ("new", 0o644)
    assert names(path.parent) == ["file"]


def test_what_cannot_be_written_leaves_the_old_file_and_no_litter(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomically(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "\ud800")
    assert (path.read_text(), names(tmp_path)) == ("old", ["file"])


def test_a_folder_that_cannot_be_is_an_oserror(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OSError, match="file"):
        write_atomically(tmp_path / "file" / "below", "x")
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        write_atomically(tmp_path / "folder", "x")
    assert names(tmp_path) == ["file", "folder"]


def test_only_folders_that_are_ours_are_closed_to_others(tmp_path: Path) -> None:
    ours, empty, foreign = (tmp_path / name for name in ("ours", "empty", "foreign"))
    for folder in (ours, empty, foreign):
        folder.mkdir(mode=0o755)
    (ours / "lock").touch()
    (foreign / "letter").touch()
    for folder in (ours, empty, foreign, tmp_path / "a" / "new"):
        make_owner_folder(folder, sign="lock")
    folders = (ours, empty, foreign, tmp_path / "a" / "new")
    modes = [stat.S_IMODE(folder.stat().st_mode) for folder in folders]
    assert modes == [0o700, 0o700, 0o755, 0o700]


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB; only root on Linux can make one."""
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)],
        capture_output=True,
        check=False,
    )
    if made.returncode != 0:
        pytest.skip("a small file system cannot be mounted here")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_full_disk_leaves_the_old_file_and_no_litter(tiny: Path) -> None:
    path = tiny / "file"
    write_atomically(path, "old")
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, "x" * 100_000)
    assert (path.read_text(), names(tiny)) == ("old", ["file"])


def test_an_error_of_the_disk_names_the_path(tmp_path: Path) -> None:
    path = tmp_path / "file"
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with pytest.raises(OSError, match=f"{full.strerror}: '{path}'"), open_replacement(path):
        raise full
    assert names(tmp_path) == []


# A pipe cannot be synced, so this shows what reaches fsync. Linux knows no request 51, which is F_FULLFSYNC on macOS.
@pytest.mark.parametrize(
    ("request_number", "reaches_fsync"),
    [
        pytest.param(None, True, id="linux"),
        pytest.param(fcntl.F_GETFD, False, id="macos"),
        pytest.param(51, True, id="a file system without it"),
    ],
)
def test_a_file_is_flushed_through_the_cache_of_the_drive(
    request_number: int | None, *, reaches_fsync: bool
) -> None:
    reader, writer = os.pipe()
    try:
        with pytest.raises(OSError, match="Invalid") if reaches_fsync else nullcontext():
            sync(writer, request_number)
    finally:
        os.close(reader)
        os.close(writer)
