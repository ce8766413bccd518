"""An engine's address is read as it is written, and what it could not be is refused in words."""

from pathlib import Path

import pytest

from schemas.wire.engine_address import MAX_SOCKET_BYTES, EngineAddress

LONGEST = "/" + "s" * (MAX_SOCKET_BYTES - 1)


@pytest.mark.parametrize(("url", "address", "authority"), [
    ("http://10.0.0.5:4100", EngineAddress("10.0.0.5", 4100), "10.0.0.5:4100"),
    ("http://mac.local:80", EngineAddress("mac.local", 80), "mac.local:80"),
    ("http://[fe80::1]:4100", EngineAddress("fe80::1", 4100), "[fe80::1]:4100"),
    ("unix:/s/4100.sock", EngineAddress("", 0, "/s/4100.sock"), "localhost"),
    (f"unix:{LONGEST}", EngineAddress("", 0, LONGEST), "localhost"),
])  # fmt: skip
def test_address_is_written_as_it_is_read(url: str, address: EngineAddress, authority: str) -> None:
    assert EngineAddress.parse(url) == address
    assert (address.url, address.authority) == (url, authority)


def test_an_address_with_tls_belongs_to_its_node() -> None:
    address = EngineAddress.parse("https://10.0.0.5:4100", node="mac-1")
    assert address == EngineAddress("10.0.0.5", 4100, "", "mac-1")
    assert (address.url, address.http_url) == ("https://10.0.0.5:4100",) * 2
    assert address != EngineAddress.parse("https://10.0.0.5:4100", node="mac-2")
    assert EngineAddress.parse("https://mac.local", node="mac-1").port == 443
    assert EngineAddress.parse("http://10.0.0.5:4100", node="mac-1").node == ""


def test_a_missing_port_is_that_of_http() -> None:
    assert EngineAddress.parse("http://mac.local/") == EngineAddress("mac.local", 80)


@pytest.mark.parametrize("url", [
    "", "nonsense", "https://10.0.0.5:4100", "http://10.0.0.5:99999", "http://10.0.0.5:1/v1",
    "http://10.0.0.5:1?a", "http://user@10.0.0.5:1", "http://[::1", "http://" + "a" * 2000, "unix:",
    "unix:/", "unix:relative", "unix:/a/../b", "unix:/a/./b", "unix:/a//b", "unix:/a/",
    "unix:/a\0b", "unix:/a\nb",
])  # fmt: skip
def test_other_urls_are_refused_with_the_forms_that_are_expected(url: str) -> None:
    with pytest.raises(ValueError, match=r"http://HOST:PORT or unix:/PATH"):
        EngineAddress.parse(url)


def test_a_path_beyond_the_limit_of_macos_is_refused() -> None:
    for path in (LONGEST + "s", "/" + "\u00e9" * 52):
        with pytest.raises(ValueError, match="has more than 103 bytes"):
            EngineAddress.at_socket(Path(path))
