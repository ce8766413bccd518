"""Variables that the process environment sets for colors, traces and children."""

import subprocess

import pytest

from machinery.environment import drop_secrets

SECRETS = (
    *("FLEET_ETCD_PASSWORD", "FLEET_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY"),
    *("OPENAI_API_KEY", "CLIENT_SECRET", "PASSWORD", "some_token"),
)


def test_children_do_not_inherit_dropped_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEET_TEST_PREFIX", "/lab")
    monkeypatch.setenv("FLEET_OTHER", "kept")
    for name in SECRETS:
        monkeypatch.setenv(name, f"canary-{name}")
    monkeypatch.setenv("FLEET_API_KEY_FILE", "/a/path")
    drop_secrets("FLEET_TEST")
    said = subprocess.run(["/usr/bin/env"], capture_output=True, text=True, check=True).stdout
    assert "FLEET_TEST_PREFIX" not in said
    assert "canary" not in said
    assert {"FLEET_OTHER=kept", "FLEET_API_KEY_FILE=/a/path"} <= set(said.splitlines())
