"""Connections are counted by the address of the client."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from machinery.connection_limits import AddressLimit, ConnectionLimiter, client_network


@pytest.mark.parametrize(("host", "network"), [
    ("10.0.0.7", "10.0.0.7"),
    ("::ffff:10.0.0.7", "10.0.0.7"),
    ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
    ("fe80::1%en0", "fe80::/64"), ("", "local"), ("/run/x.sock", "local"),
])  # fmt: skip
def test_clients_are_counted_by_their_network(host: str, network: str) -> None:
    assert client_network(host) == network


def test_each_address_is_counted_alone_and_ipv6_by_network() -> None:
    refused: list[str] = []
    limit = AddressLimit(2, on_refuse=lambda: refused.append("address"))
    first, second = limit.enter("10.0.0.1"), limit.enter("10.0.0.1")
    assert limit.enter("10.0.0.1") is None
    assert limit.enter("10.0.0.2") is not None
    assert [limit.enter(f"2001:db8::{at}") is None for at in (1, 2, 3)] == [False, False, True]
    assert len(refused) == 2
    assert first is not None
    assert second is not None
    limit.leave(first)
    assert limit.enter("10.0.0.1") is not None


@pytest.mark.parametrize(
    ("host", "is_free"), [("127.0.0.1", True), ("::1", True), ("10.0.0.1", False)]
)
def test_this_machine_is_not_limited_unless_operator_says_so(host: str, *, is_free: bool) -> None:
    usual, given = AddressLimit(2), AddressLimit(1, is_local_free=False)
    assert [usual.enter(host) is None for _ in range(3)] == [False, False, not is_free]
    assert [given.enter(host) is None for _ in range(2)] == [False, True]
    assert AddressLimit(0).enter(host) == ""


@dataclass(eq=False)
class Connection:
    limiter: ConnectionLimiter
    order: int
    is_serving: bool = False
    is_verified: bool = False
    is_closed: bool = False

    @property
    def shed_order(self) -> tuple[bool, bool, float]:
        return True, self.is_verified, self.order

    def shed(self) -> None:
        self.is_closed = True
        self.limiter.leave(self)


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=40))
def test_strangers_without_a_request_are_closed_first(kinds: list[tuple[bool, bool]]) -> None:
    """The order: idle strangers, idle verified peers, and only then a refusal; never a connection with a request."""
    most = 8
    limiter = ConnectionLimiter(AddressLimit(0), lambda count: count <= most)
    opened: list[Connection] = []
    for order, (is_serving, is_verified) in enumerate(kinds):
        connection = Connection(limiter, order, is_verified=is_verified)
        before = [other for other in opened if not other.is_closed]
        refused = limiter.admit(connection, "")
        closed = [other for other in before if other.is_closed]
        assert refused is None or all(other.is_serving for other in before)
        assert not any(other.is_serving for other in closed)
        if any(other.is_verified for other in closed):
            assert all(other.is_verified for other in before if not other.is_serving)
        assert len(before) - len(closed) + (refused is None) <= most
        if refused is not None:
            limiter.leave(connection)
            continue
        connection.is_serving = is_serving
        opened.append(connection)
