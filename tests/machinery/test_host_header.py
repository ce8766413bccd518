"""Names in `Host` headers: this machine's own, and those of web pages."""

import socket

import pytest

from machinery import host_header

NAMES = host_header.machine_names("Studio.corp.example")


@pytest.mark.parametrize("value", [
    "localhost", "LocalHost:4100", "localhost.", "127.0.0.1:4100", "10.0.0.7:4100", "[::1]",
    "[fd00::1]:4100", "studio.corp.example:80", socket.gethostname(),
])  # fmt: skip
def test_names_and_addresses_of_this_machine_are_known(value: str) -> None:
    assert host_header.is_known(value, NAMES)


@pytest.mark.parametrize("value", [
    "", "evil.example", "evil.example:4100", "localhost.evil.example", "127.0.0.1.evil.example",
    "evil.example@localhost", "localhost:4100:1", "local host", "[::1", "[evil]", "::1", "x" * 300,
    "0x7f.1",
])  # fmt: skip
def test_other_names_are_not(value: str) -> None:
    assert not host_header.is_known(value, NAMES)
