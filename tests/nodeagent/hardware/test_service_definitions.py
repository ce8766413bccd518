"""The values that every service has, and the differences of an installed definition."""

from typing import Any

import pytest

from fleetctl.services import systemd
from nodeagent.hardware.service_definitions import job_differences, service_name, unit_differences
from tests.support.launchd_jobs import SPEC, job

UNIT = systemd.service_unit(SPEC, is_user=False)


def test_what_fleetctl_installs_has_no_difference() -> None:
    assert job_differences(job()) == ()
    assert unit_differences(UNIT) == ()


@pytest.mark.parametrize(("different", "why"), [
    ({"AbandonProcessGroup": False}, "AbandonProcessGroup is False instead of True"),
    ({"ExitTimeOut": 5}, "ExitTimeOut is 5 instead of 30 or more"),
    ({"ExitTimeOut": None}, "ExitTimeOut is missing instead of 30 or more"),
    ({"SoftResourceLimits": {"NumberOfFiles": 256}}, "SoftResourceLimits is 256 instead of 65536"),
    ({"KeepAlive": {"SuccessfulExit": False}}, "KeepAlive is False instead of True"),
])  # fmt: skip
def test_job_that_launchd_would_kill_or_forget_differs(different: dict[str, Any], why: str) -> None:
    assert job_differences(job(**different)) == (why,)


@pytest.mark.parametrize("content", [b"", b"<plist>", b"bplist00", b"\xff" * 100])
def test_a_damaged_property_list_is_no_definition(content: bytes) -> None:
    assert job_differences(content) is None


def test_a_unit_that_systemd_would_kill_differs() -> None:
    assert unit_differences(UNIT.replace("KillMode=process", "KillMode=mixed")) == (
        "KillMode is mixed instead of process",
    )
    assert unit_differences(UNIT.replace("LimitNOFILE=65536\n", "")) == (
        "LimitNOFILE is missing instead of 65536",
    )
    assert unit_differences(UNIT.replace("TimeoutStopSec=60", "TimeoutStopSec=5")) == (
        "TimeoutStopSec is 5 instead of 30 or more",
    )


@pytest.mark.parametrize(("file", "name"), [
    ("io.mlxfleet.nodeagent.plist", "nodeagent"),
    ("mlx-fleet-gateway.service", "gateway"),
    ("io.mlxfleet.nodeagent.logrotation.plist", None),
    ("io.mlxfleet.wiredlimit.plist", None),
    ("com.apple.x.plist", None), ("sshd.service", None),
])  # fmt: skip
def test_only_services_of_the_fleet_are_looked_at(file: str, name: str | None) -> None:
    assert service_name(file) == name
