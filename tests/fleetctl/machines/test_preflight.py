"""Tests of the preflight: every reason to refuse a machine, and every warning, alone."""

from dataclasses import replace
from typing import Any

import pytest

from fleetctl.machines.facts import MachineFacts
from fleetctl.machines.preflight import NodeContext, check_machine

MAC = MachineFacts(
    system="Darwin",
    architecture="arm64",
    version="15.6",
    build="24G84",
    hostname="studio.local",
    hardware_uuid="0d9c3a51-6e53-5f0c-9d3f-8f6c3f2b7a10",
    free_bytes=100 << 30,
    clock_offset_s=0.3,
    is_encrypted=False,
    sleep_minutes=0,
)
LINUX = replace(MAC, system="Linux", architecture="x86_64", version="Debian 12", build="", has_systemd=True)  # fmt: skip
FLEET = NodeContext(
    name="studio",
    fleet="f00d",
    machine_names={"11111111-1111-1111-1111-111111111111": "mini"},
    names=frozenset({"mini"}),
    builds=frozenset({"24G84"}),
    needed_bytes=2 << 30,
    join_addresses=("192.168.1.5:4002", "192.168.1.6:4002"),
    own_identity="",
)


def test_a_fresh_mac_is_accepted_without_a_word() -> None:
    machine = check_machine(MAC, FLEET)
    assert machine.refusals == ()
    assert machine.warnings == ()


def test_a_node_is_accepted_again() -> None:
    own = {"machine_names": {MAC.hardware_uuid: "studio"}, "names": frozenset({"studio"})}
    again = replace(FLEET, **own, is_installed=True, own_identity="mlxfleet://f00d/node/studio")  # type: ignore[arg-type]  # a table of fields
    busy = replace(MAC, listening=frozenset({4001}), free_bytes=1 << 30)
    assert check_machine(busy, again).refusals == ()


@pytest.mark.parametrize(("version", "is_warned"), [
    ("26.0", True), ("26.0.1", True), ("26.1", True), ("26.2", False), ("26.10", False),
    ("15.6", False), ("27.0", False),
])  # fmt: skip
def test_macos_26_before_26_2_is_warned_of(version: str, is_warned: bool) -> None:
    machine = check_machine(replace(MAC, version=version), FLEET)
    assert machine.refusals == ()
    assert any("need macOS 26.2" in line for line in machine.warnings) == is_warned


@pytest.mark.parametrize(
    ("facts", "fleet", "words"),
    [
        ({"architecture": "x86_64"}, {}, "needs Apple silicon"),
        ({"architecture": "x86_64", "is_translated": True}, {}, "under Rosetta"),
        ({"version": "13.7.2"}, {}, "macOS 13.7.2; mlx needs macOS 14"),
        ({"version": ""}, {}, "macOS of an unknown version"),
        ({"clock_offset_s": -90.0}, {}, "90 s behind"),
        ({"clock_offset_s": 61.0}, {}, "61 s ahead"),
        ({"free_bytes": 11 << 30}, {}, "12.0 GiB are needed"),
        ({"listening": frozenset({22, 4001})}, {}, "port 4001"),
        ({"hardware_uuid": ""}, {}, "no hardware UUID"),
        ({}, {"unreachable": ("192.168.1.5:4002", "192.168.1.6:4002")}, "cannot connect"),
        ({}, {"own_identity": "mlxfleet://beef/node/studio"}, "another fleet"),
        ({}, {"own_identity": "mlxfleet://f00d/node/old"}, "--name"),
        ({}, {"machine_names": {MAC.hardware_uuid: "old"}}, "as node/old"),
        ({}, {"name": "mini"}, "node/mini is another machine"),
    ],
)
def test_a_machine_is_refused_for_one_reason(
    facts: dict[str, Any], fleet: dict[str, Any], words: str
) -> None:
    (refusal,) = check_machine(replace(MAC, **facts), replace(FLEET, **fleet)).refusals
    assert words in refusal


def test_one_join_address_that_answers_is_enough() -> None:
    fleet = replace(FLEET, unreachable=("192.168.1.5:4002",))
    assert check_machine(MAC, fleet).refusals == ()


@pytest.mark.parametrize(
    ("is_allowed", "has_systemd", "words"),
    [(False, True, ["--allow-linux"]), (True, False, ["systemd"]), (True, True, [])],
)
def test_linux_is_for_trials(is_allowed: bool, has_systemd: bool, words: list[str]) -> None:
    fleet = replace(FLEET, is_linux_allowed=is_allowed)
    refusals = check_machine(replace(LINUX, has_systemd=has_systemd), fleet).refusals
    assert len(refusals) == len(words)
    assert all(word in one for word, one in zip(words, refusals, strict=True))


@pytest.mark.parametrize(
    ("facts", "fleet", "words"),
    [
        ({"is_encrypted": True}, {}, "FileVault"),
        ({"sleep_minutes": 10}, {}, "sleeps after 10 min"),
        ({"updates_itself": True}, {}, "installs updates by itself"),
        ({"has_firewall": True}, {}, "firewall is on"),
        ({"is_on_wifi": True}, {}, "Wi-Fi"),
        ({"is_low_power": True}, {}, "Low Power Mode"),
        ({"build": "25C56"}, {}, "build 25C56"),
        ({}, {"join_addresses": ("100.101.1.2:4002",)}, "tailnet"),
        ({"programs": frozenset({"ollama"})}, {}, "Ollama"),
        ({"programs": frozenset({"LM Studio Helper"})}, {}, "LM Studio"),
        ({"listening": frozenset({52415})}, {}, "exo"),
    ],
)
def test_what_is_only_unfavourable_is_a_warning(
    facts: dict[str, Any], fleet: dict[str, Any], words: str
) -> None:
    machine = check_machine(replace(MAC, **facts), replace(FLEET, **fleet))
    assert machine.refusals == ()
    (warning,) = machine.warnings
    assert words in warning
