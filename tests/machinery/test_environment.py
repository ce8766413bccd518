"""Variables that the process environment sets for colors, traces and children."""

import subprocess

import pytest

from machinery.environment import drop_variables


def test_children_do_not_inherit_dropped_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEET_TEST_PREFIX", "/lab")
    monkeypatch.setenv("FLEET_OTHER", "kept")
    drop_variables("FLEET_TEST")
    said = subprocess.run(["/usr/bin/env"], capture_output=True, text=True, check=True).stdout
    assert "FLEET_TEST_PREFIX" not in said
    assert "FLEET_OTHER=kept" in said
