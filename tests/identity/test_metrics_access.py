"""Access to metrics from other machines: a certificate, a ticket or the token, and nothing else."""

import ssl
from pathlib import Path
from typing import Any

import pytest

from identity.metrics_access import MetricsAccess, MetricsToken, TokenFileError
from identity.names import Role
from machinery.clock import SystemClock
from store.memory import MemoryTransport
from store.tickets import TicketChecker
from tests.support.values import present

CLOCK = SystemClock()
TOKEN = "prometheus-token-of-this-test-0123456789"


def scope(client: tuple[str, int] | None, authorization: str = "") -> dict[str, Any]:
    headers = [(b"authorization", authorization.encode())] if authorization else []
    return {"client": client, "headers": headers, "state": {}}


def access(token: MetricsToken | None = None, *, is_open: bool = False) -> MetricsAccess:
    tickets = TicketChecker(MemoryTransport(CLOCK), CLOCK, "Node/mac-1")
    roles = frozenset({Role.RECONCILER})
    return MetricsAccess(tickets=tickets, roles=roles, token=token, is_open=is_open)


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.touch(0o600)
    path.write_text(f"{TOKEN}\n")
    return path


@pytest.mark.parametrize("client", [("127.0.0.1", 5), ("127.3.0.1", 5), ("::1", 5), None])
async def test_this_machine_reads_without_a_credential(client: tuple[str, int] | None) -> None:
    assert await access().denial(scope(client)) is None


async def test_an_address_of_this_machine_is_local() -> None:
    own = {**scope(("10.0.0.9", 5)), "server": ("10.0.0.9", 4000)}
    assert await access().denial(own) is None
    assert await access().denial({**own, "client": ("10.0.0.8", 5)}) is not None


async def test_another_machine_is_told_what_it_needs() -> None:
    denial = present(await access().denial(scope(("10.0.0.9", 5))))
    assert denial.status == 401
    for word in ("role reconciler", "ticket", "--metrics-token-file", "--insecure-metrics"):
        assert word in denial.message
    assert await access(is_open=True).denial(scope(("10.0.0.9", 5))) is None


async def test_the_token_is_followed_when_its_file_changes(token_file: Path) -> None:
    token, client = MetricsToken(token_file), ("10.0.0.9", 5)
    assert await access(token).denial(scope(client, f"Bearer {TOKEN}")) is None
    wrong = present(await access(token).denial(scope(client, f"Bearer {TOKEN}x")))
    assert wrong.status == 403
    token_file.write_text(f"{TOKEN}-of-the-next-month\n")
    assert await access(token).denial(scope(client, f"Bearer {TOKEN}")) is not None
    assert await access(token).denial(scope(client, f"Bearer {TOKEN}-of-the-next-month")) is None
    token_file.write_text("")
    assert await access(token).denial(scope(client, "Bearer ")) is not None


async def test_a_stranger_s_certificate_is_no_credential() -> None:
    """A connection of TLS that identity/ has not verified has no peer."""
    found = scope(("10.0.0.9", 5))
    found["state"] = {"ssl_object": ssl.SSLObject.__new__(ssl.SSLObject)}
    assert await access().denial(found) is not None


@pytest.mark.parametrize(("content", "mode", "message"), [
    ("", 0o600, "holds no token"),
    ("short", 0o600, "26 to 512 characters"),
    (TOKEN, 0o644, "chmod 600"),
])  # fmt: skip
def test_an_unusable_token_file_is_refused(
    tmp_path: Path, content: str, mode: int, message: str
) -> None:
    path = tmp_path / "token"
    path.write_text(content)
    path.chmod(mode)
    with pytest.raises(TokenFileError, match=message):
        MetricsToken(path)
