"""`make check-mac-wheels`: what is said about packages with and without wheels for a Mac, by the real uv."""

from pathlib import Path

import pytest

from fleetctl.bundle.lock import read_pins
from fleetctl.bundle.mac_wheels import check, render_table
from tests.support.release_wheels import Index, locked, real_uv, write_wheel


def test_a_package_without_a_wheel_for_macs_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Index.create(tmp_path / "index", monkeypatch).folder
    lock = ""
    for name, tag in (
        ("pure", "py3-none-any"),
        ("metal", "cp311-cp311-macosx_14_0_arm64"),
        ("intel", "cp311-abi3-macosx_11_0_x86_64"),
        ("newer", "cp311-abi3-macosx_15_0_arm64"),
    ):
        lock += locked(write_wheel(folder, f"{name}-1.0", {}, tag=tag))
    lock += "windows==1.0 ; sys_platform == 'win32' --hash=sha256:00\n"
    pins = read_pins(lock, source="lock")
    answers = [answer for python in ("3.11", "3.14") for answer in check(real_uv(), pins, python)]
    assert [line.split() for line in render_table(answers).splitlines()] == [
        ["PACKAGE", "3.11", "3.14"],
        ["pure==1.0", "yes", "yes"],
        ["metal==1.0", "yes", "no"],
        ["intel==1.0", "no", "no"],
        ["newer==1.0", "no", "no"],
    ]
    assert "macosx" in next(answer.error for answer in answers if answer.pin.name == "intel")
