"""The data folder of a local fleet is its owner's alone."""

import stat
from pathlib import Path

from fleetctl.fleets.data_dir import DataDir


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_new_folder_is_private(tmp_path: Path) -> None:
    folder = DataDir(tmp_path / "data")
    folder.prepare()
    assert [mode(path) for path in (folder.path, *folder.path.iterdir())] == [0o700] * 4


def test_the_folder_of_an_earlier_release_is_closed(tmp_path: Path) -> None:
    folder = DataDir(tmp_path)
    folder.path.chmod(0o755)
    (folder.path / "lock").touch()
    folder.prepare()
    assert mode(folder.path) == 0o700


def test_a_folder_with_other_content_keeps_its_mode_but_logs_are_private(tmp_path: Path) -> None:
    folder = DataDir(tmp_path)
    folder.path.chmod(0o755)
    (folder.path / "letter.txt").touch()
    folder.prepare()
    assert mode(folder.path) == 0o755
    assert mode(folder.log("gateway").parent) == 0o700
