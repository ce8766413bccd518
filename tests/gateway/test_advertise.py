"""Where the reconciler is told to find a gateway."""

import pytest
from click.testing import CliRunner

from gateway import registration
from gateway.__main__ import main
from gateway.routing.table import Origin


@pytest.mark.parametrize(
    ("given", "bound", "expected"),
    [
        ("", "127.0.0.1", "http://127.0.0.1:4000"),
        ("", "mac-1.local", "http://mac-1.local:4000"),
        ("", "fd00::5", "http://[fd00::5]:4000"),
        ("10.0.0.5", "0.0.0.0", "http://10.0.0.5:4000"),
        ("10.0.0.5:80", "0.0.0.0", "http://10.0.0.5:80"),
        ("gate.lan:80", "127.0.0.1", "http://gate.lan:80"),
        ("[fd00::5]", "::", "http://[fd00::5]:4000"),
        ("[fd00::5]:80", "::", "http://[fd00::5]:80"),
    ],
)
def test_what_is_advertised(given: str, bound: str, expected: str) -> None:
    assert (
        registration.advertised_url(registration.parse_address(given), Origin(bound, 4000), ())
        == expected
    )


@pytest.mark.parametrize("everywhere", ["0.0.0.0", "::", ""])
@pytest.mark.parametrize(
    "etcd", [(), ("http://127.0.0.1:2379",), ("http://name.invalid:2379", "http://127.0.0.1:1")]
)
def test_who_listens_everywhere_is_where_the_way_to_etcd_begins(
    everywhere: str, etcd: tuple[str, ...]
) -> None:
    assert (
        registration.advertised_url(None, Origin(everywhere, 4000), etcd) == "http://127.0.0.1:4000"
    )


@pytest.mark.parametrize(
    "wrong", ["http://a:1", "a:b", "a:70000", "fd00::5", "a/b", "u@a", ":80", "a b:1:2"]
)
def test_a_wrong_address_is_refused(wrong: str) -> None:
    result = CliRunner().invoke(main, ["--advertise-address", wrong, "--etcd", "unix:/s"])
    assert result.exit_code == 2
    assert f"--advertise-address: {wrong} is no address; write HOST or HOST:PORT" in result.stderr
