"""Hidden details of a report, and what must still be recognised in it."""

import ipaddress
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetctl.mac_report.anonymise import Anonymiser

UUID = "6D95AAAA-0000-4000-8000-0123456789AB"


def hide(text: str, key: str = "words") -> str:
    return Anonymiser(key, hosts=["Annas-Mac-mini"], users=["anna"]).text(text)


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ('"serial_number" : "C02XXYYZZ123"', "C02XXYYZZ123"),
        ("Serial Number (system): FVFF91M9Q6L8", "FVFF91M9Q6L8"),
        ('"IOPlatformSerialNumber" = "C02XXYYZZ123"', "C02XXYYZZ123"),
        ('"mlb-serial-number" = <303132333435>', "303132333435"),
        ('"provisioning_UDID" : "00008112-000251423E78201E"', "000251423E78201E"),
        (f'"platform_UUID" : "{UUID}"', UUID),
        ("ether 14:c2:13:ec:9f:dd", "14:c2:13:ec:9f:dd"),
        ("? (192.168.1.9) at 0:1c:42:0:0:8 on en0", "0:1c:42:0:0:8"),
        ("inet 192.168.1.5 netmask 0xffffff00", "192.168.1.5"),
        ("tcp4 0 0 192.168.1.5.22 *.* LISTEN", "192.168.1.5"),
        ("inet6 fe80::10d3:b1f0:b90c:eaf4%en6 prefixlen 64", "10d3:b1f0:b90c:eaf4"),
        ("node_guid: 82ea:3735:64af:0001", "82ea:3735:64af"),
        ('"switch_uid_key" : "0x05AC897E0A474D02"', "897E0A474D02"),
        ("on annas-mac-mini.local", "annas-mac-mini"),
        ("/Users/anna/models, and user anna", "anna"),
        ("/Users/bob/models", "bob"),
        ("SSID: Cafe Central", "Cafe"),
        ("key sk-abcdefgh12345678", "abcdefgh12345678"),
        ("mail anna.b@example.org", "example.org"),
    ],
)
def test_personal_details_are_replaced(text: str, secret: str) -> None:
    anonymiser = Anonymiser("words", hosts=["Annas-Mac-mini"], users=["anna"])
    hidden = anonymiser.text(text)
    assert secret not in hidden
    assert sum(anonymiser.counts().values()) >= 1
    assert anonymiser.leaks(hidden) == []
    assert anonymiser.leaks(text)


def test_equal_values_stay_equal_and_forms_stay() -> None:
    hidden = hide(
        f"{UUID} {UUID.lower()} 00000000-0000-0000-0000-000000000000 0:1c:42:0:0:8 00:1c:42:00:00:08"
    )
    upper, lower, zero, short, long = hidden.split()
    assert upper.lower() == lower
    assert re.fullmatch(r"[0-9A-F]{8}(-[0-9A-F]{4}){3}-[0-9A-F]{12}", upper)
    assert zero == "00000000-0000-0000-0000-000000000000"
    assert [int(part, 16) for part in short.split(":")] == [
        int(part, 16) for part in long.split(":")
    ]
    assert hide("user anna") == hide("user Anna")


def test_two_macs_with_the_same_words_agree_and_others_do_not() -> None:
    assert hide(UUID, "blue chair") == hide(UUID, "blue chair") != hide(UUID, "green chair")


@pytest.mark.parametrize(
    "address", ["10.1.2.3", "172.20.1.2", "192.168.7.9", "169.254.10.1", "100.64.1.2"]
)
def test_an_address_keeps_its_class(address: str) -> None:
    hidden = hide(address)
    assert hidden != address
    for network in (
        "10.0.0.0/8",
        "172.16.0.0/12",
        "192.168.0.0/16",
        "169.254.0.0/16",
        "100.64.0.0/10",
    ):
        inside = ipaddress.ip_address(address) in ipaddress.ip_network(network)
        assert (ipaddress.ip_address(hidden) in ipaddress.ip_network(network)) == inside


@given(st.integers(0, 2**16 - 1), st.integers(0, 2**16 - 1))
def test_two_addresses_share_as_many_bits_as_before(first: int, second: int) -> None:
    base = int(ipaddress.IPv4Address("192.168.0.0"))
    before = [base + first, base + second]
    text = " ".join(str(ipaddress.IPv4Address(number)) for number in before)
    after = [int(ipaddress.IPv4Address(word)) for word in hide(text).split()]
    assert (before[0] ^ before[1]).bit_length() == (after[0] ^ after[1]).bit_length()


@pytest.mark.parametrize(
    "text",
    [
        "at 12:34:56 on 2026-01-02, 26.5.1 (25F80)", "127.0.0.1 ::1 224.0.0.251 0.0.0.0 255.255.255.0 ff02::fb",
        "id 0:0:0:0:0:0 priority 0", "netmask 0xffffff00", "proc 14:10:4", "Pages free: 12216.", "/usr/sbin/cfprefsd",
        '"current_speed_key" : "Up to 120 Gb/s"', "version 18000.61.10",
    ],
)  # fmt: skip
def test_other_words_stay(text: str) -> None:
    assert hide(text) == text


@given(st.text(max_size=200))
def test_no_text_breaks_it(text: str) -> None:
    anonymiser = Anonymiser("words", hosts=["mini"], users=["anna"])
    assert anonymiser.leaks(anonymiser.text(text)) in ([], ["user"])


def test_trees_are_hidden_in_keys_and_values() -> None:
    tree = Anonymiser("words", users=["anna"]).tree(
        {"anna": ["of anna", 1, None], "en0": {"x": UUID}}
    )
    assert "anna" not in str(tree)
    assert UUID not in str(tree)
    assert tree["en0"]
