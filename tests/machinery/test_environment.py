"""Variables that the process environment sets for colors, traces and children."""

import subprocess

import pytest

from machinery.environment import TRACE_PREFIX, drop_secrets, trace_settings

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


def test_only_children_that_trace_get_token_of_a_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=canary")
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    assert trace_settings() == {}
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp")
    assert trace_settings()["OTEL_EXPORTER_OTLP_HEADERS"] == "authorization=canary"
    drop_secrets(TRACE_PREFIX)
    said = subprocess.run(["/usr/bin/env"], capture_output=True, text=True, check=True).stdout
    assert "OTEL_" not in said
