"""Settings and reports of macOS in captured output."""

from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.hardware import macos_settings
from tests.support.values import present

CAPTURES = Path(__file__).parent / "captures" / "settings"


def well(name: str) -> str:
    return (CAPTURES / "well" / name).read_text()


def ill(name: str) -> str:
    return (CAPTURES / "ill" / name).read_text()


def test_only_the_settings_for_mains_power_count() -> None:
    assert macos_settings.parse_sleep_minutes(well("pmset_custom.txt")) == 0
    assert macos_settings.parse_sleep_minutes(ill("pmset_custom.txt")) == 10
    assert macos_settings.parse_low_power(well("pmset_custom.txt")) is False
    assert macos_settings.parse_low_power(ill("pmset_custom.txt")) is True


def test_a_display_that_is_on_is_no_lasting_blocker_of_sleep() -> None:
    assert macos_settings.parse_sleep_blockers(ill("pmset_assertions.txt")) == ("caffeinate",)
    assert macos_settings.parse_sleep_blockers(well("pmset_assertions.txt")) == ()


def test_the_last_sleep_is_a_time_or_never() -> None:
    slept = macos_settings.parse_timeval(ill("sleeptime.txt"))
    assert slept == datetime(2026, 11, 22, 20, 10, tzinfo=UTC)
    assert macos_settings.parse_timeval(well("sleeptime.txt")) is None


def test_the_firewall_in_both_wordings() -> None:
    assert macos_settings.parse_firewall_state(well("globalstate.txt")) == 1
    assert macos_settings.parse_firewall_state(ill("globalstate.txt")) == 2
    assert macos_settings.parse_firewall_state("Firewall is disabled. (State = 0)") == 0
    assert not macos_settings.parse_block_all(well("blockall.txt"))
    assert macos_settings.parse_block_all(ill("blockall.txt"))
    assert macos_settings.parse_firewall_apps(well("listapps.txt")) == {
        "/usr/libexec/remoted": True,
        "@PYTHON@": True,
        "/Applications/Old Game.app": False,
    }
    assert macos_settings.parse_firewall_apps(ill("listapps.txt")) == {
        "/Applications/Old Game.app": False
    }


def test_services_that_macos_does_not_start() -> None:
    ours, theirs = "io.mlxfleet.nodeagent", "com.apple.ManagedClientAgent.enrollagent"
    parse = macos_settings.parse_disabled_services
    assert parse(well("print_disabled.txt")) == frozenset((theirs,))
    assert parse(ill("print_disabled.txt")) == frozenset((theirs, ours))
    assert parse("Could not find domain for") is None
    parse = macos_settings.parse_disallowed_items
    assert parse(well("sfltool.txt")) == frozenset(("com.example.chat-helper",))
    assert parse(ill("sfltool.txt")) == frozenset(("com.muse.authservice", ours))
    assert parse("Error: not authorized") is None


def test_updates_and_filevault_are_on_off_or_unknown() -> None:
    assert macos_settings.parse_installs_updates(ill("software_update.txt")) is True
    assert macos_settings.parse_installs_updates(well("software_update.txt")) is False
    assert macos_settings.parse_installs_updates("{\n    LastResultCode = 2;\n}\n") is None
    assert macos_settings.parse_filevault(ill("fdesetup.txt")) is True
    assert macos_settings.parse_filevault(well("fdesetup.txt")) is False
    assert macos_settings.parse_filevault("Error: ...") is None


def test_the_clock_offset_has_the_sign_of_the_server() -> None:
    assert macos_settings.parse_clock_offset(well("sntp.txt")) == 0.004212
    assert macos_settings.parse_clock_offset(ill("sntp.txt")) == -93784.004212
    assert macos_settings.parse_clock_offset("sntp: Exchange failed: Timeout") is None


def test_neighbours_are_without_router_broadcast_and_silent_machines() -> None:
    neighbours = macos_settings.parse_neighbours(ill("arp.txt"), ill("route.txt"))
    assert neighbours == ("192.168.1.7",)


def test_listeners_of_both_layouts_have_their_process() -> None:
    assert list(macos_settings.parse_listeners(well("netstat.txt"))) == [(5000, 612), (5000, 612)]
    assert list(macos_settings.parse_listeners(ill("netstat.txt"))) == [
        (5000, 612),
        (4103, 99999998),
        (4104, 99999999),
    ]


def test_a_jetsam_report_names_its_victims() -> None:
    text = ill("JetsamEvent-2026-11-22-101112.ips")
    report = macos_settings.parse_jetsam(text)
    assert report == macos_settings.JetsamReport(
        at=datetime(2026, 11, 22, 9, 11, 12, tzinfo=UTC), killed=("python3.11",)
    )
    without = present(macos_settings.parse_jetsam(text.replace('"reason"', '"other"')))
    assert without.killed == ("python3.11",)  # the largest one
    assert macos_settings.parse_jetsam(text[:300]) is None


@pytest.mark.parametrize("parse", [
    macos_settings.parse_power,
    macos_settings.parse_sleep_blockers,
    macos_settings.parse_timeval,
    macos_settings.parse_firewall_state,
    macos_settings.parse_firewall_apps,
    macos_settings.parse_installs_updates,
    macos_settings.parse_clock_offset,
    macos_settings.parse_jetsam,
    lambda text: macos_settings.parse_neighbours(text, text),
    lambda text: list(macos_settings.parse_listeners(text)),
])  # fmt: skip
@given(text=st.text(alphabet='{}[]()\n\t :=.*+-0159aZ\u0660sec"', max_size=200))
def test_no_output_makes_a_parser_fail(parse: object, text: str) -> None:
    assert callable(parse)
    parse(text)
