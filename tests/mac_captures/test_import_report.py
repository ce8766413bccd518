"""Archives that strangers send."""

import gzip
import io
import json
import tarfile
from pathlib import Path

import pytest

from tests.mac_captures.import_report import NAMES, BadArchiveError, import_report

RUN = {"out": "ProductName: macOS\nProductVersion: 26.2\nBuildVersion: 25C56\n", "code": 0}
TREE = {
    "format": 1,
    "model": "Mac16,11",
    "build": "25C56",
    "fleet": "1.0",
    "runs": {"user": {"sw_vers": RUN}},
}


def member(
    name: str, raw: bytes = b"{}", kind: bytes = tarfile.REGTYPE, target: str = ""
) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size, info.type, info.linkname = (len(raw) if kind == tarfile.REGTYPE else 0), kind, target
    return info, raw


def archive(path: Path, *members: tuple[tarfile.TarInfo, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as opened:
        for info, raw in members:
            opened.addfile(info, io.BytesIO(raw))
    return path


def report(path: Path, **changes: object) -> Path:
    return archive(path, member(NAMES[0], json.dumps(TREE | changes).encode()), member(NAMES[1]))


def test_a_report_becomes_captures(tmp_path: Path) -> None:
    runs = {
        "user": {"sw_vers": RUN},
        "daemon": {"sw_vers": RUN, "sysctl-wired": {"out": "5\n"}},
        "other": {"sw_vers": RUN},
    }
    folder = import_report(report(tmp_path / "mac.tar.gz", runs=runs), tmp_path)
    assert sorted(path.name for path in folder.iterdir()) == [
        "SOURCE", "expected.json", "sw_vers.txt", "sysctl-wired@daemon.txt",
    ]  # fmt: skip
    assert json.loads((folder / "expected.json").read_text()) == {
        "sw_vers": "26.2 (25C56)",
        "sysctl-wired@daemon": 5,
    }


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "../../etc", "build": "x"},
        {"model": "Mac16,11", "build": "25C56/.."},
        {"format": 2},
        {"runs": {"user": {"../x": RUN}}},
        {"runs": {"user": {"sw_vers": {"out": 5}}}},
        {"runs": [1]},
        {"model": None},
    ],
)
def test_a_report_with_other_content_is_refused(tmp_path: Path, changes: dict[str, object]) -> None:
    with pytest.raises(BadArchiveError):
        import_report(report(tmp_path / "mac.tar.gz", **changes), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mac.tar.gz"]


@pytest.mark.parametrize(
    "members",
    [
        pytest.param(
            (member(NAMES[0], kind=tarfile.SYMTYPE, target="/etc/passwd"), member(NAMES[1])),
            id="link",
        ),
        pytest.param(
            (member(NAMES[0], kind=tarfile.LNKTYPE, target="x"), member(NAMES[1])), id="hard link"
        ),
        pytest.param((member(NAMES[0], kind=tarfile.FIFOTYPE),), id="pipe"),
        pytest.param((member("mac-report/../../x"), member(NAMES[0])), id="name with dots"),
        pytest.param((member("/etc/x"), member(NAMES[0])), id="absolute name"),
        pytest.param(
            (member(NAMES[0]), member(NAMES[1]), member("mac-report/more")), id="third file"
        ),
        pytest.param((member(NAMES[0], b"[" * 100_000),), id="deep"),
        pytest.param((member(NAMES[0], b"\xff\x00"),), id="no JSON"),
        pytest.param((), id="empty"),
    ],
)
def test_a_hostile_archive_is_refused(
    tmp_path: Path, members: tuple[tuple[tarfile.TarInfo, bytes], ...]
) -> None:
    with pytest.raises(BadArchiveError):
        import_report(archive(tmp_path / "mac.tar.gz", *members), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mac.tar.gz"]


def test_a_bomb_and_a_cut_archive_are_refused(tmp_path: Path) -> None:
    bomb = tmp_path / "bomb.tar.gz"
    with gzip.open(bomb, "wb", compresslevel=1) as packed:
        for _ in range(65):
            packed.write(bytes(1 << 20))
    whole = report(tmp_path / "mac.tar.gz").read_bytes()
    cut = tmp_path / "cut.tar.gz"
    cut.write_bytes(whole[: len(whole) // 2])
    for path in (bomb, cut, tmp_path / "absent.tar.gz"):
        with pytest.raises(BadArchiveError):
            import_report(path, tmp_path)
